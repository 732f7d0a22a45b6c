"""Rows of answers are taken at once: nothing else comes of it than of each by itself."""

import random
from collections import Counter
from itertools import groupby

from support.simulator.node import simulate

from agent.controller import actions as do
from agent.controller.decide import Answer, absorb, decide, in_rows
from worker_hooks.contract import protocol

SCHEDULES = 1000
KINDS = {"Raised", "Frozen", "Digested", "Rejoining", "Registered", "Fingerprinted"}


class Comparing:
    """Decides, and compares with what is made of the job by a row of the same answers."""

    def __init__(self):
        self.taken = Counter()  # by kind
        self._row, self._before, self._after = [], None, None

    def decide(self, job, event):
        decision = decide(job, event)
        if self._is_taken(decision, job, event):
            self.taken[type(event).__name__] += 1
            is_more = self._row and type(self._row[0]) is type(event) and self._after is job
            if not is_more:
                self._row, self._before = [], job
            self._row.append(event)
            self._after = decision.job
            assert absorb(self._before, self._row) == (decision.job, len(self._row))
        else:
            self._row = []
        return decision

    def _is_taken(self, decision, job, event):
        if not isinstance(event, Answer):
            return False
        after, count = absorb(job, [event])
        assert after == (decision.job if count else job)
        if count:
            assert not decision.say
            assert all(isinstance(each, do.SetDeadline) for each in decision.actions)
        return bool(count)


def test_what_is_taken_in_a_row_is_what_would_have_been_decided():
    comparing = Comparing()
    for seed in range(SCHEDULES):
        simulate(seed, comparing.decide)
    assert {kind for kind, count in comparing.taken.items() if count > 20} == KINDS


GIVEN = [
    lambda rank: protocol.Raised(rank, 0, "lost a peer"),
    lambda rank: protocol.Frozen(rank, 0, 1, 7, is_whole=True),
    lambda rank: protocol.Digested(rank, 0, 1, "d", 1),
    lambda rank: protocol.Rejoining(rank, 1),
    lambda rank: protocol.Registered(rank, 1, 7, ""),
    lambda rank: protocol.Fingerprinted(rank, 1, 8, {"model": "1"}),
    lambda rank: protocol.Fingerprinted(rank, 1, 9, {"model": "2"}),
]


def test_rows_keep_what_each_rank_says_in_its_order():
    dice = random.Random(7)
    for count in [*range(1, 30), 1000]:
        given = {rank: [say(rank) for say in GIVEN] for rank in range(count)}
        for each in given.values():  # an exception comes before, amid or after the rest
            each.insert(dice.randrange(4), each.pop(0))
        heard, left = [], {rank: iter(each) for rank, each in given.items()}
        while left:
            rank = dice.choice(list(left))
            if (one := next(left[rank], None)) is None:
                del left[rank]
            else:
                heard.append(one)
        rows = in_rows(heard)
        assert {rank: [one for one in rows if one.rank == rank] for rank in given} == given
        assert len(list(groupby(rows, type))) <= 3 * len(GIVEN)
        steps = [one.step for one in rows if isinstance(one, protocol.Fingerprinted)]
        assert len(list(groupby(steps))) <= 3 * len(GIVEN)
