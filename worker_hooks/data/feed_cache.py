"""The feeds of the loaders that a script loops over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from worker_hooks.data.feed import Feed

KEPT = 8
NOTHING_LEFT = (
    "all batches of a loop in epoch %d were trained before the resume: what follows it runs now"
)
NESTED = (
    "batches() was called within a loop over batches(): a commit has one place in the data; loop "
    "over the other loader itself"
)


class FeedCache:
    """One feed for each loader; if loaders are made anew in each epoch, the last few are kept."""

    def __init__(self) -> None:
        self._known: dict[int, Feed] = {}  # by id of the loader, which its feed keeps alive

    def of(self, loader: Iterable[Any]) -> Feed:
        """The loader's feed.

        Raises:
            TypeError: it is nothing to iterate over.
        """
        feed = self._known.pop(id(loader), None) or Feed(loader)
        self._known[id(loader)] = feed  # the newest is the last
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return feed

    def release_others(self, current: Feed) -> None:
        """Release what loops over all other loaders may have kept."""
        for feed in self._known.values():
            if feed is not current:
                feed.release()

    def __len__(self) -> int:
        return len(self._known)
