"""What a registered object saves of what it works with is not said to begin anew."""

import copy

import pytest
import torch
from torch import nn

from worker_hooks.guard.guard import Guard
from worker_hooks.training.train_state import TrainState


class Average:
    """Of a model's weights, as scripts have it: it is small, so its state is copied at commits."""

    def __init__(self, net, saves):
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.saves = saves

    @torch.no_grad()
    def update(self, net):
        for mine, theirs in zip(self.net.parameters(), net.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)

    def state_dict(self):
        return {
            "nothing": {},
            "net": {"net": self.net.state_dict()},
            "copies": {key: value.clone() for key, value in self.net.state_dict().items()},
        }[self.saves]

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.fixture
def told(monkeypatch):
    """What was said of what begins anew, and whether it refuses the script."""
    found = []
    monkeypatch.setattr(
        Guard, "say_unprotected", lambda _, text, is_refused: found.append((text, is_refused))
    )
    return found


def train(saves, is_strict=False):
    net = nn.Linear(3, 2)
    average = Average(net, saves)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    state = TrainState(model=net, optimizer=optimizer, average=average)
    state._guard.env = state._guard.env._replace(is_strict=is_strict)
    for batch in state.batches(torch.randn(5, 3)):
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(net)


@pytest.mark.parametrize("saves", ["net", "copies"])
def test_an_average_whose_state_has_it_is_saved(told, saves):
    train(saves)
    assert told == []


def test_one_whose_state_lacks_it_is_named(told):
    train("nothing")
    ((text, is_refused),) = told
    assert text.startswith("`average.net` (Linear) changes while training and is not registered")
    assert text.endswith("the state_dict of `average` leaves it out: register it as well")
    assert not is_refused


def test_it_is_refused_where_nothing_may_begin_anew(told):
    train("nothing", is_strict=True)
    ((text, is_refused),) = told
    assert is_refused
    assert text.startswith("`average.net` (Linear) changes while training")
