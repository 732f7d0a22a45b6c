"""`msrun drill --marathon`: one job of its own script lives through faults of seven kinds.

A long one is no part of the tests: `scripts/drill --marathon 1000 --seed 1` runs it.
"""

from __future__ import annotations

import json

import pytest
from support.jobs import Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SEED = (
    143  # msrun and its forkserver, store host, ranks 2, 1-3, msrun paused, exit 0 and a newcomer
)


def test_one_job_lives_through_faults_of_all_kinds_and_ends_bitwise_equal(msrun: Launcher) -> None:
    ended = msrun.drill("--marathon=8", f"--seed={SEED}", "--json")
    told = json.loads(ended.out)
    assert (told["broken"], ended.code) == ([], 0), ended.err
    assert (told["ok"], told["equal"], told["struck"], told["wanted"]) == (True, True, 8, 8)
    assert not msrun.marked()
    strikes = told["strikes"]
    assert strikes[0]["faults"].startswith("msrun killed, forkserver killed")
    assert [went["exit_code"] for each in strikes for went in each["exits"]] == [-9]
    assert [each["replaced"] for each in strikes[1:5]] == [[], [2], strikes[3]["replaced"], []]
    assert {1, 2, 3} <= set(strikes[3]["replaced"])
    assert sum(each["steps_lost"] for each in strikes) == 0
    assert all(each["took_s"] > 0 and not each["missed"] for each in strikes)
    end = told["end"]
    assert (end["left"], end["zombies"], end["left_files"], end["exit_code"]) == (0, 0, [], 0)


def test_a_job_that_ends_too_early_for_its_faults_is_told(msrun: Launcher) -> None:
    """With a script of the user's, which trains 16 steps."""
    script = msrun.tmp / "short.py"
    script.write_text(SHORT)
    ended = msrun.drill("--marathon=50", "--json", "--", "--worker_num=2", script)
    told = json.loads(ended.out)
    assert ended.code == 1
    assert told["struck"] < 50
    (why,) = (each for each in told["broken"] if "let it train longer" in each)
    assert why.startswith("the job ended after ")


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
