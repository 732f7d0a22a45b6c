"""What a callback of a ``TrainState`` is, and what it sees of the training.

    TrainState(..., callbacks=[LossMonitor(20), TimeMonitor()])

Any object will do that has some of the members of :class:`Callback`. :class:`CallbackList` is the
only code that looks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal, Protocol

Moment = Literal[
    "begin",
    "armed",
    "epoch_begin",
    "step_begin",
    "step_end",
    "epoch_end",
    "exit_requested",
    "rejoined",
    "end",
]


class Training(Protocol):
    """What every callback may read of a training: a part of ``TrainState``.

    Two callbacks of ours read more: :class:`~worker_hooks.callbacks.on_request_exit.Exiting` and
    :class:`~worker_hooks.checkpoint.context.CheckpointedTraining` say what.
    """

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0 as ``state.epochs`` yields it."""

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
        """As the loader says; ``None``: it does not."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def world_size(self) -> int:
        """The count of all ranks."""


class Callback(Protocol):
    """All that a ``TrainState`` looks for in a callback; each member may be missing.

    The attributes are read once, when the ``TrainState`` is made; an empty one counts as missing.
    The methods are called in the main thread, in the order in which the callbacks were given; an
    exception in one ends training.
    """

    ckpt_save_path: str
    """The folder for dumps, unless the script gives one to ``TrainState``."""

    checkpoints: str
    """The folder that this callback saves periodic checkpoints to; a resume searches it, too."""

    breakpoints: str
    """The prefix of a dump that msrun saves in ``checkpoints`` when an exception ends training."""

    exit_file: str
    """A JSON file in which a graceful exit can be requested; msrun watches it."""

    exit_signal: int
    """A signal that requests a graceful exit when this process receives it."""

    def begin(self, state: Training) -> None:
        """Everything is registered, and restored if this run resumes."""

    def armed(self, state: Training) -> None:
        """The state can be saved from now on; called when a loop over batches begins."""

    def epoch_begin(self, state: Training) -> None:
        """An epoch begins, or continues after a resume."""

    def step_begin(self, state: Training) -> None:
        """A batch is loaded."""

    def step_end(self, state: Training) -> None:
        """A step is committed: a batch or, with gradient accumulation, several."""

    def epoch_end(self, state: Training) -> None:
        """An epoch is over."""

    def exit_requested(self, state: Training) -> None:
        """The training is about to exit gracefully; what a resume needs is saved."""

    def rejoined(self, state: Training) -> None:
        """A dead rank was replaced; training continues from the newest commit."""

    def end(self, state: Training) -> None:
        """Training is over."""

    def save_now(self, state: Training, reason: str) -> None:
        """Save the newest step: for ``state.save()``, and for an exit without msrun."""


class CallbackList:
    """The callbacks of one training; only this class looks for their optional members.

    Methods are looked up when they are called: a callback may rebind its own at any time.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        """Find what the callbacks want of a start."""
        self._callbacks = tuple(callbacks)
        self.ckpt_save_path = self._first_path("ckpt_save_path")
        self.exit_file = self._first_path("exit_file")
        signals = (getattr(each, "exit_signal", None) for each in self._callbacks)
        self.exit_signals = tuple(dict.fromkeys(each for each in signals if each is not None))

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The folders into which callbacks save checkpoints."""
        return tuple(filter(None, (getattr(each, "checkpoints", "") for each in self._callbacks)))

    @property
    def breakpoints(self) -> str:
        """The first prefix of a callback that saves to the first of ``checkpoints``; or empty."""
        first = self.checkpoints[:1]
        savers = [each for each in self._callbacks if (getattr(each, "checkpoints", ""),) == first]
        return next(filter(None, (getattr(each, "breakpoints", "") for each in savers)), "")

    def tell(self, moment: Moment, state: Training) -> None:
        """Call every callback that has a method for this moment."""
        for callback in self._callbacks:
            method = getattr(callback, moment, None)
            if method is not None:
                method(state)

    def save_now(self, state: Training, reason: str) -> bool:
        """Let callbacks save a checkpoint; whether there is one that does."""
        savers = [each for each in self._callbacks if getattr(each, "save_now", None) is not None]
        for saver in savers:
            saver.save_now(state, reason)
        return bool(savers)

    def _first_path(self, name: str) -> str:
        path = next(filter(None, (getattr(each, name, None) for each in self._callbacks)), "")
        return os.path.abspath(path) if path else ""
