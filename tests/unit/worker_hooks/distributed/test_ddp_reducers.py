"""The order of a DDP's buckets survives deaths that come before the first step after a resume."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import _global_module_registration_hooks as hooks
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.distributed import ddp_bucket_order, ddp_reducers
from worker_hooks.distributed.ddp_reducers import Reducers
from worker_hooks.distributed.module_flags import REDUCED


def made(net):
    """A DDP as far as its own constructor takes it when it has a group."""
    one = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(one)
    one.module = net
    return one


@pytest.fixture(autouse=True)
def trusting(monkeypatch):
    monkeypatch.setattr(ddp_bucket_order, "_is_alive", lambda _: True)
    monkeypatch.setattr(ddp_bucket_order, "unhook", lambda _: None)
    REDUCED.watch()  # once in a process, for good
    before = list(hooks)
    yield
    ddp_reducers.trust(())
    assert list(hooks) == before


def test_new_ones_are_known_without_a_look_at_all_objects(monkeypatch):
    nets = [torch.nn.Linear(2, 2) for _ in range(3)]
    reducers, rehearsed = Reducers(lambda: nets[:2]), []
    monkeypatch.setattr(ddp_bucket_order, "rehearse", lambda *told: rehearsed.append(told))
    monkeypatch.setattr(ddp_bucket_order, "_living", pytest.fail)
    before = made(nets[0])
    reducers.expect([[0], [1]], are_none=True)
    gone = made(nets[0])
    del gone
    alike = torch.nn.Module()
    alike.module = nets[0]
    of_others, second, first = made(nets[2]), made(nets[1]), made(nets[0])
    first.module = nets[0]  # compiled, say
    reducers.rehearse()
    assert rehearsed == [(first, [0]), (second, [1])]
    late = made(nets[0])
    assert [one() for one in reducers.forget()] == [first, second]
    assert before and of_others and late


def test_new_ones_are_known_when_the_next_peer_dies_before_the_first_step(monkeypatch):
    net = torch.nn.Linear(2, 2)
    reducers = Reducers(lambda: [net])
    monkeypatch.setattr(ddp_bucket_order, "_living", pytest.fail)
    reducers.expect([[0]], are_none=True)
    one = made(net)
    assert [each() for each in reducers.forget()] == [one]
    reducers.expect([[0]], are_none=True)
    reducers.expect([[0]], are_none=True)
    assert reducers.forget() == []


def test_after_a_resume_one_of_before_may_be_there(monkeypatch):
    net, rehearsed = torch.nn.Linear(2, 2), []
    reducers, before = Reducers(lambda: [net]), made(net)
    monkeypatch.setattr(ddp_bucket_order, "rehearse", lambda *told: rehearsed.append(told))
    reducers.expect([[0]])
    reducers.rehearse()
    assert rehearsed == [(before, [0])]


def test_who_dies_before_the_first_step_leaves_the_orders_it_came_from(monkeypatch):
    net, seen = torch.nn.Linear(2, 2), []
    reducers = Reducers(lambda: [net])
    assert reducers.orders() == []
    try:
        reducers.expect([[1, 0]])
        assert reducers.orders() == [[1, 0]]  # a peer dies while this rank waits to join
        monkeypatch.setattr(ddp_bucket_order, "find_all", lambda *_: [net])
        monkeypatch.setattr(ddp_bucket_order, "rehearse", lambda *_: seen.append(reducers.orders()))
        reducers.rehearse()
    finally:
        ddp_reducers.trust(())
    assert seen == [[[1, 0]]]  # or in the collective that this is
    assert not reducers.is_expecting


def test_uneven_counts_of_batches_are_said_once(monkeypatch):
    net = torch.nn.Linear(2, 2)
    one, reducers = made(net), Reducers(lambda: [net])
    monkeypatch.setattr(ddp_bucket_order, "find_all", lambda *_: [one])
    monkeypatch.setattr(ddp_bucket_order, "learn", lambda _: "")
    assert reducers.learn() == ""
    one._join_config = SimpleNamespace(enable=True)
    assert reducers.learn() == ddp_reducers.JOINED
    assert reducers.learn() == ""
