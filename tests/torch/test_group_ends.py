"""A script that ends its process group, and its DDP later, cannot hang, whether it has hooks or not."""

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
