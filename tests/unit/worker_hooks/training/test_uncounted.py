"""A script that updates and never says where a step ends is told so; others cost nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worker_hooks.training import uncounted
from worker_hooks.training.uncounted import LONG_S, UPDATES, WHY, UncountedSteps


class Script:
    def __init__(self, monkeypatch) -> None:
        self.said: list[str] = []
        self.now_s = 100.0
        monkeypatch.setattr(uncounted.time, "monotonic", lambda: self.now_s)
        self.nets = [nn.Linear(1, 1) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in self.nets]
        self.steps = UncountedSteps(self.optimizers, self.said.append)

    def update(self, which: int = 0, after_s: float = LONG_S) -> None:
        self.now_s += after_s
        self.optimizers[which].step()

    def is_watched(self) -> bool:
        return any(each._optimizer_step_post_hooks for each in self.optimizers)


@pytest.fixture
def script(monkeypatch) -> Script:
    return Script(monkeypatch)


def test_it_is_said_once_after_some_updates_and_some_time(script):
    for _ in range(UPDATES - 1):
        script.update()
        assert script.said == []
    script.update()
    assert script.said == [WHY]
    assert not script.is_watched()
    script.update()
    assert script.said == [WHY]


def test_what_is_tried_out_before_training_is_no_training(script):
    for _ in range(10 * UPDATES):
        script.update(after_s=LONG_S / (10 * UPDATES))
    assert script.said == []
    script.steps.end()  # its first step is counted
    script.update()
    assert script.said == []
    assert not script.is_watched()


def test_an_update_of_each_optimizer_is_one_step(script):
    script.update(0)
    script.update(1)
    script.update(0)
    script.update(1)
    assert script.said == []
