"""On several nodes an update begins once the controller's node has heard that all ranks are ready."""

import contextlib
import os
import threading
import time

import pytest
from support.gates import LONG_S, Rank, until

from worker_hooks.contract import clearance_board
from worker_hooks.contract.clearance_board import FORGIVEN, MOST_MISSES, ClearanceBoard
from worker_hooks.guard import update_clearance
from worker_hooks.guard.gate import EjectedError, FreezeResult
from worker_hooks.guard.peer_wait import await_peers
from worker_hooks.guard.update_clearance import APART, STALE, UpdateClearance


@pytest.fixture
def board():
    fd = clearance_board.create()
    board = ClearanceBoard(fd)
    os.close(fd)
    yield board
    board.close()


def waiting(board, *, is_cut=False, first=1):
    """A rank whose first update needs a clearance; ``told`` and ``said`` by it."""
    one = Rank()
    one.told, one.said = [], []
    one.gate.vote = UpdateClearance(board, 3, one.told.append, one.said.append, is_cut=is_cut)
    board.begin(first, first if is_cut else 0)
    return one


def begin(*calls):
    def run():
        with contextlib.suppress(EjectedError):
            for call in calls:
                call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_an_update_begins_once_it_is_cleared(board):
    one = waiting(board)
    assert one.gate.vote.backward_begins(1) == 1
    thread = begin(one.update, one.commit)
    until(lambda: one.gate.vote.is_waiting)
    assert (one.half, one.gate.is_torn) == (0, False)
    board.clear(1)
    thread.join(LONG_S)
    assert (one.step, one.told, one.gate.vote.is_waiting) == (1, [], False)


def test_nobody_waits_before_it_has_begun(board):
    one = waiting(board, first=3)
    for step in (1, 2):
        assert one.gate.vote.backward_begins(step) == step
        one.update()
        one.commit()
    assert one.step == 2


def test_an_update_without_a_backward_is_told_of(board):
    one = waiting(board)
    board.clear(1)
    one.update()
    assert one.told == [1]


def test_where_gradients_are_accumulated_the_last_backward_counts(board):
    """Only the update shows that no other one follows."""
    one = waiting(board)
    vote = one.gate.vote
    board.clear(10)
    assert [vote.backward_begins(1) for _ in range(3)] == [1, 0, 0]
    one.update()
    one.commit()
    assert [vote.backward_begins(2) for _ in range(3)] == [0, 0, 0]
    assert one.told == [1]  # which it had seen at the update
    one.update()
    assert one.told == [1, 2]


def test_a_frozen_rank_stays_where_it_is(board):
    one = waiting(board)
    thread = begin(one.update, one.commit)
    until(lambda: one.gate.vote.is_waiting)
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    board.clear(1)  # it cannot be: this would be for ranks that are not frozen
    thread.join(0.05)
    assert (one.step, one.half) == (0, 0)
    one.gate.open()
    thread.join(LONG_S)
    assert one.step == 1


def test_who_is_behind_a_peer_goes_on_without(board):
    """The peer had a clearance: this node had not heard of it when the order came."""
    one = waiting(board)
    thread = begin(one.update, one.commit)
    until(lambda: one.gate.vote.is_waiting)
    assert one.gate.close(LONG_S, lambda: False, newest=1) is FreezeResult.WHOLE
    assert one.step == 1
    one.gate.open()
    thread.join(LONG_S)


def test_without_a_controller_a_rank_follows_its_peers(board):
    one = waiting(board)
    one.gate.hold()
    thread = begin(one.update, one.commit)
    until(lambda: one.gate.vote.is_waiting)
    one.gate.follow(0)
    thread.join(0.05)
    assert one.half == 0
    one.gate.follow(1)
    until(lambda: one.gate.is_held)
    assert one.step == 1
    one.gate.open()
    thread.join(LONG_S)


def test_a_rank_that_is_to_leave_does(board):
    one = waiting(board)
    thread = begin(one.update)
    until(lambda: one.gate.vote.is_waiting)
    one.gate.eject()
    thread.join(LONG_S)
    assert (one.half, thread.is_alive()) == (0, False)


def test_replicas_go_on_without_a_clearance_that_does_not_come(board, monkeypatch):
    monkeypatch.setattr(update_clearance, "PATIENCE_S", 0.01)
    one = waiting(board)
    for _ in range(MOST_MISSES + 3):
        one.update()
        one.commit()
    assert one.step == MOST_MISSES + 3
    assert len(one.said) == 1
    assert STALE in one.said[0]
    assert f"rank 3 has begun {MOST_MISSES} of them" in one.said[0]


def test_patience_does_not_run_out_while_a_line_is_in_doubt(board, monkeypatch):
    monkeypatch.setattr(update_clearance, "PATIENCE_S", 0.01)
    board.doubt(99)
    one = waiting(board)
    thread = begin(one.update)
    until(lambda: board.is_awaited)
    thread.join(0.2)
    assert (one.half, board.is_waived(1)) == (0, False)
    board.doubt(0)
    thread.join(LONG_S)
    assert (one.half, board.is_waived(1), board.is_awaited) == (1, True, False)


def test_a_doubt_that_does_not_end_is_waited_for_no_longer(board, monkeypatch):
    """msrun may stand still since it has written that."""
    monkeypatch.setattr(update_clearance, "PATIENCE_S", 0.01)
    board.doubt(1)
    one = waiting(board)
    one.update()
    assert board.is_waived(1)


def test_a_vote_has_its_own_patience(board, monkeypatch):
    monkeypatch.setattr(update_clearance, "VOTE_PATIENCE_S", 0.01)
    board.doubt(99)
    one = waiting(board, is_cut=True)
    one.update()
    assert board.is_waived(1)


def test_what_was_late_long_ago_counts_no_more(board):
    for step in range(1, 4 * MOST_MISSES):
        board.waive(step * 2 * FORGIVEN)
        board.clear(step * 2 * FORGIVEN + FORGIVEN)
        assert board.is_needed(10**6) is False  # it has not begun
        board.begin(1)
        assert board.is_needed(10**6)
        board.begin(0)
    for step in range(1, MOST_MISSES + 1):
        board.waive(10**6 + step)
    board.clear(10**7)  # who never comes in time is waited for no more
    board.begin(1)
    assert not board.is_needed(10**8)


def test_the_next_clearance_counts_again(board, monkeypatch):
    monkeypatch.setattr(update_clearance, "PATIENCE_S", 0.01)
    one = waiting(board)
    one.update()
    one.commit()
    monkeypatch.setattr(update_clearance, "PATIENCE_S", LONG_S)
    thread = begin(one.update)
    until(lambda: one.gate.vote.is_waiting)
    board.clear(2)
    thread.join(LONG_S)
    assert (one.half, one.said) == (2, [])


def test_a_rank_that_was_waived_for_its_node_waits_no_longer(board):
    one = waiting(board)
    thread = begin(one.update)
    until(lambda: one.gate.vote.is_waiting)
    board.waive(1)
    thread.join(LONG_S)
    assert one.half == 1


def test_nobody_decides_while_a_rank_is_held(board, monkeypatch):
    monkeypatch.setattr(update_clearance, "PATIENCE_S", 0.001)
    vote, until_s = waiting(board).gate.vote, time.monotonic() + 0.1
    vote.wait(1, lambda: time.monotonic() > until_s, lambda: True)
    assert not board.is_waived(1)
    vote.wait(1, lambda: False, lambda: False)
    assert board.is_waived(1)


def test_a_rank_is_held_while_its_gate_is_closed(board, monkeypatch):
    held = []

    def awaits(is_over, is_held, _, late):
        held.append(is_held)
        await_peers(is_over, is_held, LONG_S, late)

    monkeypatch.setattr(update_clearance, "await_peers", awaits)
    one = waiting(board)
    thread = begin(one.update)
    until(lambda: held)
    assert not held[0]()
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    assert held[0]()
    one.gate.eject()
    thread.join(LONG_S)


# --- where ranks hold different parts ---------------------------------------------------------


def test_a_vote_is_cast_by_the_update(board):
    one = waiting(board, is_cut=True)
    assert one.gate.vote.backward_begins(1) == 0
    board.clear(1)
    one.update()
    assert one.told == [1]


def test_a_vote_that_is_won_is_obeyed_behind_a_closed_gate(board):
    """All were ready, one of them before it died; this rank has yet to look."""
    one = waiting(board, is_cut=True)
    thread = begin(one.update, one.commit)
    until(lambda: one.told == [1])
    board.clear(1)
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    assert (one.step, one.half) == (1, 1)
    one.gate.open()
    thread.join(LONG_S)


def test_a_vote_that_is_lost_leaves_the_rank_where_it_was(board):
    one = waiting(board, is_cut=True)
    thread = begin(one.update)
    until(lambda: one.gate.vote.is_waiting)
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    assert one.step == 0
    one.gate.eject()
    thread.join(LONG_S)
    assert one.half == 0


def test_a_clearance_is_no_vote_before_all_have_agreed_on_that(board):
    """Others are ready as their backward begins, which says nothing of their gradients."""
    one = waiting(board, is_cut=True)
    board.begin(1, 0)
    board.clear(5)
    assert not one.gate.vote.result(3)
    board.begin(1, 4)
    assert [one.gate.vote.result(step) for step in (3, 4, 6)] == [False, True, False]


def test_a_vote_that_does_not_come_is_said(board, monkeypatch):
    monkeypatch.setattr(update_clearance, "VOTE_PATIENCE_S", 0.01)
    one = waiting(board, is_cut=True)
    for _ in range(MOST_MISSES + 1):
        one.update()
        one.commit()
    assert APART in one.said[0]


def test_msrun_that_does_not_read_is_told_again(board):
    def tell(_):
        raise BlockingIOError

    one = waiting(board)
    one.gate.vote = vote = UpdateClearance(board, 0, tell, one.said.append, is_cut=True)
    board.clear(9)
    one.update()
    vote._tell = one.told.append
    vote.cast(1)
    assert one.told == [1]


def test_a_foreign_file_is_no_board(tmp_path):
    for size in (8, 64):
        with open(tmp_path / "x", "wb+") as file:
            file.write(bytes(size))
            file.flush()
            with pytest.raises(ValueError, match="not a clearance board"):
                ClearanceBoard(file.fileno())
