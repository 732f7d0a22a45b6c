"""Gradients that nothing clears are named; whoever clears them, in whatever way, is left alone."""

from __future__ import annotations

import pytest
import torch
from support.one_rank import Training
from torch import nn

from worker_hooks.guard.guard import Guard
from worker_hooks.training.kept_gradients import ADD_UP


@pytest.fixture
def said(monkeypatch):
    """What msrun would say of gradients."""
    found = []

    def say(_, text, **__):
        if "gradients" in text:
            found.append(text)

    monkeypatch.setattr(Guard, "say_unprotected", say)
    return found


class Frozen(Training):
    """One whose other layer is in no optimizer."""

    def __init__(self):
        super().__init__(body=(body := nn.Linear(3, 3)))
        self.body = body

    def update(self, clear=lambda: None):
        clear()
        self.net(self.body(torch.ones(1, 3))).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_what_no_optimizer_has_and_nothing_clears_is_named_once(said):
    training = Frozen()
    for _ in training.state.batches(range(3)):
        assert len(said) == (training.state.step > 1)
        training.update()
    for _ in training.state.batches(range(3)):
        training.update()
    assert said == [ADD_UP.format("body.weight, body.bias")]


def test_a_layer_that_is_thawed_later_is_seen_in_its_first_loop(said):
    training = Frozen()
    training.body.requires_grad_(False)
    for _ in training.state.batches(range(9)):
        training.update()
    assert said == []
    training.body.requires_grad_()
    training.update()
    for _ in training.state.batches(range(2)):
        training.update()
    assert said == [ADD_UP.format("body.weight, body.bias")]


def zero_data(training):
    for each in training.body.parameters():
        if each.grad is not None:
            each.grad.data.zero_()


WAYS = {
    "none": lambda training: training.body.zero_grad(),
    "zeros": lambda training: training.body.zero_grad(set_to_none=False),
    "data": zero_data,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_cleared_before_backward_is_not(said, way):
    training = Frozen()
    for _ in training.state.batches(range(5)):
        training.update(lambda: WAYS[way](training))
    assert said == []


def test_gradients_of_another_optimizers_turn_are_not(said):
    """As in a GAN: they stay until their own turn comes, in which they are cleared first."""
    training = Training()
    other = nn.Linear(2, 1)
    turn = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in training.state.batches(range(5)):
        turn.zero_grad()
        other(training.net(torch.ones(1, 3)).detach()).sum().backward()
        turn.step()
        training.optimizer.zero_grad()
        other(training.net(torch.ones(1, 3))).sum().backward()
        training.optimizer.step()
    assert said == []


def test_of_a_step_with_several_backwards_the_sum_is_used(said):
    training = Training()
    for _ in training.state.batches(range(5)):
        training.backward()
        training.update()
    assert said == []
