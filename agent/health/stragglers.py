"""How fast each rank is, and which one is persistently slower than its peers.

Pure: the times on the status pages come in. Ranks wait for each other in backward, so all steps
are as long as those of the slowest rank; a rank's *own* time is its time without the waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent.workers.tempo import Tempo, median

RATIO = 1.25  # of its peers' median own time
LEAST_S = 0.005  # above it
STEPS = 32  # that a judgement needs
FRESH = 16  # new steps between two looks; the same steps again say nothing new
LOOKS = 3  # in a row


class Slow(NamedTuple):
    """A rank that is slower than its peers."""

    rank: int
    own_s: float  # median
    peers_s: float  # median of its peers' medians

    @property
    def words(self) -> str:
        """One sentence."""
        times = f"{1e3 * self.own_s:.3g} ms of its own a step, its peers {1e3 * self.peers_s:.3g}"
        return f"rank {self.rank} is slower than its peers: {times} ms"


class Change(NamedTuple):
    """What is new since the last look."""

    began: tuple[Slow, ...] = ()
    ended: tuple[int, ...] = ()


class Stragglers:
    """Follows the ranks of one job from look to look."""

    def __init__(self) -> None:
        self.named: dict[int, Slow] = {}
        self._counts: dict[int, int] = {}  # rank -> looks in a row
        self._newest = 0  # step of the last look that counted

    def look(self, tempos: Mapping[int, Tempo]) -> Change:
        """Judge by the figures of all ranks that train."""
        ended = [rank for rank in self.named if rank not in tempos]
        newest = max((each.newest for each in tempos.values()), default=0)
        self._newest = min(self._newest, newest)  # the job may have gone back
        if newest >= self._newest + FRESH:
            self._newest = newest
            slow = {each.rank: each for each in _slow(tempos)}
            self._counts = {rank: self._counts.get(rank, 0) + 1 for rank in slow}
            ended += [rank for rank in self.named if rank in tempos and rank not in slow]
            began = [
                slow[rank]
                for rank, count in self._counts.items()
                if count >= LOOKS and rank not in self.named
            ]
            self.named.update({rank: slow[rank] for rank in slow if rank in self.named})
        else:
            began = []
        for rank in ended:
            del self.named[rank]
        self.named.update({each.rank: each for each in began})
        return Change(tuple(began), tuple(ended))


def _slow(tempos: Mapping[int, Tempo]) -> list[Slow]:
    """Ranks that are slow at this look."""
    found = []
    for rank, each in tempos.items():
        peers = sorted(other.own_median_s for peer, other in tempos.items() if peer != rank)
        if not peers or each.steps < STEPS:
            continue
        peers_s = median(peers)
        if each.own_median_s > max(RATIO * peers_s, peers_s + LEAST_S):
            found.append(Slow(rank, each.own_median_s, peers_s))
    return found
