"""A copy is taken between a commit and the next update, whoever comes when."""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue

import pytest
from support.gates import LONG_S, Rank, Watched, never, training, until

from worker_hooks.contract import vote_board
from worker_hooks.contract.vote_board import VoteBoard
from worker_hooks.guard.gate import EjectedError, FreezeResult
from worker_hooks.guard.update_vote import UpdateVote


class Begun:
    """What a copier was told, and where the rank was then."""

    def __init__(self, rank):
        self.rank, self.told = rank, []

    def __call__(self, is_there):
        self.told.append((is_there, self.rank.step, threading.current_thread()))

    @property
    def steps(self):
        return [(is_there, step) for is_there, step, _ in self.told]


@pytest.fixture
def rank():
    one = Rank()
    yield one
    one.gate.end_copy()
    one.gate.open()


def stepping(rank, count):
    return training(*[call for _ in range(count) for call in (rank.update, rank.commit)])


def test_it_begins_right_behind_its_commit_and_no_update_begins_before_its_end(rank):
    begun = Begun(rank)
    assert rank.gate.copy_at(2, begun)
    assert rank.gate.needs_slow_path
    done, thread = stepping(rank, 4)
    until(lambda: begun.told)
    thread.join(0.05)
    assert begun.told == [(True, 2, thread)]
    assert (len(done), rank.half) == (4, 2)  # the boundary was passed, the update was not
    assert not rank.gate.is_torn
    assert rank.gate.end_copy(2)
    assert not rank.gate.needs_slow_path
    thread.join(LONG_S)
    assert (rank.step, len(begun.told)) == (4, 1)


def test_ordered_behind_the_boundary_it_begins_in_front_of_the_next_update(rank):
    begun = Begun(rank)
    rank.update()
    rank.commit()
    assert rank.gate.copy_at(1, begun)
    assert begun.told == []
    _, thread = training(rank.update)
    until(lambda: begun.told)
    thread.join(0.05)
    assert (begun.steps, rank.half) == ([(True, 1)], 1)
    rank.gate.end_copy(1)
    thread.join(LONG_S)
    assert rank.half == 2


def test_what_the_main_thread_does_between_two_updates_goes_on(rank):
    rank.gate.copy_at(0, Begun(rank))
    _, thread = training(rank.gate.pause, rank.gate.pause, rank.gate.pause)
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_step_that_was_passed_is_refused_at_once(rank):
    begun = Begun(rank)
    rank.update()
    rank.commit()
    assert not rank.gate.copy_at(0, begun)
    rank.gate.begin_update()
    assert not rank.gate.copy_at(1, begun)
    assert not rank.gate.needs_slow_path
    rank.gate.end_update()
    assert rank.gate.copy_at(2, begun)
    assert begun.told == []


def test_a_commit_under_way_is_not_passed(rank):
    begun, found = Begun(rank), []

    def note():
        rank.note()
        ordered = threading.Thread(target=lambda: found.append(rank.gate.copy_at(1, begun)))
        ordered.start()
        ordered.join()

    rank.update()
    rank.gate.commit(note)
    assert (found, begun.told) == ([True], [])
    rank.gate.pause()
    assert begun.steps == [(True, 1)]


def test_the_second_optimizer_of_a_step_is_not_in_front_of_its_copy(rank):
    begun = Begun(rank)
    rank.gate.copy_at(1, begun)
    rank.update()
    rank.update()
    assert begun.told == []
    rank.commit()
    assert begun.steps == [(True, 1)]


def test_a_half_step_is_not_copied_at_a_boundary(rank):
    begun = Begun(rank)
    rank.gate.copy_at(1, begun)
    rank.update()
    rank.commit()
    rank.gate.end_copy()
    rank.update()
    rank.gate._copy = (1, begun)  # as if it had been ordered between two of our looks
    rank.gate.needs_slow_path = True
    rank.gate.pause()
    assert begun.steps == [(True, 1), (False, 1)]
    assert not rank.gate.needs_slow_path
    rank.commit()


def test_opening_and_entering_again_drop_no_copy(rank):
    begun = Begun(rank)
    rank.gate.copy_at(1, begun)
    rank.gate.eject()
    rank.gate.reenter()
    rank.gate.open()
    assert rank.gate.needs_slow_path
    rank.update()
    rank.commit()
    rank.gate.eject()
    rank.gate.reenter()
    rank.gate.open()
    _, thread = training(rank.update)
    thread.join(0.05)
    assert (begun.steps, rank.half) == ([(True, 1)], 1)
    rank.gate.end_copy(1)
    thread.join(LONG_S)


def test_a_freeze_sees_it_whole(rank):
    rank.gate.copy_at(0, Begun(rank))
    _, thread = training(rank.gate.pause, rank.update)
    thread.join(0.05)
    began = time.monotonic()
    assert rank.gate.close(LONG_S, never) is FreezeResult.WHOLE
    rank.gate.end_copy(0)  # the gate is closed all the same
    assert time.monotonic() - began < LONG_S / 2
    thread.join(0.05)
    assert (rank.step, rank.half) == (0, 0)
    rank.gate.open()
    thread.join(LONG_S)
    assert rank.half == 1


def test_the_wait_for_a_copy_is_left_for_another_attempt(rank):
    rank.gate.copy_at(0, Begun(rank))
    left = []

    def update():
        with pytest.raises(EjectedError):
            rank.update()
        left.append(True)

    _, thread = training(update)
    thread.join(0.05)
    assert not left
    rank.gate.eject()
    thread.join(LONG_S)
    assert left == [True]


def test_a_rank_that_is_held_at_its_commit_begins_it_there(rank):
    begun = Begun(rank)
    rank.gate.hold_next(never)
    _, thread = stepping(rank, 1)
    until(lambda: rank.gate.is_held)
    rank.gate.copy_at(1, begun)
    until(lambda: begun.told)
    assert begun.told == [(True, 1, thread)]
    assert rank.gate.is_held
    rank.gate.end_copy(1)
    assert rank.gate.needs_slow_path  # it is still held
    rank.gate.open()
    thread.join(LONG_S)


def test_another_commit_meanwhile_is_told(rank):
    """The script changes weights itself, and makes a commit without an update."""
    rank.gate.copy_at(0, Begun(rank))
    rank.gate.pause()
    rank.gate.commit(rank.note)
    assert rank.gate.end_copy(0) is False


def test_an_exception_in_the_middle_begins_it_again(rank):
    begun = Begun(rank)

    def interrupted(is_there):
        begun(is_there)
        if len(begun.told) == 1:
            raise KeyboardInterrupt

    rank.gate.copy_at(0, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank.gate.pause()
    rank.gate.pause()
    assert begun.steps == [(True, 0), (True, 0)]


def test_a_gate_that_a_child_inherited_waits_for_no_copy(rank):
    rank.gate.copy_at(0, Begun(rank))
    rank.gate.pause()
    rank.gate.reset()
    assert not rank.gate.needs_slow_path
    rank.gate.begin_update()


# --- with a vote ------------------------------------------------------------------------------


@pytest.fixture
def board():
    fd = vote_board.create(2)
    board = VoteBoard(fd)
    os.close(fd)
    yield board
    board.close()


def voting(board, rank):
    rank.gate.vote = UpdateVote(board, 0, 0, set)
    board.begin(1)
    board.vote(1, 10)


def test_no_vote_is_cast_before_the_copy_is_done(board, rank):
    voting(board, rank)
    begun = Begun(rank)
    rank.gate.copy_at(0, begun)
    _, thread = training(rank.update)
    until(lambda: begun.told)
    thread.join(0.05)
    assert 0 in board.lacking(1)
    rank.gate.end_copy(0)
    thread.join(LONG_S)
    assert 0 not in board.lacking(1)
    assert rank.half == 1


def listening(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_whose_vote_was_cast_is_copied_no_more(board):
    one, found = Rank(), []
    one.gate = Watched(lambda: one.step)
    voting(board, one)
    begun = Begun(one)
    one.gate.looked = lambda: listening(lambda: found.append(one.gate.copy_at(0, begun)))
    one.update()  # the order comes between the look and the vote
    assert (found, begun.steps) == ([True], [(False, 0)])
    assert not one.gate.shut
    assert one.half == 1


# --- races ------------------------------------------------------------------------------------


def test_an_order_right_behind_the_look_of_an_update_is_late():
    one, found = Rank(), []
    one.gate = Watched(lambda: one.step)
    one.gate.looked = lambda: listening(lambda: found.append(one.gate.copy_at(0, Begun(one))))
    one.update()
    assert found == [False]
    assert not one.gate.shut


@pytest.mark.parametrize("looks", [1, 2])
def test_an_order_right_behind_a_look_of_the_commit_begins_in_front_of_the_next_update(looks):
    one, found, begun = Rank(), [], SimpleQueue()
    one.gate = Watched(lambda: one.step)
    one.update()

    def order():
        listening(lambda: found.append(one.gate.copy_at(1, begun.put)))

    def look(left):
        one.gate.looked = (lambda: look(left - 1)) if left > 1 else order

    look(looks)
    one.gate.commit(one.note)
    assert found == [True]
    copied = threading.Thread(target=lambda: (begun.get(timeout=LONG_S), one.gate.end_copy(1)))
    copied.start()
    one.update()
    copied.join(LONG_S)
    assert one.half == 2


TURNS = 800


def test_nobody_copies_a_half_update_or_another_step(_hurried):
    """This is the main thread, which never stops; a listener orders copies at any moment."""
    rank, wrong, refused, late = Rank(), [], [], []

    def order(turn):
        for _ in range(turn % 40):
            rank.look()
        step, begun = rank.step + turn % 3, SimpleQueue()
        if not rank.gate.copy_at(step, begun.put):
            refused.append(step)
            return
        if not begun.get(timeout=LONG_S):
            late.append(step)
            return
        looks = {rank.look() for _ in range(20)}
        if looks != {(step,) * 4} or not rank.gate.end_copy(step):
            wrong.append((step, looks))

    listener = threading.Thread(target=lambda: [order(turn) for turn in range(TURNS)])
    listener.start()
    while listener.is_alive():
        rank.update()
        rank.commit()
    assert wrong == []
    # nobody votes, so an order that was not refused is obeyed, unless it falls in the instant in
    # which the next commit has begun and is not to be seen yet
    assert len(late) < TURNS / 20
    assert len(refused) < TURNS / 2
    assert not rank.gate.needs_slow_path
