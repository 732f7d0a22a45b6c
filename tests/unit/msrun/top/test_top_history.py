"""What `msrun top` reads out of a run's events."""

import pytest

from msrun.top.history import EventHistory, Failure


def event(name, at=0.0, **fields):
    return {"event": name, "time": at, **fields}


def exited(rank, code, job, at=10.0):
    return event("WorkerExited", at, rank=rank, exit_code=code, job=job)


def folded(*events):
    history = EventHistory(state="running")
    for each in events:
        history = history.after(each)
    return history


RAISED = event("Raised", 9.0, rank=1, error="RuntimeError: Connection closed", job="freezing")
HUNG = event("RankHung", 8.0, rank=3, why="idle for 15 s", job="running")
REPLACE = event("ReplaceRanks", 10.1, newcomers=[2], step=52, attempt=1)
RESTART = event("StartAttempt", 11.0, attempt=1, resume="/ckpt/tft_saved_checkpoints-step_52")
KILLED = "rank 2 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ((), None),
        ((exited(0, 0, "running"),), None),
        ((exited(2, -9, "freezing"),), Failure(10.0, KILLED)),
        ((exited(2, -9, "stopping"), exited(0, -15, "stopping")), Failure(10.0, KILLED)),
        ((RAISED,), Failure(9.0, "rank 1 raised RuntimeError: Connection closed", "", True)),
        ((RAISED, exited(2, -9, "dumping")), Failure(9.0, KILLED)),
        ((HUNG, exited(3, -9, "freezing")), Failure(8.0, "rank 3 hung: idle for 15 s", "")),
        ((exited(2, -9, "freezing"), RESTART), Failure(10.0, KILLED, "restarted from step 52")),
        (
            (exited(2, -9, "freezing"), REPLACE),
            Failure(10.0, KILLED, "rank 2 starts again, from step 52"),
        ),
        (
            (exited(2, -9, "freezing"), REPLACE, event("GoOn", 10.25)),
            Failure(10.0, KILLED, "rank 2 replaced at step 52 in 0.25 s"),
        ),
        (
            (exited(2, -9, "freezing"), {**REPLACE, "job": "replacing"}, exited(0, 1, "replacing", 12)),
            Failure(12.0, "rank 0 exited with code 1"),
        ),
        (
            (exited(2, -9, "freezing"), {**REPLACE, "job": "replacing"}, {**RAISED, "job": "replacing"}),
            Failure(10.0, KILLED, "rank 2 starts again, from step 52"),
        ),
        ((event("StopRequested", job="stopping"), exited(0, -15, "stopping")), None),
    ],
)  # fmt: skip
def test_the_last_failure_and_what_was_done(events, failure):
    found = folded(*events).failure
    assert (found and found[:3]) == (failure and failure[:3])


def test_hung_and_slow_ranks_the_origin_and_the_end():
    assert folded(HUNG).hung == {3}
    assert folded(HUNG, exited(3, -9, "freezing")).hung == set()
    assert folded(HUNG, REPLACE).hung == folded(HUNG, RESTART).hung == set()
    begun = folded(event("StartAttempt", attempt=0, resume="/ckpt/tft_saved_checkpoints-step_7"))
    assert begun.origin == "step 7"
    slow = event("StragglerNamed", rank=2)
    assert folded(slow).slow == {2} and folded(slow, event("StragglerEnded", rank=2)).slow == set()
    assert folded({**RESTART, "resume": None}).failure.done == "restarted from the beginning"
    assert folded({**RESTART, "resume": "/ckpt/net-3_12"}).failure.done == "restarted from net-3_12"
    assert (
        folded(event("Finish", reason="every rank exited with 0")).end == "every rank exited with 0"
    )
