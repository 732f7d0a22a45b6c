"""Only the rank that is lost is started again, and nothing is lost: real trainings, the drill judges."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.jobs import WORKERS, Job, Launcher, poll

from agent.health.stopped import JOINS
from msrun.drill.fault_options import read_words
from msrun.trials.history import DrillHistory, read
from worker_hooks.contract.process_stat import children
from worker_hooks.drill.plan import DrillPlan

pytestmark = [pytest.mark.torch, pytest.mark.warm]
RANKS = 4
SMALL = (WORKERS / "train_small.py", "--epochs=2", "--pause=0.005")  # 16 steps

# Each of these is one job, so that few have to be started. ``attempt`` grows with each replacement.
DRILLS = {
    "each phase and rank": (
        "rank=0,step=3,phase=data",
        "rank=1,step=5,phase=forward",
        "rank=2,step=7,phase=backward",
        "rank=0,step=9,phase=update",
        "rank=1,step=11,phase=commit",
        "rank=2,step=13,phase=forward,raise",
    ),
    "two at once, and one that stands still for ever": (
        "rank=0,step=4,phase=forward",
        "rank=2,step=4,phase=forward",
        "rank=1,step=8,phase=backward,signal=STOP",
    ),
    "a second death in what follows the first": (
        "rank=1,step=4,phase=backward",
        "rank=2,step=4,phase=data,attempt=1",  # who lived on, before all have joined or after it
        "rank=1,step=7,attempt=2",
        "rank=1,step=7,attempt=3",  # who came
        "rank=0,step=10,phase=forward,attempt=4",
        "rank=2,phase=dump,attempt=4",  # who was to write
    ),
    "exits with 0 amid training": (
        "rank=2,step=5,phase=forward,exit=0",
        "rank=0,step=9,phase=backward,exit=0",
        "rank=1,step=11,phase=data,exit=0",
        "rank=2,step=13,phase=commit,exit=0",
    ),
    "three deaths of one rank at one step": (
        "rank=1,step=7,phase=forward",
        "rank=1,step=7,phase=forward,attempt=1",
        "rank=1,step=7,phase=forward,attempt=2",
    ),
}


class Session(NamedTuple):
    """One ``msrun drill``: what it judged, and all that it kept."""

    outcomes: dict[str, dict]
    folder: Path
    said: str

    @property
    def reference(self) -> DrillHistory:
        return read(self.folder / "reference")

    def history(self, name: str) -> DrillHistory:
        return read(self.folder / f"{1 + list(self.outcomes).index(name):03}")


@pytest.fixture(scope="module")
def session(launcher: Launcher) -> Session:
    kills = [f"--kill={'+'.join(faults)}" for faults in DRILLS.values()]
    done = launcher.drill("--json", "--keep", *kills, "--", f"--worker_num={RANKS}", *SMALL)
    content = json.loads(done.out)
    assert content["reference"]["trouble"] == "", done.err
    assert content["reference"]["steps"] == 16
    (folder,) = launcher.tmp.glob("msrun-drill-*")
    assert not (launcher.tmp / "checkpoints").exists()
    return Session(dict(zip(DRILLS, content["drills"], strict=True)), folder, done.err)


def of(history: DrillHistory, event: str) -> list[dict]:
    return [dict(one) for one in history.events if one["event"] == event]


@pytest.mark.parametrize("name", DRILLS)
def test_nothing_is_lost(name: str, session: Session) -> None:
    told = session.outcomes[name]
    assert told["broken"] == []
    assert (told["steps_lost"], told["weights_equal"], told["runs"]) == (0, True, 1)


def test_whoever_dies_wherever_is_replaced_alone(session: Session) -> None:
    told = session.outcomes["each phase and rank"]
    assert (told["replaced"], told["restarted"], told["dump_bytes"]) == (6, 0, None)
    done = of(session.history("each phase and rank"), "ReplaceRanks")
    assert [each["newcomers"] for each in done] == [[0], [1], [2], [0], [1], [2]]
    assert [each["attempt"] for each in done] == [1, 2, 3, 4, 5, 6]
    assert "rank 2 raised DrillError: " in done[-1]["reason"]


def test_a_step_that_the_dead_rank_had_finished_is_finished_by_all(launcher: Launcher) -> None:
    kill = "--kill=rank=0,step=4,phase=data+rank=0,step=9,phase=forward"
    words = ("--json", kill, "--", f"--worker_num={RANKS}", *SMALL, "--late=0.05")
    (told,) = json.loads(launcher.drill(*words).out)["drills"]
    assert told["broken"] == []
    assert (told["steps_lost"], told["replaced"]) == (0, 2)


def test_nothing_of_a_large_state_is_lost_in_its_first_steps(launcher: Launcher) -> None:
    kills = (
        "--kill=rank=1,step=2,phase=forward+rank=1,step=3,phase=backward",
        "--kill=rank=0,step=2,phase=update",
        "--kill=rank=1,step=3,phase=commit+rank=0,step=4,phase=data,attempt=1",
    )
    words = ("--json", *kills, "--", "--worker_num=2", *SMALL, "--large")
    for told in json.loads(launcher.drill(*words).out)["drills"]:
        assert told["broken"] == []
        assert (told["steps_lost"], told["weights_equal"], told["runs"]) == (0, True, 1)
        assert told["restarted"] == 0


def test_several_at_once_and_a_hung_one_are_replaced(session: Session) -> None:
    name = "two at once, and one that stands still for ever"
    told, history = session.outcomes[name], session.history(name)
    assert (told["restarted"], told["dump_bytes"]) == (0, None)
    (hung,) = of(history, "RankHung")
    assert hung["rank"] == 1
    *first, last = of(history, "ReplaceRanks")
    assert {rank for each in first for rank in each["newcomers"]} == {0, 2}
    assert (last["newcomers"], last["survivors"]) == ([1], [0, 2, 3])
    assert "made no progress" in last["reason"]


def test_an_exit_with_0_amid_training_is_a_loss_and_is_named(session: Session) -> None:
    name = "exits with 0 amid training"
    told, history = session.outcomes[name], session.history(name)
    assert (told["replaced"], told["restarted"], told["dump_bytes"]) == (4, 0, None)
    reasons = [each["reason"] for each in of(history, "ReplaceRanks")]
    assert [each.partition(", amid training (rank ")[0] for each in reasons] == [
        "rank 2 exited with code 0 in forward of step 5",
        "rank 0 exited with code 0 in backward of step 9",
        "rank 1 exited with code 0 in data of step 11",
        "rank 2 exited with code 0 behind the update of step 13",
    ]


def test_a_death_on_the_way_makes_another_round(session: Session) -> None:
    name = "a second death in what follows the first"
    told, history = session.outcomes[name], session.history(name)
    assert (told["restarted"], told["dump_bytes"]) == (0, None)
    newcomers = [set(each["newcomers"]) for each in of(history, "ReplaceRanks")]
    assert set.union(*newcomers[:2]) == {1, 2}
    assert newcomers[2:4] == [{1}, {1}]
    assert set.union(*newcomers[4:]) == {0, 2}


def test_who_dies_three_times_at_one_step_is_not_replaced_again(session: Session) -> None:
    name = "three deaths of one rank at one step"
    told, history = session.outcomes[name], session.history(name)
    assert (told["replaced"], told["restarted"], told["step_saved"]) == (2, 1, 6)
    assert [each["step"] for each in of(history, "ReplaceRanks")] == [6, 6]
    assert "rank 1 died three times at step 6" in of(history, "StartAttempt")[-1]["reason"]


# --- by hand ----------------------------------------------------------------------------------------


def trained(launcher: Launcher, name: str, *words: object, faults: str = "") -> tuple[Job, Path]:
    """A job in a folder of its own, whose ranks trace what they compute."""
    folder = launcher.tmp / name
    for each in ("traces", "ckpt"):
        (folder / each).mkdir(parents=True)
    struck = read_words(faults, "kill").faults if faults else ()
    plan = DrillPlan(str(folder / "traces"), str(folder / "ckpt"), struck)
    job = launcher.start(
        f"--worker_num={RANKS}",
        *words,
        log_dir=folder / "logs",
        cwd=folder,
        MSRUN_DRILL=plan.encode(),
        XDG_STATE_HOME=str(folder / "state"),
    )
    return job, folder


SLOW = (WORKERS / "train_small.py", "--epochs=2", "--pause=0.05", "--say")


def test_a_stop_in_the_middle_of_it_saves_and_the_resume_goes_on(
    launcher: Launcher, session: Session
) -> None:
    job, folder = trained(launcher, "stopped", *SLOW)
    job.await_lines("step 3\n", RANKS)
    server = job.forkserver()
    os.kill(server, signal.SIGSTOP)  # nobody comes
    os.kill(job.pids()[1], signal.SIGKILL)
    job.await_seen("ReplaceRanks")
    job.signal(signal.SIGTERM)
    job.await_seen("StopRequested")
    os.kill(server, signal.SIGCONT)
    ended = job.wait()
    assert ended.code == 128 + signal.SIGTERM, ended
    (dump,) = read(folder).dumps
    assert dump.step >= 3
    again = launcher.start(
        "--resume",
        log_dir=folder / "logs",
        cwd=folder,
        XDG_STATE_HOME=str(folder / "state"),
        MSRUN_DRILL=DrillPlan(str(folder / "traces"), str(folder / "ckpt")).encode(),
    )
    assert again.wait().code == 0
    assert read(folder).finals == session.reference.finals


def test_a_dead_forkserver_changes_nothing_and_when_all_die_all_begin_anew(
    launcher: Launcher, session: Session
) -> None:
    job, folder = trained(launcher, "all", "--max-restarts=1", "--protect-memory=off", *SLOW)
    job.await_lines("step 3\n", RANKS)
    os.kill(job.forkserver(), signal.SIGKILL)
    os.kill(job.pids()[1], signal.SIGKILL)
    job.await_seen("GoOn")
    assert [one["newcomers"] for one in job.events() if one["event"] == "ReplaceRanks"] == [[1]]
    pids = poll(lambda: len(found := job.pids()) == RANKS and found)
    job.signal(signal.SIGSTOP)  # it hears of all at once
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    job.signal(signal.SIGCONT)
    ended = job.wait()
    assert ended.code == 0, ended
    history = read(folder)
    assert history.finals == session.reference.finals
    assert len(of(history, "StartAttempt")) == 2
    assert history.dumps == ()


def test_who_lives_on_keeps_its_process_its_objects_and_what_it_loaded(launcher: Launcher) -> None:
    """The loader's workers, too: the interrupted step's batch is not loaded a second time."""
    words = ("--max-restarts=0", WORKERS / "train_kept.py")
    job, folder = trained(launcher, "kept", *words, faults="rank=1,step=3,phase=backward")
    ended = job.wait()
    assert ended.code == 0, ended
    assert not list((folder / "ckpt").iterdir())
    started = [one["pid"] for one in job.events() if one["event"] == "WorkerStarted"]
    told = [json.loads((folder / f"KEPT.{rank}.json").read_text()) for rank in range(RANKS)]
    assert [each["pid"] in started for each in told] == [True] * RANKS
    assert len(started) == RANKS + 1
    share = 48 // RANKS * 2  # of two epochs
    step = told[1]["entries"][0]["step"]
    assert step in {1, 2}  # the others may have been before their second update yet
    for rank in (0, 2, 3):
        kept = told[rank]
        assert kept["entries"] == [
            {"attempt": "0", "step": 0},
            {"attempt": "1", "step": step},
        ]
        loaded = [int(line) for line in (folder / f"LOADS.{rank}").read_text().split()]
        assert len(loaded) == share
        batches = kept["handed"]
        # the batch was handed out a second time, unless this rank had not asked for it yet
        if len(batches) > share // len(batches[0]):
            assert batches[step] == batches[step + 1]
            del batches[step + 1]
        assert sorted(itertools.chain.from_iterable(batches)) == sorted(loaded)
        assert kept["workers"] == 2
        assert kept["same weights"]
    assert told[1]["entries"] == [{"attempt": "1", "step": step}]


def test_ranks_behind_a_wrapper_are_freed_and_live_on(launcher: Launcher) -> None:
    """They are msrun's grandchildren. One that is not freed is killed, and replaced as well."""
    wrapper = launcher.tmp / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    words = ("--worker_num=2", "--no-python", wrapper, sys.executable)
    job, _ = trained(launcher, "wrapped", *words, *SLOW)
    job.await_lines("step 3\n", 2)
    (rank,) = children(job.pids()[1])
    os.kill(rank, signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 0, ended
    assert [one["newcomers"] for one in job.events() if one["event"] == "ReplaceRanks"] == [[1]]


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_second_death_while_the_ranks_meet_costs_no_survivor(
    launcher: Launcher, session: Session, where: str
) -> None:
    """They wait for a store that nobody will serve: the forkserver that would start it is stopped."""
    words = (*SLOW, "--inside") if where == "inside" else SLOW
    job, folder = trained(launcher, f"met {where}", *words)
    job.await_lines("step 3\n", RANKS)
    server = job.forkserver()
    os.kill(job.pids()[1], signal.SIGKILL)
    job.await_seen("ReplaceRanks")
    job.await_seen("WorkerStarted", RANKS + 1)
    os.kill(server, signal.SIGSTOP)
    os.kill(job.pids()[1], signal.SIGKILL)
    job.await_seen("ReplaceRanks", 2)
    # for the second round; the second death may come before they have left for the first
    poll(lambda: sum(each["attempt"] == 2 for each in job.seen("Rejoining")) == RANKS - 1)
    os.kill(server, signal.SIGCONT)
    ended = job.wait()
    assert ended.code == 0, ended
    history = read(folder)
    assert [each["newcomers"] for each in of(history, "ReplaceRanks")] == [[1], [1]]
    assert history.finals == session.reference.finals


def test_when_all_die_while_one_is_replaced_all_are_replaced_from_memory(
    launcher: Launcher, session: Session
) -> None:
    job, folder = trained(launcher, "all at last", "--max-restarts=0", *SLOW)
    job.await_lines("step 3\n", RANKS)
    server, pids = job.forkserver(), job.pids()
    os.kill(server, signal.SIGSTOP)  # nobody comes before all are gone
    os.kill(pids[1], signal.SIGKILL)
    job.await_seen("ReplaceRanks")
    for rank in (0, 2, 3):
        os.kill(pids[rank], signal.SIGKILL)
    job.await_seen("WorkerExited", RANKS)
    os.kill(server, signal.SIGCONT)
    ended = job.wait()
    assert ended.code == 0, ended
    history = read(folder)
    last = of(history, "ReplaceRanks")[-1]
    assert (last["newcomers"], last["survivors"]) == ([0, 1, 2, 3], [])
    assert "replacing all ranks, from memory" in ended.err
    assert history.finals == session.reference.finals
    assert history.dumps == ()


def test_a_survivor_that_is_stopped_while_others_wait_for_it_is_replaced_as_well(
    launcher: Launcher, session: Session
) -> None:
    job, folder = trained(launcher, "stands", *SLOW)
    job.await_lines("step 3\n", RANKS)
    os.kill(job.forkserver(), signal.SIGSTOP)  # nobody comes before it is given up, too
    os.kill(job.pids()[1], signal.SIGKILL)
    job.await_seen("Rejoining", RANKS - 1)
    os.kill(job.pids()[2], signal.SIGSTOP)
    ended = job.wait()
    assert ended.code == 0, ended
    first, second = of(read(folder), "ReplaceRanks")
    assert (first["newcomers"], second["newcomers"]) == ([1], [1, 2])
    assert f"rank 2 {JOINS}" in second["reason"]
    assert read(folder).finals == session.reference.finals


def test_a_rank_that_dies_after_training_costs_no_step(
    launcher: Launcher, session: Session
) -> None:
    """The others have ended their scripts, and hold the last step; it only evaluates."""
    words = (WORKERS / "train_small.py", "--epochs=2", "--evaluate=1")
    job, folder = trained(launcher, "evaluates", "--max-restarts=0", *words)
    job.await_lines("evaluates")
    job.await_seen("RankExiting", RANKS - 1)
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 0, ended
    (begun,) = of(read(folder), "ReplaceRanks")
    assert (begun["step"], begun["newcomers"]) == (16, [0, 1, 2, 3])
    assert read(folder).finals == session.reference.finals
    assert read(folder).dumps == ()


def test_a_rank_that_is_killed_on_its_way_out_costs_nothing(
    launcher: Launcher, session: Session
) -> None:
    """Training is over on all ranks, and they were let go: nobody could save its last step."""
    words = (WORKERS / "train_small.py", "--epochs=2", "--linger=1")
    job, folder = trained(launcher, "lingers", *words)
    job.await_lines("on its way out")
    job.await_seen("WorkerExited", RANKS - 1)
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 0, ended
    assert "rank 1 was killed by SIGKILL on its way out, after the end of its script" in ended.err
    assert read(folder).finals == session.reference.finals


FAILING = """
import os, runpy, signal, sys
import torch
from worker_hooks.distributed import stacks

CUDA = '''CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.'''
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGUSR2, lambda *_: stacks.end_process(f"its device reports: {CUDA}"))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_a_rank_that_ends_itself_is_said_to_have_done_so_and_why(msrun: Launcher) -> None:
    script = msrun.tmp / "failing.py"
    script.write_text(FAILING)
    job = msrun.start("--worker_num=2", script, WORKERS / "train_small.py", "--epochs=9999")
    poll(lambda: any(each.get("step", 0) > 3 for each in job.status()["workers"]))
    os.kill(job.pids()[1], signal.SIGUSR2)
    poll(lambda: job.status()["attempt"] == 1 and job.status()["state"] == "running")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0, ended
    how = "rank 1 ended itself: its device reports: CUDA error: uncorrectable ECC error encountered"
    assert re.search(how + ".* in step [0-9]+; replacing it, rank 0 keeps running", ended.err)
    assert "SIGKILL" not in ended.err
