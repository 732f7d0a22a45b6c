"""What the main thread and the listener do to a gate in the worst order, and in all others."""

from __future__ import annotations

import threading

from support.gates import LONG_S, Rank, Watched, closed, never, until

from worker_hooks.guard import gate as gates
from worker_hooks.guard.gate import FreezeResult


def test_who_closes_right_behind_the_main_threads_look_sees_its_update():
    gate, found = Watched(), []
    gate.looked = lambda: found.append(closed(gate, 0.05, never))
    gate.begin_update()
    assert gate.is_torn
    assert found == [FreezeResult.TORN]


def test_who_closes_right_behind_the_main_threads_look_waits_for_its_commit():
    gate, order = Watched(), []

    def close():
        assert gate.close(LONG_S, never) is FreezeResult.WHOLE
        order.append("closed")

    listener = threading.Thread(target=close)

    def begin():
        listener.start()
        until(lambda: gate.shut)
        listener.join(3 * gates.LOOK_S)

    gate.looked = begin
    gate.commit(lambda: order.append("noted"))
    listener.join(LONG_S)
    assert order == ["noted", "closed"]


def test_who_closed_before_the_main_threads_look_sees_no_update():
    gate = Watched()
    began = threading.Thread(target=gate.begin_update)
    gate.close(LONG_S, never)
    began.start()
    until(lambda: not gate.is_torn)
    assert gate.close(0.0, never) is FreezeResult.WHOLE
    gate.open()
    began.join(LONG_S)


TURNS = 1500


def test_nobody_calls_a_half_update_or_a_half_commit_whole(_hurried):
    """This is the main thread, which never stops; a listener closes and opens at any moment."""
    rank, seen, wrong = Rank(), [], []

    def look(turn):
        until(lambda: rank.step > (seen[-1] if seen else 0))
        for _ in range(turn % 40):
            rank.look()
        stand = rank.gate.close(LONG_S, never)
        looks = {rank.look() for _ in range(20)}
        seen.append(rank.step)
        if stand is not FreezeResult.WHOLE or looks != {(rank.step,) * 4}:
            wrong.append((stand, looks))
        rank.gate.open()

    listener = threading.Thread(target=lambda: [look(turn) for turn in range(TURNS)])
    listener.start()
    while listener.is_alive():
        rank.update()
        rank.commit()
    assert wrong == []
    assert len(seen) == TURNS


class Ranks:
    """Some that are in step, as collectives keep them."""

    def __init__(self, count):
        self.all = [Rank() for _ in range(count)]
        self._together = threading.Barrier(count, timeout=LONG_S)
        self.threads = [threading.Thread(target=self._train, args=(rank,)) for rank in self.all]
        for thread in self.threads:
            thread.start()

    def _train(self, rank):
        while not self._together.broken:
            self._together.wait()
            rank.update()
            if rank.commit():
                return

    def stay(self, first):
        """Let all stay at one step; that step, and where they say to have come to."""
        asked = self.all[first:] + self.all[:first]
        standing = [rank.gate.hold_next(never) for rank in asked]
        there = []
        for rank in self.all:
            rank.gate.hold_at(max(standing), lambda rank=rank: there.append(rank.step))
        until(lambda: len(there) == len(self.all))
        return standing, there


def test_ranks_that_are_asked_at_any_moment_stay_at_one_step(_hurried):
    ranks, steps, wrong = Ranks(3), [], []
    for turn in range(150):
        standing, there = ranks.stay(turn % 3)
        step = max(standing)
        found = {rank.look() for rank in ranks.all}
        if min(standing) < step - 1 or {*there} != {step} or found != {(step,) * 4}:
            wrong.append((standing, there, found))
        steps.append(step)
        for rank in ranks.all:
            rank.gate.open() if turn < 149 else rank.gate.exit()
    for thread in ranks.threads:
        thread.join(LONG_S)
    assert wrong == []
    assert steps == sorted(set(steps))
