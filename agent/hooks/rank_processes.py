"""What the kernel says of the ranks' processes: of this node's, and of others as they told last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from agent.hooks.rank_links import Loop
from agent.machine.process_use import ProcessNews, process_use
from worker_hooks.machine.cgroup import is_frozen

STALE_S = 3.0  # what a node told so long ago says nothing about its ranks now
GONE = "X"  # as the kernel calls it, more or less


class _Told(NamedTuple):
    """What another node has said of its ranks' processes."""

    at_s: float
    inspection: int  # the newest one that it had heard of when it looked
    news: Mapping[int, bytes]  # by rank


class RankProcesses:
    """The processes of the ranks of all nodes."""

    def __init__(self, here: Iterable[int], pid: Callable[[int], int]) -> None:
        """Know nothing of other nodes yet.

        ``pid``: the process of one of them; 0: there is none.
        """
        self._here = frozenset(here)
        self._pid = pid
        self._told: dict[int, _Told] = {}

    def attach(self, loop: Loop) -> None:
        """``loop``: has the time."""
        self._loop = loop

    def use(self, rank: int, pid: int = 0) -> tuple[str, float]:
        """As :func:`process_use`; ``X`` also where nothing is known of a rank.

        ``pid``: that of a rank of this node which has no link.
        """
        if rank in self._here:
            pid = self._pid(rank) or pid
            return process_use(pid) if pid else (GONE, 0.0)
        found = self._news(rank)
        return (GONE, 0.0) if found is None else (found.state, found.cpu_s)

    def is_frozen(self, rank: int) -> bool:
        """Whether a control group keeps a rank from running."""
        if rank in self._here:
            return is_frozen(self._pid(rank))
        found = self._news(rank)
        return found is not None and found.is_frozen

    def _news(self, rank: int) -> ProcessNews | None:
        told = self._told.get(rank)
        return None if told is None else ProcessNews.unpacked(told.news[rank])

    def are_here(self, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks run on this node."""
        return self._here.issuperset(ranks)

    def are_known(self, ranks: Iterable[int], inspection: int = 0) -> bool:
        """Whether the nodes of these ranks have told of them lately.

        ``inspection``: they must have looked after they were asked for this one.
        """
        elsewhere = [rank for rank in ranks if rank not in self._here]
        if not elsewhere:
            return True
        since_s = self._loop.time() - STALE_S
        told = [self._told.get(rank) for rank in elsewhere]
        return all(each and each.at_s >= since_s and each.inspection >= inspection for each in told)

    def tell(self, news: Mapping[int, bytes], inspection: int) -> None:
        """Take what another node says of its ranks' processes, and since when it looked.

        ``news``: by rank, as :meth:`ProcessNews.packed`.
        """
        self._told.update(dict.fromkeys(news, _Told(self._loop.time(), inspection, news)))

    def forget(self, ranks: Iterable[int]) -> None:
        """The processes of these ranks are gone."""
        for rank in ranks:
            self._told.pop(rank, None)
