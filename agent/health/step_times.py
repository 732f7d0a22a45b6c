"""Notes now and then how long the ranks' steps take, for a report of the run.

The longer a run lasts, the rarer: a day makes some three hundred notes, a month five hundred.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.records.journal import Journal
from agent.workers.worker import Worker

EVERY_S = 2.0  # at most so often
SHARE = 0.02  # of the time that has passed, to the next note
MOST_RANKS = 16  # of which all are noted


class StepTimes:
    """The notes of one job."""

    def __init__(self, journal: Journal, now_s: float) -> None:
        """``now_s``: monotonic, as the job begins."""
        self._journal = journal
        self._began_s = now_s
        self._due_s = now_s
        self._step = -1

    def note(self, workers: Iterable[Worker], now_s: float) -> None:
        """Write one, if it is time for it and there are new steps."""
        if now_s < self._due_s:
            return
        timed = {each.rank: each.tempo for each in workers if each.tempo is not None}
        step = max((each.newest for each in timed.values()), default=-1)
        if step <= self._step:
            return
        self._step = step
        self._due_s = now_s + max(EVERY_S, SHARE * (now_s - self._began_s))
        ranks = sorted(timed, key=lambda rank: timed[rank].median_s)
        if len(ranks) > MOST_RANKS:
            ranks = [ranks[0], ranks[len(ranks) // 2], ranks[-1]]
        ranks.sort()
        self._journal.figures(
            "StepsTimed",
            step=step,
            ranks=ranks,
            median_s=[round(timed[rank].median_s, 6) for rank in ranks],
        )
