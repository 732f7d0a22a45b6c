"""A guarded rank whose device fails: it alone is replaced, on another device, and a resume knows."""

from __future__ import annotations

import json
import os
import signal

import pytest
from support.cuda_errors import ECC, ERROR, watchdogs
from support.jobs import WORKERS, Job, Launcher, poll

pytestmark = [pytest.mark.torch, pytest.mark.warm]

FAILING = f"""
import os, runpy, signal, sys
import torch
from worker_hooks.distributed import stacks

def abort(*_):
    os.write(2, {watchdogs().encode()!r})
    os.abort()

def end(*_):
    stacks.end_process("its device reports an error: " + {ERROR!r})

signal.signal(signal.SIGUSR2, {{"abort": abort, "end": end}}[sys.argv.pop(1)])
print("devices", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"], flush=True)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def trains(job: Job, attempt: int) -> None:
    def is_so() -> bool:
        now = job.status()
        steps = [each.get("step") or 0 for each in now["workers"]]
        return (now["attempt"], now["state"]) == (attempt, "running") and min(steps, default=0) > 3

    poll(is_so)


def first_lines(job: Job) -> dict[str, str]:
    return {name: text.partition("\n")[0] for name, text in job.logs().items()}


@pytest.mark.parametrize("how", ["abort", "end"])
def test_a_replacement_has_the_spare_device_and_the_survivor_keeps_its_list(
    msrun: Launcher, how: str
) -> None:
    script = msrun.tmp / "failing.py"
    script.write_text(FAILING)
    train = (script, how, WORKERS / "train_small.py", "--epochs=9999", "--pause=0.005")
    job = msrun.start("--worker_num=2", "--spare-devices=1", *train, CUDA_VISIBLE_DEVICES="0,1,2")
    trains(job, 0)
    os.kill(job.pids()[1], signal.SIGUSR2)
    trains(job, 1)
    assert first_lines(job)["worker_0.log"] == "devices 0,1,2 0"
    assert first_lines(job)["worker_1.log"] == "devices 0,2 1"
    (prepared,), (ordered,) = job.seen("PrepareRanks"), job.seen("ReplaceRanks")
    assert prepared["devices"] == ordered["devices"] == ["0", "2"]
    os.kill(job.pids()[1], signal.SIGKILL)  # no device failed: the same one again
    trains(job, 2)
    assert first_lines(job)["worker_1.log"] == "devices 0,2 1"
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0, ended
    said = f"msrun: device 1 of rank 1 failed ({ECC}) and is not used again: its successor gets device 2, the last spare one\n"
    assert ended.err.count(said) == 1
    assert len(job.seen("GiveUpDevices")) == 1
    if how == "abort":
        resumes(msrun, job)


def resumes(msrun: Launcher, before: Job) -> None:
    """The run that resumes it begins without the device that failed."""
    words = ("--resume", f"--log_dir={msrun.tmp / 'again'}")
    job = msrun.start(*words, log_dir=msrun.tmp / "again", CUDA_VISIBLE_DEVICES="0,1,2")
    begun = {"worker_0.log": "devices 0,2 0", "worker_1.log": "devices 0,2 1"}
    poll(lambda: first_lines(job) == begun)
    trains(job, 0)
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert "device 1 failed in the run that is resumed: not used here" in ended.err
    assert before.folder != job.folder
    records = (msrun.tmp / "state").rglob("record.json")
    known = [json.loads(path.read_text())["failed_devices"] for path in records]
    assert known == [["1"], ["1"]]  # so the next resume knows it, too
