"""The test's thread is the listener; a thread of the test plays the main thread's part."""

import threading
import time
from functools import partial

import pytest
from support.gates import LONG_S, Rank, closed, never, training, until

from worker_hooks.guard import gate as gates
from worker_hooks.guard.gate import EjectedError, FreezeResult, Gate


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


def commit(gate):
    return lambda: gate.commit(lambda: None)


def test_a_closed_gate_lets_no_update_begin(gate):
    assert gate.close(LONG_S, never) is FreezeResult.WHOLE
    done, thread = training(gate.begin_update)
    thread.join(0.05)
    assert done == []
    assert not gate.is_torn
    gate.open()
    thread.join(LONG_S)
    assert gate.is_torn


def test_an_update_under_way_is_let_through_to_its_commit(gate):
    gate.begin_update()
    found = []
    listener = threading.Thread(target=lambda: found.append(gate.close(LONG_S, never)))
    listener.start()
    gate.end_update()
    gate.begin_update()  # a second optimizer of the same step
    gate.end_update()
    gate.commit(lambda: None)
    listener.join(LONG_S)
    assert found == [FreezeResult.WHOLE]


def test_a_commit_is_waited_for_until_the_agent_knows_what_it_shows(gate):
    gate.commit(lambda: None, tells=True)
    found = []
    listener = threading.Thread(target=lambda: found.append(gate.close(LONG_S, never)))
    listener.start()
    listener.join(0.1)
    assert found == []
    gate.told()
    listener.join(LONG_S)
    assert found == [FreezeResult.WHOLE]


@pytest.mark.parametrize("ends", ["raises", "takes_too_long", "enters_again"])
def test_a_commit_that_is_never_told_holds_nobody_up(gate, ends):
    gate.commit(lambda: None, tells=True)
    if ends == "raises":
        gate.note_raised()
    if ends == "enters_again":
        gate.reenter()
    assert closed(gate, 0.1 if ends == "takes_too_long" else LONG_S, never) is FreezeResult.WHOLE


def test_after_the_commit_the_main_thread_is_held(gate):
    gate.close(LONG_S, never)
    done, thread = training(gate.pause)
    until(lambda: gate.is_held)
    assert done == []
    gate.open()
    thread.join(LONG_S)
    assert not gate.is_held


def test_an_update_that_never_ends_is_torn(gate):
    gate.begin_update()
    assert gate.close(0.05, lambda: True) is FreezeResult.TORN


def test_an_update_under_way_is_torn_though_all_has_changed(gate, monkeypatch):
    monkeypatch.setattr(gates, "STILL_S", 0.01)
    gate.begin_update()  # the main thread waits for a device in the optimizer, say
    assert closed(gate, 0.1, lambda: True) is FreezeResult.TORN


def test_a_commit_that_is_being_noted_is_waited_for_though_all_has_changed(gate, monkeypatch):
    monkeypatch.setattr(gates, "STILL_S", 0.01)
    found = []
    listener = threading.Thread(target=lambda: found.append(gate.close(LONG_S, lambda: True)))

    def record():
        listener.start()
        listener.join(0.2)  # the main thread is still, and half of the commit is noted
        assert found == []

    gate.commit(record)
    listener.join(LONG_S)
    assert found == [FreezeResult.WHOLE]


def test_between_update_and_commit_it_is_torn_unless_all_is_complete(gate):
    gate.begin_update()
    gate.end_update()
    assert closed(gate, 3 * gates.STILL_S, never) is FreezeResult.TORN
    assert closed(gate, LONG_S, lambda: True) is FreezeResult.UPDATED


def test_a_main_thread_that_gets_on_is_waited_for(gate):
    gate.begin_update()
    gate.end_update()
    found = []
    grace_s = 4 * gates.STILL_S
    listener = threading.Thread(target=lambda: found.append(gate.close(grace_s, lambda: True)))
    listener.start()
    while listener.is_alive():
        x = 1  # this is the main thread, and it never stands at one instruction
        y = x + 1
        z = x * y
        x = z - y
    assert found == [FreezeResult.TORN]


def test_who_has_raised_is_not_waited_for(gate):
    gate.begin_update()
    gate.end_update()
    gate.note_raised()
    began = time.monotonic()
    assert gate.close(LONG_S, never) is FreezeResult.TORN
    assert gate.close(LONG_S, lambda: True) is FreezeResult.UPDATED
    assert time.monotonic() - began < LONG_S / 2


def test_holding_lets_updates_through_and_stops_at_the_commit(gate):
    gate.hold()
    done, thread = training(gate.begin_update, gate.end_update, commit(gate), gate.pause)
    until(lambda: gate.is_held)
    assert len(done) == 3
    assert gate.close(LONG_S, never) is FreezeResult.WHOLE
    gate.open()
    thread.join(LONG_S)


def test_what_the_commit_notes_is_noted_before_anybody_sees_it_whole(gate):
    noted = []
    gate.begin_update()
    gate.end_update()
    gate.commit(lambda: noted.append(gate.is_torn))
    assert noted == [True]
    assert not gate.is_torn


def test_an_open_gate_costs_no_wait(gate):
    done, thread = training(
        gate.pause, gate.begin_update, gate.end_update, commit(gate), gate.pause
    )
    thread.join(LONG_S)
    assert len(done) == 5


# --- staying at a step, and leaving -------------------------------------------------------------


def test_it_says_the_step_that_is_under_way_and_stays_at_its_end():
    rank = Rank()
    assert not rank.gate.needs_slow_path
    assert rank.gate.hold_next(never) == 1
    assert rank.gate.needs_slow_path
    done, thread = training(rank.gate.pause, rank.update, rank.commit)
    until(lambda: rank.gate.is_held)
    assert (len(done), rank.step) == (2, 1)
    rank.gate.open()
    thread.join(LONG_S)


def test_where_no_step_follows_it_stays_where_it_is():
    rank = Rank()
    rank.step = 7
    assert rank.gate.hold_next(lambda: True) == 7
    _, thread = training(rank.gate.pause)
    until(lambda: rank.gate.is_held)
    rank.gate.exit()
    thread.join(LONG_S)


def test_who_must_go_on_goes_on_and_tells_once_when_it_is_there():
    rank = Rank()
    told = []
    rank.gate.hold_next(never)
    _, thread = training(rank.update, rank.commit, rank.update, rank.commit)
    until(lambda: rank.gate.is_held)
    rank.gate.hold_at(2, lambda: told.append((rank.step, threading.current_thread())))
    until(lambda: told and rank.gate.is_held)
    assert told == [(2, thread)]
    assert not rank.gate.claim_arrival()
    assert rank.gate.close(LONG_S, never) is FreezeResult.WHOLE
    rank.gate.open()
    thread.join(LONG_S)


def test_who_is_there_already_tells_at_once():
    rank = Rank()
    told = []
    rank.gate.hold_next(never)
    _, thread = training(rank.update, rank.commit)
    until(lambda: rank.gate.is_held)
    rank.gate.hold_at(1, lambda: told.append(rank.step))
    until(lambda: told == [1])
    rank.gate.exit()
    thread.join(LONG_S)


def test_the_order_to_leave_lets_out_and_stands():
    rank = Rank()
    said = []
    rank.gate.hold_next(never)
    _, thread = training(rank.update, lambda: said.append(rank.commit()))
    until(lambda: rank.gate.is_held)
    assert rank.gate.is_stopping
    rank.gate.exit()
    thread.join(LONG_S)
    assert said == [True]
    rank.gate.close(LONG_S, never)
    assert rank.gate.pause() is True  # nobody holds it any more
    rank.gate.open()
    assert rank.gate.pause() is True
    rank.update()  # and a script that goes on nevertheless is not in the way


def test_a_death_meanwhile_closes_the_gate_and_nobody_arrives():
    rank = Rank()
    told = []
    rank.gate.hold_next(never)
    done, thread = training(rank.update, rank.commit, rank.update, rank.commit)
    until(lambda: rank.gate.is_held)
    assert rank.gate.close(LONG_S, never) is FreezeResult.WHOLE
    rank.gate.hold_at(2, lambda: told.append(2))  # it crossed the order to stand still
    assert rank.gate.close(LONG_S, never) is FreezeResult.WHOLE
    thread.join(0.05)
    assert (rank.step, told, len(done)) == (1, [], 1)
    rank.gate.open()
    thread.join(LONG_S)
    assert rank.step == 2


def test_a_gate_that_a_child_inherited_is_open(gate):
    gate.close(LONG_S, never)
    gate.reset()
    assert not gate.needs_slow_path
    gate.begin_update()


def ejected(*calls):
    for call in calls:
        with pytest.raises(EjectedError):
            call()


def test_who_is_ejected_leaves_at_each_passage_and_updates_nothing_before_the_gate_opens(gate):
    gate.eject()
    ejected(gate.begin_update, gate.pause, gate.raise_if_ejected)
    assert not gate.is_torn
    gate.reenter()
    assert gate.pause() is False
    done, thread = training(gate.begin_update)
    thread.join(0.05)
    assert done == []
    gate.open()
    thread.join(LONG_S)
    assert gate.is_torn


def test_who_is_ejected_leaves_although_the_gate_has_opened_meanwhile(gate):
    gate.eject()
    gate.open()
    ejected(gate.pause, gate.begin_update)


def test_a_gate_that_closed_meanwhile_is_closed_for_who_enters_again(gate):
    gate.eject()
    gate.open()
    gate.close(LONG_S, never)
    gate.reenter()
    done, thread = training(gate.begin_update)
    thread.join(0.05)
    assert done == []
    gate.open()
    thread.join(LONG_S)


# --- a commit that a peer came to -----------------------------------------------------------------


def behind(monkeypatch, still_s=LONG_S, *, waits=True):
    """A rank whose last commit is step 4, and that waits for its peers or for nobody."""
    monkeypatch.setattr(gates, "CATCH_UP_S", LONG_S)
    monkeypatch.setattr(gates, "STILL_S", still_s)
    monkeypatch.setattr(gates, "waits_for_peers", lambda: waits)
    rank = Rank()
    rank.step = 4
    return rank


def closing(rank, grace_s=LONG_S, newest=5, touched=never):
    """Close its gate in a thread; returns what that found, and the thread."""
    found = []
    close = partial(rank.gate.close, grace_s, never, touched, newest)
    listener = threading.Thread(target=lambda: found.append(close()))
    listener.start()
    until(lambda: rank.gate.needs_slow_path)
    return found, listener


@pytest.mark.parametrize("newest", [5, 6, 9])
def test_who_is_behind_may_come_to_the_newest_commit_and_no_further(monkeypatch, newest):
    rank = behind(monkeypatch)
    found, listener = closing(rank, newest=newest)
    _, thread = training(*[rank.update, rank.commit] * (newest - 4), rank.update)
    listener.join(LONG_S)
    assert found == [FreezeResult.WHOLE]
    assert rank.look() == (newest - 4, newest - 4, newest, newest - 4)
    rank.gate.open()
    thread.join(LONG_S)
    assert rank.half == newest - 3


@pytest.mark.parametrize(("newest", "has_raised"), [(0, False), (4, False), (6, True), (5, True)])
def test_nobody_else_is_waited_for(monkeypatch, newest, has_raised):
    rank, began = behind(monkeypatch), time.monotonic()
    if has_raised:
        rank.gate.note_raised()
    assert rank.gate.close(LONG_S, never, newest=newest) is FreezeResult.WHOLE
    assert time.monotonic() < began + LONG_S / 2
    assert rank.step == 4


@pytest.mark.parametrize(
    ("grace_s", "still_s", "waits"),
    [(LONG_S, 0.01, True), (0.05, LONG_S, True), (0.05, 0.01, False)],
)
def test_who_does_not_come_to_it_stays_behind(monkeypatch, grace_s, still_s, waits):
    rank = behind(monkeypatch, still_s, waits=waits)
    found, listener = closing(rank, grace_s)
    listener.join(LONG_S / 2)  # here the main thread stands still
    assert found == [FreezeResult.WHOLE]
    done, thread = training(rank.update)
    thread.join(0.05)
    assert (done, rank.step) == ([], 4)  # its update would come too late
    rank.gate.open()
    thread.join(LONG_S)


def test_who_stands_still_but_waits_for_no_peer_is_on_its_way(monkeypatch):
    rank = behind(monkeypatch, 0.01, waits=False)
    found, listener = closing(rank)
    listener.join(0.2)  # it is asleep, say
    assert found == []
    _, thread = training(rank.update, rank.commit)
    listener.join(LONG_S)
    assert (found, rank.step) == ([FreezeResult.WHOLE], 5)
    rank.gate.open()
    thread.join(LONG_S)


@pytest.mark.parametrize("where", ["update", "pause"])
def test_who_waits_in_a_closed_gate_goes_on_to_a_commit_that_is_known_later(monkeypatch, where):
    rank = behind(monkeypatch)
    calls = [rank.update, rank.commit, rank.update, rank.commit, rank.update]
    assert rank.gate.close(LONG_S, never, newest=4) is FreezeResult.WHOLE
    _, thread = training(*[rank.gate.pause] * (where == "pause"), *calls)
    thread.join(0.05)
    assert rank.step == 4
    found, listener = closing(rank, newest=6)
    listener.join(LONG_S)
    assert (found, rank.step) == ([FreezeResult.WHOLE], 6)
    thread.join(0.05)
    assert rank.half == 2  # it is closed again
    rank.gate.open()
    thread.join(LONG_S)
    assert rank.half == 3


def test_who_stays_for_a_graceful_exit_goes_on_to_what_a_peer_came_to(monkeypatch):
    rank = behind(monkeypatch)
    rank.gate.hold_at(4)
    _, thread = training(rank.gate.pause, rank.update, rank.commit)
    until(lambda: rank.gate.is_held)
    found, listener = closing(rank)
    listener.join(LONG_S)
    assert (found, rank.step) == ([FreezeResult.WHOLE], 5)
    rank.gate.open()
    thread.join(LONG_S)


@pytest.mark.parametrize(("newest", "is_reached"), [(4, False), (5, True)])
def test_what_the_script_has_begun_to_change_comes_to_a_commit_that_a_peer_came_to(
    monkeypatch, newest, is_reached
):
    """At the end of an epoch, say. What nobody reached is not waited for, behind a closed gate."""
    rank, began = behind(monkeypatch), time.monotonic()
    found, listener = closing(rank, newest=newest, touched=lambda: rank.step == 4)
    _, thread = training(rank.gate.pause, rank.commit, rank.update)
    listener.join(LONG_S)
    assert found == [FreezeResult.WHOLE if is_reached else FreezeResult.TORN]
    assert time.monotonic() < began + LONG_S / 2
    assert rank.step == 4 + is_reached
    rank.gate.open()
    thread.join(LONG_S)


def test_a_commit_is_not_awaited_from_who_is_held(monkeypatch):
    rank = behind(monkeypatch)
    rank.gate.hold()
    _, thread = training(rank.gate.pause)
    until(lambda: rank.gate.is_held)
    found, listener = closing(rank, touched=lambda: True)
    listener.join(LONG_S / 2)
    assert found == [FreezeResult.TORN]
    rank.gate.open()
    thread.join(LONG_S)
