"""Rows of answers are taken at once: nothing else comes of it than of each by itself."""

from collections import Counter

from support.simulator.node import simulate

from agent.controller import actions as do
from agent.controller.decide import Answer, absorb, decide

SCHEDULES = 1000
KINDS = {"Frozen", "Digested", "Rejoining", "Registered"}


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
