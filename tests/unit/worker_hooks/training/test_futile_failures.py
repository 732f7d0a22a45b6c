"""Which failed checkpoints a new rank would meet again, so that no rank is replaced for them."""

import pytest
from support.one_rank import Training

from worker_hooks.checkpoint.save_plan import CheckpointError


def of_folder():
    error = CheckpointError("the folder is a file")
    error.__cause__ = NotADirectoryError()
    return error


@pytest.mark.parametrize(
    ("error", "is_futile"),
    [
        (CheckpointError("no space left", is_passing=True), True),
        (of_folder(), True),
        (CheckpointError("its writer process was killed"), False),
        (CheckpointError("rank 1 gave no sign for 1800 s"), False),
        (ValueError("a bug"), False),
    ],
    ids=str,
)
def test_what_a_new_rank_would_meet_again(error, is_futile, monkeypatch):
    state, told = Training().state, []
    guard = state._guard
    monkeypatch.setattr(guard, "hold_exception", lambda _, *, is_futile: told.append(is_futile))
    state.hold(error)
    assert told == [is_futile]
