"""The main thread's side of a graceful exit, at a commit that all ranks agreed on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from worker_hooks.callbacks.protocol import CallbackList, Training
from worker_hooks.contract.rank_lines import TRIGGERED
from worker_hooks.guard.guard import Guard
from worker_hooks.state.module import ModulePiece
from worker_hooks.state.registry import Piece
from worker_hooks.state.scaler import ScalerPiece

log = logging.getLogger("msrun")


class GracefulExit(SystemExit):
    """Ends a training, and with it the script, with exit code 0: it is saved, as requested.

    ``state.batches``, ``state.epochs`` and ``run`` raise it. Like any ``SystemExit`` it passes
    ``except Exception``, while ``finally`` and ``with`` work as usual.
    """

    def __init__(self) -> None:
        """The code is 0."""
        super().__init__(0)


class ExitControl:
    """``state.exit``: what a ``TrainState`` and its callbacks know of exiting early.

    Callbacks may read the properties and call :meth:`request`; the rest is for ``TrainState``.
    """

    def __init__(self, guard: Guard, callbacks: CallbackList, pieces: Sequence[Piece]) -> None:
        """No exit is requested yet."""
        self._guard = guard
        self._callbacks = callbacks
        self._pieces = pieces
        self._is_announced = False
        self._saved_step = 0  # by :meth:`save`
        self._has_rejoined = False

    @property
    def is_guarded(self) -> bool:
        """Whether msrun watches this rank; else no other rank learns of a request."""
        return self._guard.is_on

    @property
    def is_requested(self) -> bool:
        """Whether the training is to exit."""
        return self._guard.gate.is_stopping

    @property
    def run_id(self) -> str:
        """The same for all ranks of a run, and another for each run; empty: there is no msrun."""
        return self._guard.env.record_id

    def redirected(self, folder: str) -> str:
        """Where to write instead of in ``folder``: a drill must not touch the user's folders."""
        return self._guard.env.redirected(folder)

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """What was registered as the model, without wrappers, by name; else every module."""
        found = [piece for piece in self._pieces if isinstance(piece, ModulePiece)]
        named = [piece for piece in found if piece.name.partition(".")[0] == "model"]
        return {piece.name: piece.module for piece in named or found}

    @property
    def loss_scale(self) -> float | None:
        """Of the gradient scaler, if there is one that is switched on."""
        for piece in self._pieces:
            if isinstance(piece, ScalerPiece) and (snapshot := piece.snapshot()):
                scale = snapshot["scale"]
                return float(scale.item() if isinstance(scale, torch.Tensor) else scale)
        return None

    def request(self, why: str) -> None:
        """Request that the whole job exits gracefully; without msrun, that this process does.

        Args:
            why: as text: ``rank 3 received SIGTERM``.
        """
        self._guard.request_exit(why)

    def rejoined(self) -> None:
        """A rank was replaced; the new one does not know what was saved before."""
        self._saved_step, self._has_rejoined = 0, True

    def save(self, state: Training) -> None:
        """Let callbacks save the newest step, unless it is saved."""
        if not state.step:
            log.warning("save(): no step was made yet; in a loop of your own ask should_exit first")
        elif state.step == self._saved_step or (
            state.step == self._guard.resumed_step and not self._has_rejoined
        ):
            log.warning("save(): step %d is saved already", state.step)
        elif self._callbacks.save_now(state, "asked for"):
            self._saved_step = state.step
        else:
            log.warning("save(): nothing saves: give callbacks=[ModelCheckpoint(...)]")

    def wait(self, state: Training) -> bool:
        """At a boundary: wait as long as the rank is held there; whether it is to exit.

        By then everything that a resume needs is saved. Callbacks learn of the exit once, in
        ``exit_requested``.
        """
        if not self._guard.gate.pause():
            return False
        if not self._is_announced:
            self._is_announced = True
            log.warning(TRIGGERED)
            if not self.is_guarded:  # else msrun has saved this step
                self._callbacks.save_now(state, "graceful exit")
            self._callbacks.tell("exit_requested", state)
        return True
