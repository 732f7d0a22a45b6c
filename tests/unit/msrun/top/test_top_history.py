"""What `msrun top` reads out of a run's events."""

from msrun.top.history import EventHistory


def event(name, at=0.0, **fields):
    return {"event": name, "time": at, **fields}


def exited(rank, code, job, at=10.0):
    return event("WorkerExited", at, rank=rank, exit_code=code, job=job)


def folded(*events):
    history = EventHistory()
    for each in events:
        history = history.after(each)
    return history


HUNG = event("RankHung", 8.0, rank=3, why="idle for 15 s", job="running")
REPLACE = event("ReplaceRanks", 10.1, newcomers=[2], step=52, attempt=1)
RESTART = event("StartAttempt", 11.0, attempt=1, resume="/ckpt/tft_saved_checkpoints-step_52")


def test_hung_and_slow_ranks_and_the_end():
    assert folded(HUNG).hung == {3}
    assert folded(HUNG, exited(3, -9, "freezing")).hung == set()
    assert folded(HUNG, REPLACE).hung == folded(HUNG, RESTART).hung == set()
    slow = event("StragglerNamed", rank=2)
    assert folded(slow).slow == {2} and folded(slow, event("StragglerEnded", rank=2)).slow == set()
    assert (
        folded(event("Finish", reason="every rank exited with 0")).end == "every rank exited with 0"
    )
