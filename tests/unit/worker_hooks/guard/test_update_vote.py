"""Ranks that hold different parts of the state make an update all together, or none of them does."""

import contextlib
import os
import random
import threading
import time

import pytest
from support.gates import LONG_S, Rank, until

from worker_hooks.contract import vote_board
from worker_hooks.contract.vote_board import VoteBoard
from worker_hooks.guard import update_vote
from worker_hooks.guard.gate import EjectedError, FreezeResult
from worker_hooks.guard.update_vote import UpdateVote

RANKS = 4


@pytest.fixture
def board():
    fd = vote_board.create(RANKS)
    board = VoteBoard(fd)
    os.close(fd)
    yield board
    board.close()


def voting(board, rank, gone=(), first=1):
    one = Rank()
    one.gate.vote = UpdateVote(board, rank, 0, lambda: {*gone})
    board.begin(first)
    return one


def ejected(update):
    with contextlib.suppress(EjectedError):
        update()
        pytest.fail("it was made")


def test_nobody_waits_before_the_vote_has_begun(board):
    one = voting(board, 0, first=5)
    for _ in range(4):
        one.update()
        one.commit()
    assert one.step == 4
    assert 0 not in board.lacking(4)
    assert board.lacking(4) == [1, 2, 3]


def test_an_update_begins_once_all_have_voted(board):
    one = voting(board, 0)
    thread = threading.Thread(target=one.update)
    thread.start()
    until(lambda: 0 not in board.lacking(1) and one.gate.vote.is_waiting)
    board.vote(1, 1)
    board.vote(2, 1)
    thread.join(0.05)
    assert one.half == 0
    assert not one.gate.is_torn
    board.vote(3, 1)
    thread.join(LONG_S)
    assert (one.half, one.gate.vote.is_waiting) == (1, False)


def test_a_further_optimizer_of_the_step_is_not_voted_on(board):
    one = voting(board, 0)
    for rank in range(1, RANKS):
        board.vote(rank, 1)
    one.update()
    one.update()
    assert one.half == 2


def test_a_vote_that_is_lost_leaves_the_rank_where_it_was(board):
    """Rank 3 is dead and has not voted; this rank has, and waits."""
    gone = set()
    one = voting(board, 0, gone)
    thread = threading.Thread(target=ejected, args=(one.update,))
    thread.start()
    until(lambda: one.gate.vote.is_waiting)
    for rank in (1, 2):
        board.vote(rank, 1)
    gone.add(3)
    began = time.monotonic()
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    assert time.monotonic() - began < LONG_S / 2
    assert one.half == 0
    one.gate.eject()
    thread.join(LONG_S)


def test_a_vote_that_is_won_is_obeyed_behind_a_closed_gate(board):
    """All have voted, rank 3 before it died; this rank has yet to look."""
    one = voting(board, 0, {3})
    thread = threading.Thread(target=lambda: (one.update(), one.commit()))
    thread.start()
    until(lambda: one.gate.vote.is_waiting)
    board.vote(1, 1)
    board.vote(3, 1)
    threading.Timer(0.1, board.vote, (2, 1)).start()  # while the gate closes
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    assert (one.step, one.half) == (1, 1)
    one.gate.open()
    thread.join(LONG_S)


def test_who_is_behind_goes_on_behind_an_update_that_all_voted_for(board):
    """A peer has made the update and, in step 2, what its script does at the end of an epoch."""
    one = voting(board, 0)
    thread = threading.Thread(target=lambda: (one.update(), one.commit(), one.commit()))
    thread.start()
    until(lambda: one.gate.vote.is_waiting)
    for rank in range(1, RANKS):
        board.vote(rank, 1)
    assert one.gate.close(LONG_S, lambda: False, newest=2) is FreezeResult.WHOLE
    assert (one.step, one.half) == (2, 1)
    one.gate.open()
    thread.join(LONG_S)


def test_who_is_behind_casts_no_vote_on_its_way(board):
    """Its peers count on that: they have seen it shut."""
    one = voting(board, 0)
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    thread = threading.Thread(target=one.update)
    thread.start()
    thread.join(0.05)
    assert one.gate.close(0.2, lambda: False, newest=1) is FreezeResult.WHOLE
    assert 0 in board.lacking(1)
    board.begin(0)
    one.gate.open()
    thread.join(LONG_S)


def test_a_vote_that_is_won_late_is_obeyed_at_a_second_order(board):
    """Rank 3 had not voted at the first one, and its gate was open."""
    one = voting(board, 0)
    thread = threading.Thread(target=lambda: (one.update(), one.commit()))
    thread.start()
    until(lambda: one.gate.vote.is_waiting)
    board.vote(1, 1)
    board.vote(2, 1)
    assert one.gate.close(0.05, lambda: False) is FreezeResult.WHOLE
    assert one.step == 0
    board.vote(3, 1)
    assert one.gate.close(LONG_S, lambda: False, newest=1) is FreezeResult.WHOLE
    assert (one.step, one.half) == (1, 1)
    one.gate.open()
    thread.join(LONG_S)


def test_a_rank_that_is_shut_casts_no_vote(board):
    one = voting(board, 0)
    assert one.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    assert board.is_shut(0)
    thread = threading.Thread(target=one.update)
    thread.start()
    thread.join(0.05)
    assert 0 in board.lacking(1)
    for rank in range(1, RANKS):
        board.vote(rank, 1)
    one.gate.open()
    thread.join(LONG_S)
    assert one.half == 1
    assert not board.is_shut(0)


def test_ranks_that_do_not_update_together_end_the_vote(board, monkeypatch, caplog):
    monkeypatch.setattr(update_vote, "PATIENCE_S", 0.05)
    one = voting(board, 0)
    one.update()
    assert "rank 0 made its update without rank 1, rank 2, rank 3" in caplog.text
    one.commit()
    one.update()
    assert one.half == 2


class Job:
    """Ranks of which one dies between two collectives of a backward: some peers have all gradients."""

    def __init__(self, seed, board, *, with_vote):
        self.draw = draw = random.Random(seed)
        self.gone = set()
        self.ranks = [
            voting(board, rank, self.gone) if with_vote else Rank() for rank in range(RANKS)
        ]
        self.last, self.dead = draw.randint(1, 4), draw.randrange(RANKS)
        self.is_late = draw.random() < 0.3  # it dies with all its gradients, so that all have them
        self.lucky = {rank for rank in range(RANKS) if self.is_late or draw.random() < 0.6}
        self.pauses = [draw.random() * 0.004 for _ in range(RANKS)]
        self.backward = threading.Barrier(RANKS)
        self.found = {}

    def train(self, rank):
        one = self.ranks[rank]
        for _ in range(self.last - 1):
            self.backward.wait(LONG_S)
            one.update()
            one.commit()
        self.backward.wait(LONG_S)
        if rank == self.dead:
            if self.is_late and one.gate.vote is not None:
                one.gate.vote.cast(self.last)
            self.gone.add(rank)
            return
        time.sleep(self.pauses[rank])
        if rank in self.lucky:
            with contextlib.suppress(EjectedError):
                one.update()
                one.commit()

    def freeze(self, rank, after_s):
        time.sleep(after_s)
        assert self.ranks[rank].gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
        self.found[rank] = self.ranks[rank].step

    def run(self):
        """The steps at which the survivors' gates were closed."""
        threads = [threading.Thread(target=self.train, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        until(lambda: self.dead in self.gone)
        left = [rank for rank in range(RANKS) if rank != self.dead]
        after = [self.draw.random() * 0.004 for _ in left]
        freezing = [
            threading.Thread(target=self.freeze, args=each)
            for each in zip(left, after, strict=True)
        ]
        for thread in freezing:
            thread.start()
        for thread in freezing:
            thread.join(LONG_S)
        for rank in left:
            self.ranks[rank].gate.eject()
        for thread in threads:
            thread.join(LONG_S)
        return [self.found[rank] for rank in left]


def fail_apart(seed, *, with_vote):
    fd = vote_board.create(RANKS)
    board = VoteBoard(fd)
    os.close(fd)
    try:
        return Job(seed, board, with_vote=with_vote).run()
    finally:
        board.close()


def test_survivors_are_at_one_step_whoever_had_its_gradients():
    found = [fail_apart(seed, with_vote=True) for seed in range(150)]
    assert [each for each in found if len(set(each)) > 1] == []


def test_without_a_vote_they_are_not():
    found = [fail_apart(seed, with_vote=False) for seed in range(40)]
    assert [each for each in found if len(set(each)) > 1] != []


def test_a_foreign_file_is_no_board(tmp_path):
    with open(tmp_path / "x", "wb+") as file:
        file.write(bytes(128))
        file.flush()
        with pytest.raises(ValueError, match="not a vote board"):
            VoteBoard(file.fileno())
