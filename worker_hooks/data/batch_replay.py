"""The batches since the last commit, kept in memory to be handed out a second time.

When a peer is replaced, a surviving rank repeats the interrupted step with the batches that it had,
and continues with its loader's iterator, whose workers and prefetched batches stay. If the script
has changed a batch in place, or that cannot be known, the data are opened anew, as after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from worker_hooks.rng.randomness import Randomness, State

MOST = 64  # batches of one step; a validation, for example, may have any number
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class KeptBatch(NamedTuple):
    """One batch, in copies of its containers."""

    batch: Any
    versions: tuple[int, ...] | None  # of its tensors; ``None``: changes cannot be detected


class BatchReplay:
    """An iterator over batches that can hand out those since the last commit a second time.

    Each is kept with the randomness after its loading, if it was loaded in this process.
    """

    def __init__(
        self, batches: Iterator[Any], loaded: int, streams: Randomness | None = None
    ) -> None:
        self.recent: list[KeptBatch] = []
        self.loaded = loaded  # batches of the epoch that were taken from the loader
        self.is_sound = True  # the loader's iterator has not failed
        self._batches = batches
        self._streams = streams
        self._states_after: list[State] = []  # after each recent batch; spare ones follow

    def __iter__(self) -> BatchReplay:
        return self

    def __next__(self) -> Any:
        self.is_sound = False
        batch = next(self._batches)
        self.is_sound = True
        if len(self.recent) == MOST or not torch.is_grad_enabled():
            self.recent.clear()  # a replay would need all of them
        self.recent.append(_keep(batch))
        self.loaded += 1
        if self._streams is not None:
            if len(self.recent) > len(self._states_after):
                self._states_after.append(State(self._streams))
            self._states_after[len(self.recent) - 1].capture()
        return batch

    def settle(self, consumed: int) -> None:
        """The first ``consumed`` batches of the epoch are committed."""
        left = self.loaded - consumed
        if not left:
            self.recent.clear()
            return
        gone = len(self.recent) - left
        if gone > 0:
            del self.recent[:gone]
            self._states_after = self._states_after[gone:] + self._states_after[:gone]

    def has(self, consumed: int) -> bool:
        """Whether it can hand out what follows the first ``consumed`` batches, unchanged."""
        count = self.loaded - consumed
        if not (self.is_sound and 0 <= count <= len(self.recent)):
            return False
        wanted = self.recent[len(self.recent) - count :]
        return all(
            kept.versions is not None and _keep(kept.batch).versions == kept.versions
            for kept in wanted
        )

    def after(self, consumed: int, rewind: Callable[[bytes], None]) -> Iterator[Any]:
        """The batches that follow the first ``consumed`` of the epoch, kept ones first."""
        first = len(self.recent) - (self.loaded - consumed)
        states = [state.content for state in self._states_after[first : len(self.recent)]]
        for place, kept in enumerate(self.recent[first:]):
            if states:
                rewind(states[place])
            yield _keep(kept.batch).batch  # a new copy: the script may take it apart, too
        yield from self


def _keep(batch: Any) -> KeptBatch:
    versions: list[int] = []
    try:
        return KeptBatch(_rebuilt(batch, versions), tuple(versions))
    except (TypeError, RuntimeError):
        return KeptBatch(None, None)


def _rebuilt(thing: Any, versions: list[int]) -> Any:
    """The same in new containers; append the versions of its tensors.

    Raises:
        RuntimeError: a tensor has no version, as it was made for inference.
        TypeError: changes of an object of this type cannot be detected.
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
