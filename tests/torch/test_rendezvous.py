"""Process groups that form, and form again after a death: a store per attempt, outside the ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.free_ports import free_port
from support.jobs import WORKERS, Launcher, poll

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "allreduce.py"
SUM = "sum 6"  # of ranks 0 to 3


@pytest.mark.parametrize("method", ["auto", "spawn"])
@pytest.mark.parametrize("init", ["env", "tcp"])
def test_a_group_forms_on_a_free_port(msrun: Launcher, method: str, init: str) -> None:
    job = msrun.start("--nproc-per-node=4", f"--start-method={method}", SCRIPT, f"init={init}")
    assert job.wait().code == 0
    job.await_lines(SUM, 4)


@pytest.mark.parametrize("die", [0, 3])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_restart_forms_a_new_group(msrun: Launcher, die: int, fixed: bool) -> None:
    port = [f"--master-port={free_port()}"] if fixed else []
    init = "init=tcp" if fixed else "init=env"
    job = msrun.start("--nproc-per-node=4", "--max-restarts=1", *port, SCRIPT, f"die={die}", init)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert job.status()["attempt"] == 1
    assert sum(text.count(SUM) for text in job.logs().values()) == 4
    assert f"rank {die} was killed by SIGKILL" in ended.err


def test_the_store_outlives_its_host_for_whoever_comes_later(msrun: Launcher) -> None:
    script = msrun.tmp / "late.py"
    script.write_text(
        "import os, signal, sys, torch.distributed as dist\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "store = dist.TCPStore('localhost', int(os.environ['MASTER_PORT']), is_master=False)\n"
        "store.set('a', 'b'); print('first', flush=True); signal.pause()\n"
        "store = dist.TCPStore('localhost', int(os.environ['MASTER_PORT']), is_master=False)\n"
        "store.set('c', 'd'); print('second', store.get('c'), flush=True)\n"
    )
    job = msrun.start("--nproc-per-node=1", script)
    job.await_lines("first")
    hosts = poll(lambda: [one["pid"] for one in job.events() if one["event"] == "StoreForked"])
    os.kill(hosts[0], signal.SIGKILL)
    poll(lambda: any(event["event"] == "StoreHostExited" for event in job.events()))
    job.signal(signal.SIGUSR1)
    assert job.wait().code == 0
    job.await_lines("second b'd'")


def test_a_script_that_never_knocks_gets_no_store_host(msrun: Launcher) -> None:
    script = msrun.tmp / "alone.py"
    script.write_text("import torch; print(torch.ones(1).item())")
    job = msrun.start("--nproc-per-node=2", script)
    assert job.wait().code == 0
    assert not any(event["event"] == "StoreForked" for event in job.events())


def test_the_sample_trains_to_the_same_loss_under_msrun_and_alone(msrun: Launcher) -> None:
    sample = Path(__file__).parents[2] / "scripts/samples/mnist_ddp/train.py"
    job = msrun.start("--nproc-per-node=2", sample, "--epochs=1")
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert "accuracy" in ended.out


def test_a_quick_end_does_not_meet_a_process_group_s_thread(msrun: Launcher) -> None:
    for turn in range(4):  # 10 of 14 such jobs lost a rank to SIGABRT before leave.py waited
        job = msrun.start(
            "--nproc-per-node=8", WORKERS / "ddp_step.py", log_dir=msrun.tmp / str(turn)
        )
        ended = job.wait()
        assert ended.code == 0, ended.err
