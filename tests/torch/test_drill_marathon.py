"""`msrun drill --marathon`: one job lives through faults of seven kinds, and ends bitwise equal.

A long one is no part of the tests: `scripts/drill --marathon 1000 --seed 1` runs it.
"""

from __future__ import annotations

import json

import pytest
from support.jobs import Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SEED = 918
SHORT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from msrun import TrainState, run

net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")


def train(state):
    model = DDP(net)
    while not state.should_exit and state.step < 16:
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()


run(train, state)
dist.destroy_process_group()
"""


def test_one_job_lives_through_faults_of_all_kinds_and_ends_bitwise_equal(msrun: Launcher) -> None:
    ended = msrun.drill("--marathon=8", f"--seed={SEED}", "--json")
    told = json.loads(ended.out)
    assert (told["broken"], ended.code) == ([], 0), ended.err
    assert (told["ok"], told["equal"], told["struck"], told["wanted"]) == (True, True, 8, 8)
    assert not msrun.marked()
    strikes = told["strikes"]
    assert [each["faults"] for each in strikes] == [
        "store host killed",
        "rank and its newcomer killed: 3",
        "several ranks killed: 0,2-3, rank left with exit code 0: 3 145 ms later",
        "msrun killed",
        "several ranks killed: 0-2",
        "rank killed: 2",
        "forkserver killed",
    ]
    replaced = [set(each["replaced"]) for each in strikes]
    assert replaced[0] == replaced[3] == replaced[6] == set()
    assert (replaced[1], replaced[4], replaced[5]) == ({3}, {0, 1, 2}, {2})
    exits = [[went["exit_code"] for went in each["exits"]] for each in strikes]
    assert exits == [[], [], [], [-9], [], [], []]
    assert sum(each["steps_lost"] for each in strikes) == 0
    assert all(each["took_s"] > 0 and not each["missed"] for each in strikes)
    end = told["end"]
    assert (end["left"], end["zombies"], end["left_files"], end["exit_code"]) == (0, 0, [], 0)


def test_a_job_of_the_users_that_ends_before_its_last_fault_is_told(msrun: Launcher) -> None:
    script = msrun.tmp / "short.py"
    script.write_text(SHORT)
    ended = msrun.drill("--marathon=50", "--json", "--", "--worker_num=2", script)
    told = json.loads(ended.out)
    assert ended.code == 1
    assert told["struck"] < 50
    (why,) = (each for each in told["broken"] if "let it train longer" in each)
    assert why.startswith("the job ended after ")
