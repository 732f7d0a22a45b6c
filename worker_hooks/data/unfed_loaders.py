"""Finds DataLoaders that a script's own loop takes its batches from, past ``state.batches``.

Nothing knows their place: when training is entered again, they begin with their first batch.
"""

from __future__ import annotations

import gc

from torch.utils.data.dataloader import _BaseDataLoaderIter

BEGINS_ANEW = (
    "a DataLoader is looped over without state.batches(): after a replacement or resume its data "
    "begin anew, and weights differ unless the script itself skips what was trained; loop over "
    "state.batches(loader), or say that it skips by state.ignore('DataLoader')"
)
NAME = "DataLoader"


class UnfedLoaders:
    """The iterations over DataLoaders that are under way in this process."""

    def __init__(self) -> None:
        """Note them as the first step begins."""
        self._begun = _under_way()

    def have_advanced(self) -> bool:
        """Whether one has handed out batches since and has not ended, as a validation has."""
        return any(count > self._begun.get(each, 0) for each, count in _under_way().items())


def _under_way() -> dict[int, int]:
    """How many batches each iteration has handed out."""
    return {
        id(each): each._num_yielded  # noqa: SLF001
        for each in gc.get_objects()
        if issubclass(type(each), _BaseDataLoaderIter)
    }
