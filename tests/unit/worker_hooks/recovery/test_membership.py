"""A rank that can be replaced: what it does as its training function is entered."""

import sys
from types import SimpleNamespace

from worker_hooks.distributed import process_group, store_connection
from worker_hooks.guard.gate import Gate
from worker_hooks.recovery.rejoin import Membership


def test_stores_are_reached_in_short_tries_from_then_on(monkeypatch):
    rendezvous = sys.modules[store_connection._MODULE]
    before = getattr(rendezvous, store_connection._FACTORY)
    monkeypatch.setattr(rendezvous, store_connection._FACTORY, before)  # and put back
    monkeypatch.setattr(process_group, "not_replaceable_why", lambda *_: "")
    monkeypatch.setattr(process_group, "count", lambda: 1)
    monkeypatch.setattr(process_group, "present", lambda: None)
    guard = SimpleNamespace(env=None, is_on=False, gate=Gate(lambda: 0))
    one = Membership(guard, list)
    guard.is_on = True
    one.begin()
    assert guard.not_replaceable_why == ""
    assert getattr(rendezvous, store_connection._FACTORY) is not before
