"""The loss that is kept at each commit: of whatever a script calls its loss, nothing raises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.one_rank import Training


class Sharded(torch.Tensor):
    """As a DTensor: its value is known after a collective only."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.item:
            raise AssertionError("a collective")
        return super().__torch_function__(function, types, args, kwargs or {})


ODD = {
    "a tuple": (torch.tensor(1.0), torch.tensor(2.0)),
    "a dict": {"ce": 1.0},
    "an array": np.array([1.0, 2.0]),
    "a text": "0.5",
    "a complex number": 1 + 2j,
    "a complex tensor": torch.tensor(1 + 2j),
    "a tensor of two": torch.tensor([1.0, 2.0]),
    "a sharded tensor": torch.tensor(1.0).as_subclass(Sharded),
    "too large": 10**400,
    "on no device": torch.empty((), device="meta"),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
def test_an_odd_loss_is_not_kept_and_raises_nowhere(value):
    training = Training()
    for _ in training.state.batches(range(2)):
        loss = training.net(torch.ones(1, 3)).square().sum()
        training.state.loss = value
        loss.backward()
        training.optimizer.step()
        training.state.loss = value
    assert training.state.step == 2
    assert training.state._loop.tracker.loss_field() == b""


PLAIN = {
    "a tensor": torch.tensor(0.5, requires_grad=True),
    "one of one": torch.tensor([0.5]),
    "a number": 0.5,
    "numpy's": np.float32(0.5),
    "a half": torch.tensor(0.5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_number_is_kept(value):
    training = Training()
    tracker = training.state._loop.tracker
    training.state.loss = value
    assert tracker.loss_field() == b', "loss": "%s"' % (0.5).hex().encode()


def test_a_backward_that_begins_at_a_complex_number_tells_no_loss():
    training = Training()
    for _ in training.state.batches(range(1)):
        loss = training.net(torch.ones(1, 3)).square().sum()
        torch.complex(loss, loss).backward(torch.tensor(1 + 0j))
        assert training.state.loss is None
        training.optimizer.step()
    assert training.state.step == 1
