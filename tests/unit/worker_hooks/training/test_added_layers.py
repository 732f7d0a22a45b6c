"""What a script adds to its objects after TrainState() is said at once, and saved from then on."""

from __future__ import annotations

import pytest
from support.one_rank import Training
from torch import nn

from worker_hooks import run
from worker_hooks.guard.guard import Guard
from worker_hooks.script import notice


@pytest.fixture
def said(monkeypatch):
    """What msrun would say of objects that were changed."""
    found = []

    def say(_, text, *, is_refused):
        if "after TrainState()" in text:
            found.append((text, is_refused))

    monkeypatch.setattr(Guard, "say_unprotected", say)
    return found


class Growing(Training):
    """One whose optimizer gets another group."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(2, 2)

    def grow(self):
        self.optimizer.add_param_group({"params": self.more.parameters()})


@pytest.mark.parametrize("batch", [0, 2])
def test_it_is_said_when_it_is_added_and_no_rank_is_replaced_from_then_on(said, batch):
    training = Growing()
    if not batch:
        training.grow()

    def train(state):
        for _ in state.batches(range(4)):
            assert len(said) == (state.step >= batch)
            assert state._guard.not_replaceable_why == (notice.RESHAPED_WHY if said else "")
            if state.batch == batch:
                training.grow()
            training.update()

    run(train, training.state)
    assert said == [(notice.RESHAPED.format("optimizer"), False)]


def test_the_page_has_room_for_the_buffers_of_a_layer_that_was_added(said):
    training = Training()
    layers = training.net.layers = nn.ModuleList()
    for _ in training.state.batches(range(2)):
        training.update()
    for _ in training.state.batches(range(2)):
        if not len(layers):
            layers.append(nn.BatchNorm1d(2))
        layers[0].running_mean += 1
        training.update()
    names = [entry.name for entry, _ in training.committed.private.read(training.state.step)]
    assert "model.layers.0.running_mean" in names
    assert len(said) == 1
