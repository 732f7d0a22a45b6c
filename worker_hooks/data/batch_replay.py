"""The batches since the last commit, kept in memory to be handed out a second time.

A rank that lives on when a peer is replaced repeats the interrupted step with the very batches that
it had, and its loader's iterator, with its workers and what they loaded ahead, goes on behind them.
A batch that the script changed in place, or whose kind does not tell, is not: the data are then
opened anew, as after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from worker_hooks.rng.randomness import Randomness, State

MOST = 64  # batches of one step; of a validation, say, there may be any number
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class KeptBatch(NamedTuple):
    """One batch, in containers of its own."""

    batch: Any
    versions: tuple[int, ...] | None  # of the tensors in it; ``None``: it cannot be watched


class BatchReplay:
    """An iterator over batches that can hand out those since the last commit a second time.

    Each is kept with the randomness behind its loading, if it was loaded in this very process.
    """

    def __init__(
        self, batches: Iterator[Any], loaded: int, streams: Randomness | None = None
    ) -> None:
        self.recent: list[KeptBatch] = []
        self.loaded = loaded  # batches of the epoch up to now, whoever has handed them out since
        self.is_sound = True  # what it iterates over has not failed
        self._batches = batches
        self._streams = streams
        self._behind: list[State] = []  # of each of the recent ones, and of more before

    def __iter__(self) -> BatchReplay:
        return self

    def __next__(self) -> Any:
        self.is_sound = False
        batch = next(self._batches)
        self.is_sound = True
        if len(self.recent) == MOST or not torch.is_grad_enabled():
            self.recent.clear()  # and with it all that would have to follow
        self.recent.append(_kept(batch))
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
        if gone > 0:
            del self.recent[:gone]
            self._behind = self._behind[gone:] + self._behind[:gone]

    def has(self, consumed: int) -> bool:
        """Whether it can hand out all that follows so many batches of the epoch, as they were."""
        count = self.loaded - consumed
        if not (self.is_sound and 0 <= count <= len(self.recent)):
            return False
        wanted = self.recent[len(self.recent) - count :]
        return all(
            kept.versions is not None and _kept(kept.batch).versions == kept.versions
            for kept in wanted
        )

    def behind(self, consumed: int, rewind: Callable[[bytes], None]) -> Iterator[Any]:
        """The batches that follow so many of the epoch; one that was loaded is handed out again."""
        first = len(self.recent) - (self.loaded - consumed)
        states = [state.content for state in self._behind[first : len(self.recent)]]
        for place, kept in enumerate(self.recent[first:]):
            if states:
                rewind(states[place])
            yield _kept(kept.batch).batch  # the script may take it apart, too
        yield from self


def _kept(batch: Any) -> KeptBatch:
    versions: list[int] = []
    try:
        return KeptBatch(_rebuilt(batch, versions), tuple(versions))
    except (TypeError, RuntimeError):
        return KeptBatch(None, None)


def _rebuilt(thing: Any, versions: list[int]) -> Any:
    """The same in new containers.

    Raises:
        RuntimeError: a tensor has no version, as one made for inference.
        TypeError: what it is does not tell whether it was changed.
    """
    kind = type(thing)
    if isinstance(thing, torch.Tensor):
        versions.append(thing._version)  # noqa: SLF001
        return thing
    if kind in _PLAIN:
        return thing
    if kind is dict:
        return {key: _rebuilt(each, versions) for key, each in thing.items()}
    if kind is list or kind is tuple:
        return kind([_rebuilt(each, versions) for each in thing])
    if isinstance(thing, tuple) and hasattr(kind, "_make"):
        return kind._make([_rebuilt(each, versions) for each in thing])
    raise TypeError(f"{kind} may have been changed")
