"""The order of a DDP's buckets survives deaths that come before the first step after a resume."""

import torch

from worker_hooks import ddp, ddp_sync
from worker_hooks.reducers import Reducers


def test_who_dies_before_the_first_step_leaves_the_orders_it_came_from(monkeypatch):
    net, seen = torch.nn.Linear(2, 2), []
    reducers = Reducers(lambda: [net])
    assert reducers.orders() == []
    try:
        reducers.expect([[1, 0]])
        assert reducers.orders() == [[1, 0]]  # a peer dies while this rank waits to join
        monkeypatch.setattr(ddp, "find_all", lambda _: [net])
        monkeypatch.setattr(ddp, "rehearse", lambda *_: seen.append(reducers.orders()))
        reducers.rehearse()
    finally:
        ddp_sync.trust(())
    assert seen == [[[1, 0]]]  # or in the collective that this is
    assert not reducers.is_expecting
