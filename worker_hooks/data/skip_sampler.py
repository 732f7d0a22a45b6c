"""Starts a DataLoader in the middle of an epoch without loading what was consumed before.

The indices of the consumed batches are drawn, as they were the first time, and dropped. With worker
processes each batch must also come from the same worker as before, because each has its own
randomness: the last few indices are not dropped but sent as blanks, which make a worker do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from typing import Any


class BlankDataset(Enum):
    """In place of the indices of a batch that a worker need not make."""

    BATCH = "blank"


class SkippingSampler:
    """Replaces a loader's sampler while an iterator with workers is made."""

    def __init__(
        self,
        sampler: Iterable[Any],
        dropped: int,
        blanks: int,
        rewind: Callable[[], None] | None = None,
    ) -> None:
        """Drop the first batches and replace the next by blanks.

        Args:
            sampler: the loader's own, of indices or of batches of indices.
            dropped: how many are drawn and dropped.
            blanks: how many more are drawn and replaced.
            rewind: called before the second pass. A loader begins a pass when it starts its
                workers, which stays unused, and another when it begins the epoch.
        """
        self.sampler = sampler
        self._dropped, self._blanks, self._rewind = dropped, blanks, rewind
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._passes > 1 and self._rewind is not None:
            self._rewind()
        # Some samplers draw when the pass begins, some with the first index.
        return _rest(iter(self.sampler), self._dropped, self._blanks)


def _rest(indices: Iterator[Any], dropped: int, blanks: int) -> Iterator[Any]:
    """Skip; a function, because the loader's iterator keeps it and it must not refer to the loader.

    Else an unused loader would wait for the garbage collector, which ends its workers in a bad
    order.
    """
    for _ in islice(indices, dropped):
        pass
    for _ in islice(indices, blanks):
        yield BlankDataset.BATCH
    yield from indices


@contextmanager
def swapped(attributes: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of an object for a while; ``attributes`` is its ``__dict__``."""
    own = {name: attributes[name] for name in others}
    attributes.update(others)
    try:
        yield
    finally:
        attributes.update(own)
