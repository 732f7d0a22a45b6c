"""The many ways of training where less can be promised: unguarded, torn in a step, on fewer ranks.

All of them are run under torchrun, undisturbed, first by a script without any hooks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pytest
from support.jobs import WORKERS, Launcher
from support.training_kinds import RANKS, SCRIPT, Run, all_kinds, killed, msrun_of, run

from msrun.drill.fault_options import read_words
from msrun.trials.history import read
from msrun.trials.verdict import steps_lost
from worker_hooks.drill.plan import DrillPlan

pytestmark = [pytest.mark.torch, pytest.mark.warm]
PLAIN = "plain"
COMPARED = (
    *("logged_late", "seldom", "gan", "swapped", "closure", "average_logged"),
    *("late_luck", "late_stats", "captured", "clip"),
)
PARTS = 8  # of all kinds
UNGUARDED = "not running under msrun, so this run is not protected"


def by_torchrun(launcher: Launcher, name: str, kinds: Sequence[str]) -> Run:
    """Some of them: without hooks, and with hooks that nobody answers."""
    told = ("--nnodes=1", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d")
    words = (*told, "--rdzv-endpoint=localhost:0", SCRIPT, "out", f"--plain-first={PLAIN}")
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    done = run(launcher, launcher.tmp / name, *torchrun, *words, f"--kind={','.join(kinds)}")
    assert done.ended.code == 0, done.ended.out
    return done


@pytest.fixture(scope="module")
def torchrun(launcher: Launcher) -> Run:
    """Those that a test here compares with."""
    return by_torchrun(launcher, "torchrun", COMPARED)


@pytest.mark.parametrize("part", range(PARTS))
def test_under_torchrun_the_same_scripts_train_unchanged(launcher: Launcher, part: int) -> None:
    kinds = all_kinds()[part::PARTS]
    done = by_torchrun(launcher, f"torchrun-{part}", kinds)
    for kind in kinds:
        assert done.results(kind) == done.results(kind, out=PLAIN), kind
    assert done.ended.out.count(UNGUARDED) == len(kinds) > 3
    assert not (done.folder / "checkpoints").exists()


def test_under_plain_python_too(launcher: Launcher) -> None:
    some = ("accumulate", "validate", "averages", "weights_by_epoch", "workers", "stateful")
    words = ("out", f"--plain-first={PLAIN}", f"--kind={','.join(some)}")
    done = run(launcher, launcher.tmp / "python", *launcher.python, SCRIPT, *words)
    assert done.ended.code == 0, done.ended.out
    for kind in some:
        assert done.results(kind, 1) == done.results(kind, 1, out=PLAIN), kind
    assert done.ended.out.count(UNGUARDED) == len(some)


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("logged_late", "rank=1,step=7,phase=commit"),  # the schedule is behind a collective
        ("seldom", "rank=1,step=7,phase=commit"),  # what this step does besides is behind one
        ("gan", "rank=1,step=7,phase=commit"),  # one of two networks is updated
        # other weights stand in for a validation; copies that a loop's end makes may be the state
        ("swapped", "rank=2,step=5,phase=forward"),
        # gradients are evened out within the update; the others are in it by its middle, as a rule
        ("closure", "rank=1,step=6,phase=update"),
    ],
)
def test_half_a_step_is_never_saved(
    way: str, fault: str, torchrun: Run, launcher: Launcher
) -> None:
    done = killed(launcher, way, fault, "--update_grace=2")
    assert done.ended.code == 0, done.ended.out
    history = read(done.folder)
    assert len(history.strikes) == 1
    # those that had begun the update, and changed nothing yet, leave the step before it in memory
    assert [each.step for each in history.dumps] in ([], [5] if way == "closure" else [])
    # the others may have been stopped in front of their first update, as busy as the machine is
    may_be_whole = way in {"logged_late", "seldom", "gan", "swapped", "closure"}
    is_whole = may_be_whole and any(one["event"] == "ReplaceRanks" for one in history.events)
    assert ("did not reach its commit" in done.ended.out) != is_whole
    assert done.results(way) == torchrun.results(way, out=PLAIN)  # from the beginning


def test_a_step_that_halts_before_its_averages_move_goes_back_to_its_commit(
    torchrun: Run, launcher: Launcher
) -> None:
    """All that is known of it is half a step; but all of the commit before was copied."""
    way = "average_logged"  # unseen, behind a collective
    done = killed(launcher, way, "rank=1,step=7,phase=commit")
    assert done.ended.code == 0, done.ended.out
    history = read(done.folder)
    assert len(history.strikes) == 1
    assert [each["step"] for each in history.events if each["event"] == "ReplaceRanks"] == [6]
    assert steps_lost(history) == 0
    assert "did not reach its commit" not in done.ended.out
    assert done.results(way) == torchrun.results(way, out=PLAIN)


def test_a_step_with_draws_that_nobody_knows_is_refused(torchrun: Run, launcher: Launcher) -> None:
    done = killed(launcher, "late_luck", "rank=1,step=7,phase=update")
    assert done.ended.code == 0, done.ended.out
    history = read(done.folder)
    assert len(history.strikes) == 1
    # the others may have been stopped in front of their commit, and then nobody has drawn
    is_replaced = any(one["event"] == "ReplaceRanks" for one in history.events)
    assert ("what it would have drawn cannot be told" in done.ended.out) != is_replaced
    assert done.results("late_luck") == torchrun.results("late_luck", out=PLAIN)


def test_a_step_with_buffers_that_nobody_knows_is_said_before_and_refused(
    torchrun: Run, launcher: Launcher
) -> None:
    done = killed(launcher, "late_stats", "rank=1,step=7,phase=update")
    assert done.ended.code == 0, done.ended.out
    before_death, _, _ = done.ended.out.partition("was killed by SIGKILL")
    differing = "buffer `slow.1.running_mean`, buffer `slow.1.running_var` differ by rank"
    assert f"; but {differing}" in before_death
    assert "its commit, the step is not saved, and training resumes from the newest" in before_death
    history = read(done.folder)
    assert len(history.strikes) == 1
    # the others may have been stopped in front of their commit, and then nothing is lost
    is_replaced = any(one["event"] == "ReplaceRanks" for one in history.events)
    assert ("did not reach the commit of step 7" in done.ended.out) != is_replaced
    assert done.results("late_stats") == torchrun.results("late_stats", out=PLAIN)


def test_updates_that_are_replayed_from_a_graph_are_said_and_never_saved(
    torchrun: Run, launcher: Launcher
) -> None:
    done = killed(launcher, "captured", "")
    assert done.ended.code == 0, done.ended.out
    before_death, _, after = done.ended.out.partition("was killed by SIGKILL")
    assert "captured in a CUDA graph, whose replays nobody can see" in before_death
    assert "restart 1 of 1" in before_death + after
    history = read(done.folder)
    assert history.dumps == ()
    assert not [each for each in history.events if each["event"] == "ReplaceRanks"]
    assert done.results("captured") == torchrun.results("captured", out=PLAIN)


def test_the_exception_that_ended_it_all_is_in_the_log_and_in_the_report(
    launcher: Launcher, torchrun: Run
) -> None:
    fault = "rank=1,step=6,phase=forward,raise"
    done = killed(launcher, "clip", fault)
    assert done.ended.code == 0, done.ended.out
    assert "rank 1 raised DrillError: exception in rank 1 at step 6, forward" in done.ended.out
    log = (done.folder / "logs" / "worker_1.attempt_0.log").read_text()
    assert log.splitlines()[-1].endswith("DrillError: exception in rank 1 at step 6, forward")
    history = read(done.folder)
    assert steps_lost(history) == 0
    assert [each["newcomers"] for each in history.events if "newcomers" in each] == [[1]]
    assert done.results("clip") == torchrun.results("clip", out=PLAIN)


def test_a_script_can_be_told_to_leave_it(launcher: Launcher, torchrun: Run) -> None:
    folder = launcher.tmp / "off"
    words = msrun_of(launcher, f"--worker_num={RANKS}", SCRIPT, "out", "--kind=clip")
    done = run(launcher, folder, *words, MS_ENABLE_TFT="{TTP:0}")
    assert done.ended.code == 0, done.ended.out
    assert "this run is not protected: MS_ENABLE_TFT says so" in done.ended.out
    assert done.results("clip") == torchrun.results("clip", out=PLAIN)
    lines = (folder / "logs" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert not [event for event in events if event["event"] == "Registered"]


def test_half_the_ranks_go_on_where_all_stopped(launcher: Launcher) -> None:
    folder = launcher.tmp / "fewer"
    plan = DrillPlan(
        str(folder / "traces"), "", read_words("rank=3,step=5,phase=backward", "kill").faults
    )
    words = msrun_of(
        launcher, "--worker_num=4", "--on_failure=dump", WORKERS / "train_small.py", "--epochs=2"
    )
    prelude = 'mkdir traces && exec "$@"'
    environ = {"MSRUN_DRILL": plan.encode()}
    done = run(launcher, folder, "sh", "-c", prelude, "sh", *words, **environ)
    assert done.ended.code == 1
    assert done.ended.out.splitlines()[-1] == "msrun: to resume: msrun --resume"
    again = run(
        launcher,
        folder / "again",
        *("sh", "-c", 'cd .. && exec "$@"', "sh", sys.executable, "-m", "msrun"),
        *("--resume", "--worker_num=2"),
        XDG_STATE_HOME=str(folder / "state"),
    )
    assert again.ended.code == 0, again.ended.out
    assert again.ended.out.count("trained to step 16") == 2
