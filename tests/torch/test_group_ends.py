"""The end of a script cannot hang: neither that of its process group, nor of a rank on its way out."""

import sys

import pytest
from support.jobs import WORKERS, Launcher

pytestmark = pytest.mark.torch
SCRIPT = WORKERS / "end_groups.py"
ENDS = 20  # without the cure, torch 2.13 hung in one of the first ten in each of twelve runs


@pytest.mark.parametrize(
    "words",
    [
        ("--worker_num=2", SCRIPT, ENDS),
        ("--worker_num=2", "--start-method=spawn", SCRIPT, ENDS),
        ("--worker_num=2", "--no-python", sys.executable, SCRIPT, ENDS, "guarded"),
    ],
    ids=["warm", "cold", "behind another program, with hooks"],
)
def test_no_end_of_a_group_hangs(msrun: Launcher, words: tuple) -> None:
    job = msrun.start(*words)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert all(f"ended {ENDS} groups" in log for log in job.logs().values())


STOPPED_AT_ITS_END = """
import atexit, os, signal

atexit.register(lambda: print("cleaned up", flush=True))
if os.environ["RANK"] == "1":  # registered before the hooks' own, so it runs after them
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)

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
    while not state.should_exit and state.step < 4:
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()


run(train, state)
dist.destroy_process_group()
"""


def test_a_rank_that_is_stopped_on_its_way_out_is_continued(msrun: Launcher) -> None:
    """The job would wait for it for ever: its training is over, and no hang is looked for."""
    script = msrun.tmp / "train.py"
    script.write_text(STOPPED_AT_ITS_END)
    job = msrun.start("--worker_num=3", script)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert "rank 1 is stopped by a signal on its way out: msrun sends it SIGCONT" in ended.err
    assert all(log.endswith("cleaned up\n") for log in job.logs().values())
