"""The batches since the last commit, kept in memory to be handed out a second time.

A rank that lives on when a peer is replaced repeats the interrupted step with the very batches that
it had, and its loader's iterator, with its workers and what they loaded ahead, goes on behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from worker_hooks.rng import Randomness, State


class Again:
    """An iterator over batches that can hand out those since the last commit a second time.

    Each is kept with the randomness behind its loading, if it was loaded in this very process.
    """

    def __init__(
        self, batches: Iterator[Any], loaded: int, streams: Randomness | None = None
    ) -> None:
        self.recent: list[Any] = []
        self.loaded = loaded  # batches of the epoch up to now, whoever has handed them out since
        self.is_sound = True  # what it iterates over has not failed
        self._batches = batches
        self._streams = streams
        self._behind: list[State] = []  # of each of the recent ones, and of more before

    def __iter__(self) -> Again:
        return self

    def __next__(self) -> Any:
        self.is_sound = False
        batch = next(self._batches)
        self.is_sound = True
        self.recent.append(batch)
        self.loaded += 1
        if self._streams is not None:
            if len(self.recent) > len(self._behind):
                self._behind.append(State(self._streams))
            self._behind[len(self.recent) - 1].note()
        return batch

    def settle(self, consumed: int) -> None:
        """So many batches of the epoch are committed."""
        left = self.loaded - consumed
        if not left:
            self.recent.clear()
            return
        gone = len(self.recent) - left
        del self.recent[:gone]
        self._behind = self._behind[gone:] + self._behind[:gone]

    def has(self, consumed: int) -> bool:
        """Whether it can hand out all that follows so many batches of the epoch."""
        return self.is_sound and 0 <= self.loaded - consumed <= len(self.recent)

    def behind(self, consumed: int, rewind: Callable[[bytes], None]) -> Iterator[Any]:
        """The batches that follow so many of the epoch; one that was loaded is handed out again."""
        first = len(self.recent) - (self.loaded - consumed)
        states = [state.content for state in self._behind[first : len(self.recent)]]
        for place, batch in enumerate(self.recent[first:]):
            if states:
                rewind(states[place])
            yield batch
        yield from self
