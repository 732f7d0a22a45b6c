"""The memory of killed ranks is read: no step is lost, to bitwise the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from support.jobs import WORKERS, Job, Launcher, poll
from support.warm_python import WarmPython

from msrun.drill.fault_options import read_words
from msrun.top.status_pages import OpenPages
from worker_hooks.contract.process_stat import children
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.machine.kept_memory import KEEPER
from worker_hooks.storage import manifest as manifests

pytestmark = [pytest.mark.torch, pytest.mark.warm]
STEPS = 40
LIVE = ("--max-restarts=1", "--protect-memory=live", "--protect-every=1000")
SHARDED, WHOLE = WORKERS / "train_sharded.py", WORKERS / "train_whole.py"
PARTS = WORKERS / "train_parts.py"


@pytest.mark.parametrize(
    ("script", "style", "ranks", "killed"),
    [
        (WHOLE, "whole", 3, [0, 1, 2]),
        (SHARDED, "hsdp", 4, [0, 1, 2, 3]),
        (SHARDED, "fsdp", 1, [0]),
        (SHARDED, "fsdp", 2, [1]),
    ],
    ids=["all at once", "all replicas of parts", "one rank", "a part that no other rank holds"],
)
def test_nothing_that_was_committed_is_lost(
    launcher: Launcher,
    warm_python: WarmPython,
    script: Path,
    style: str,
    ranks: int,
    killed: list[int],
) -> None:
    folder = launcher.tmp / f"kept-{style}-{ranks}"
    words = (script, "--pause=0.1") if style == "whole" else (script, style, STEPS, "--pause=0.1")
    alone = launcher.tmp / f"alone-{style}-{ranks}"
    warm_python.train(alone, ranks, *(word for word in words if word != "--pause=0.1"))
    folder.mkdir()
    job = launcher.start(
        f"--worker_num={ranks}",
        *LIVE,
        *words,
        log_dir=folder / "logs",
        cwd=folder,
        XDG_STATE_HOME=str(folder / "state"),
    )
    job.await_seen("StateCopied")  # and of no step behind it there is a copy
    copied = max(one["step"] for one in job.seen("StateCopied"))
    poll(lambda: committed(job) > copied + 1)
    pids = job.pids()
    stop_alike(job, [pids[rank] for rank in range(ranks)])  # none may save anything for another one
    for rank in killed:
        os.kill(pids[rank], signal.SIGKILL)
    for rank in {*range(ranks)}.difference(killed):
        os.kill(pids[rank], signal.SIGCONT)
    ended = job.wait()
    assert ended.code == 0, ended
    (order,) = job.seen("CommitDump")
    assert order["is_kept"]
    dead = [one for one in job.seen("WorkerExited") if one["kept"]]
    assert order["step"] == min(max(one["kept"]) for one in dead if one["rank"] in killed)
    (written,) = job.seen("CheckpointWritten")
    path = Path(written["path"])
    assert manifests.verify(path, manifests.read(path)) == []
    assert (folder / f"{style}.sha").read_text() == (alone / f"{style}.sha").read_text()
    assert not [pid for pid in children(os.getpid()) if named(pid) == KEEPER]


def test_what_a_rank_holds_that_hangs_is_read_once_it_is_killed(
    launcher: Launcher, warm_python: WarmPython
) -> None:
    """No other one holds its part."""
    alone = launcher.tmp / "alone-hung"
    warm_python.train(alone, 2, SHARDED, "fsdp", STEPS)
    job = launcher.start("--worker_num=2", *LIVE, SHARDED, "fsdp", STEPS, "--pause=0.1")
    job.await_seen("StateCopied")
    copied = max(one["step"] for one in job.seen("StateCopied"))
    poll(lambda: committed(job) > copied + 1)
    os.kill(job.pids()[1], signal.SIGSTOP)
    ended = job.wait()
    assert ended.code == 0, ended
    assert job.seen("RankHung")
    (order,) = job.seen("CommitDump")
    dead = [one for one in job.seen("WorkerExited") if one["kept"]]
    assert order["is_kept"]
    assert order["step"] == min(one["step"] for one in dead)
    assert (launcher.tmp / "fsdp.sha").read_text() == (alone / "fsdp.sha").read_text()


@pytest.mark.parametrize("phase", ["backward", "update"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_orig"])
def test_within_a_step_of_fsdps_first_version_nothing_is_lost(
    launcher: Launcher, warm_python: WarmPython, kind: str, phase: str
) -> None:
    alone, folder = launcher.tmp / f"alone-{kind}", launcher.tmp / f"{kind}-{phase}"
    warm_python.train(alone, 2, PARTS, kind, STEPS)
    (folder / "traces").mkdir(parents=True)
    faults = read_words(f"rank=1,step=20,phase={phase}", "kill").faults
    job = launcher.start(
        *("--worker_num=2", *LIVE, PARTS, kind, STEPS, "--pause=0.02"),
        log_dir=folder / "logs",
        cwd=folder,
        XDG_STATE_HOME=str(folder / "state"),
        MSRUN_DRILL=DrillPlan(str(folder / "traces"), "", faults).encode(),
    )
    ended = job.wait()
    assert ended.code == 0, ended
    (order,) = job.seen("CommitDump")
    assert (order["is_kept"], order["step"]) == (True, 19)
    for rank in range(2):
        name = f"{kind}.{rank}.sha"
        assert (folder / name).read_text() == (alone / name).read_text()


def test_a_commit_that_is_noted_is_one_although_no_page_says_so(
    launcher: Launcher, warm_python: WarmPython
) -> None:
    """Both ranks die in the moment between the two."""
    alone, step = launcher.tmp / "alone", 20
    warm_python.train(alone, 2, SHARDED, "fsdp", STEPS)
    ended = launcher.run("--worker_num=2", *LIVE, SHARDED, "fsdp", STEPS, f"--die-noted={step}")
    assert ended.code == 0, ended
    job = launcher.jobs[-1]
    (order,) = job.seen("CommitDump")
    assert (order["is_kept"], order["step"]) == (True, step)
    assert {one["step"] for one in job.seen("WorkerExited") if one["kept"]} == {step}
    assert (launcher.tmp / "fsdp.sha").read_text() == (alone / "fsdp.sha").read_text()


def test_nobody_has_to_ask_for_it(launcher: Launcher, warm_python: WarmPython) -> None:
    """All ranks are killed before it is known what their notes cost."""
    alone = launcher.tmp / "alone"
    warm_python.train(alone, 2, WHOLE)
    words = ("--max-restarts=1", "--protect-every=1000", WHOLE, "--pause=0.1")
    job = launcher.start("--worker_num=2", *words)
    job.await_seen("StateCopied")  # as each rank has a value of its own; the next is far away
    copied = job.seen("StateCopied")[-1]["step"]
    poll(lambda: committed(job) > copied)
    pids = job.pids()
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for rank in range(2):
            os.kill(pids[rank], signum)
    ended = job.wait()
    assert ended.code == 0, ended
    orders = job.seen("CommitDump")  # two if one was ahead: its losses say nothing of the other
    dead = [one for one in job.seen("WorkerExited") if one["kept"]]
    assert all(order["is_kept"] for order in orders)
    assert orders[-1]["step"] >= min(max(one["kept"]) for one in dead)  # what all had committed
    assert (launcher.tmp / "whole.sha").read_text() == (alone / "whole.sha").read_text()


def test_notes_that_are_too_dear_end_and_it_is_said_why(launcher: Launcher) -> None:
    """Steps of some milliseconds; what nobody reads, nobody keeps."""
    job = launcher.start("--worker_num=1", SHARDED, "fsdp", 1_000_000)
    job.await_seen("EndNotes")
    (order,) = job.seen("EndNotes")
    poll(lambda: KEEPER not in map(named, children(job.pids()[0])))
    poll(lambda: f"is not read: {order['why']}" in job.status()["protection"]["why"])
    job.signal(signal.SIGINT)
    job.signal(signal.SIGINT)
    job.wait()


def stop_alike(job: Job, pids: list[int]) -> None:
    """Stop ranks at the same point of the same step.

    What some have committed, and others have not, may be what the script changes between the
    backward and the commit: then no rank has it for those that have not.
    """
    pages = OpenPages(job.pid)
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        poll(lambda: all(map(is_stopped, pids)))
        if len({each.beat._replace(at_ns=0) for each in pages.look().values()}) == 1:
            return
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def committed(job: Job) -> int:
    """The newest step that all ranks have committed."""
    return min((one["step"] or 0 for one in job.status()["workers"]), default=0)


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
