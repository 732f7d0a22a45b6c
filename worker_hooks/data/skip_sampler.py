"""Starting a DataLoader in the middle of an epoch without loading what was consumed before.

The indices of the consumed batches are drawn, as they were the first time, and dropped. With
worker processes the batches must also come from the same workers as before, since each has its own
randomness: so the last few are not dropped but sent as blanks, which make a worker do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from typing import Any


class BlankDataset(Enum):
    """Stands for the indices of a batch that a worker need not make."""

    BATCH = "blank"


class SkippingSampler:
    """Stands in for a loader's sampler while an iterator with workers is made."""

    def __init__(
        self,
        sampler: Iterable[Any],
        dropped: int,
        blanks: int,
        rewind: Callable[[], None] | None = None,
    ) -> None:
        """Begin behind ``dropped`` batches and send ``blanks`` more as blanks.

        Args:
            sampler: the loader's own, of indices or of batches of them.
            dropped: so many are drawn and dropped.
            blanks: so many more are drawn and replaced.
            rewind: called before the second pass. A loader asks for a pass as it makes its
                workers, which it leaves unused, and for another as it begins the epoch.
        """
        self.sampler = sampler
        self._dropped, self._blanks, self._rewind = dropped, blanks, rewind
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._passes > 1 and self._rewind is not None:
            self._rewind()
        # Some samplers draw as the pass begins, some with the first index.
        return _rest(iter(self.sampler), self._dropped, self._blanks)


def _rest(indices: Iterator[Any], dropped: int, blanks: int) -> Iterator[Any]:
    """Lives on in the loader's iterator; so it knows no more than it must.

    If it led back to the loader, a loader nobody needs any more would wait for the garbage
    collector, which ends its workers in no good order.
    """
    for _ in islice(indices, dropped):
        pass
    for _ in islice(indices, blanks):
        yield BlankDataset.BATCH
    yield from indices


@contextmanager
def swapped(attributes: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Give an object other attributes for a while: ``attributes`` is its ``__dict__``."""
    own = {name: attributes[name] for name in others}
    attributes.update(others)
    try:
        yield
    finally:
        attributes.update(own)
