"""Failures that a new controller hears of before it knows who lives."""

from agent.arrivals.withheld import WithheldFailures
from agent.controller import events as ev
from worker_hooks.contract import protocol

GONE, REGISTERED = ev.WorkerExited(1, 0, -9), protocol.Registered(2, 0, 7)


def withheld(*nodes):
    decided = []
    one = WithheldFailures(decided.append)
    one.begin(nodes)
    return one, decided


def test_what_is_lost_is_decided_on_after_all_nodes_have_told_what_they_have():
    one, decided = withheld("a", "b")
    one.post(GONE)
    one.post(REGISTERED)
    one.told("a")
    assert decided == [REGISTERED]
    one.told("b")
    one.told("b")
    assert decided == [REGISTERED, GONE]


def test_where_nobody_has_to_tell_or_too_late_nothing_waits():
    one, decided = withheld()
    one.post(GONE)
    assert decided == [GONE]
    one, decided = withheld("a")
    one.post(GONE)
    one.release()
    one.post(GONE)
    assert decided == [GONE, GONE]
