"""MindSpore's monitors, and what a callback of a ``TrainState`` is.

    TrainState(..., callbacks=[LossMonitor(20), TimeMonitor()])

Any object will do that has some of the methods of :class:`Callback`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Training(Protocol):
    """What callbacks see of a training: the part of ``TrainState`` they may rely on."""

    @property
    def epoch(self) -> int:
        """The present epoch, counted from 0 as ``state.epochs`` yields it."""

    @property
    def step(self) -> int:
        """Optimizer updates committed since training began, over all epochs and resumes."""

    @property
    def batch(self) -> int:
        """Batches of this epoch that were handed out."""

    @property
    def loss(self) -> float | None:
        """The last loss; reading it waits for the device."""

    @property
    def batches_per_epoch(self) -> int | None:
        """As the loader says."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def world_size(self) -> int:
        """All ranks."""


class Callback(Protocol):
    """The moments of a training; leave out what you do not need. An exception ends training."""

    def begin(self, state: Training) -> None:
        """Everything is registered, and restored if this run resumes."""

    def epoch_begin(self, state: Training) -> None:
        """An epoch begins, or goes on after a resume."""

    def step_begin(self, state: Training) -> None:
        """A batch is there."""

    def step_end(self, state: Training) -> None:
        """A step is committed: a batch or, with gradient accumulation, several."""

    def epoch_end(self, state: Training) -> None:
        """An epoch is over."""

    def end(self, state: Training) -> None:
        """Training is over."""


def tell(callbacks: Iterable[Any], moment: str, state: Training) -> None:
    """Call the method ``moment`` of those callbacks that have it."""
    for callback in callbacks:
        method = getattr(callback, moment, None)
        if method is not None:
            method(state)


def places_of(callbacks: Iterable[Any]) -> list[str]:
    """The folders that callbacks save checkpoints into, absolute."""
    return [place for each in callbacks if (place := getattr(each, "checkpoints", ""))]


def breakpoints_of(callbacks: Iterable[Any], place: str) -> str:
    """The first prefix under which they want an exception's checkpoint in this folder, or empty."""
    here = [each for each in callbacks if place and getattr(each, "checkpoints", "") == place]
    return next(filter(None, (getattr(each, "breakpoints", "") for each in here)), "")
