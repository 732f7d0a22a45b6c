"""The feeds of the loaders that a script loops over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from worker_hooks.data.feed import Feed

KEPT = 8

NOTHING_LEFT = (
    "all batches of a loop in epoch %d had been trained before the resume: what follows the loop "
    "runs now, without variables that the loop would have set"
)
NESTED = (
    "batches() was called within a loop over batches(): a commit has one place in the data; loop "
    "over the other loader itself"
)


class FeedCache:
    """One for each loader; of loaders that are made anew in each epoch the last few are kept."""

    def __init__(self) -> None:
        self._known: dict[int, Feed] = {}  # by id: a feed keeps its loader, so an id stays its own

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

    def let_go(self, present: Feed) -> None:
        """Of all loaders but the present one: end what a loop that was left may have kept."""
        for feed in self._known.values():
            if feed is not present:
                feed.let_go()

    def __len__(self) -> int:
        return len(self._known)
