"""The main thread's side of a graceful exit: how a training leaves at a commit all agreed on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worker_hooks.callbacks.protocol import Training, tell
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.guard.guard import Guard
from worker_hooks.state.module import ModulePiece
from worker_hooks.state.registry import Piece
from worker_hooks.state.scaler import ScalerPiece

log = logging.getLogger("msrun")

TRIGGERED = "Graceful exit is triggered, stop training."  # MindSpore's words


class GracefulExit(SystemExit):
    """Ends a training, and with it the script, with exit code 0: it is saved, and was asked to.

    ``state.batches`` and ``state.epochs`` raise it. Like any ``SystemExit`` it passes by
    ``except Exception``, while ``finally`` and ``with`` are done as usual.
    """

    def __init__(self) -> None:
        """The code is 0."""
        super().__init__(0)


class ExitControl:
    """What a ``TrainState`` and its callbacks know of leaving early; ``state.exit``."""

    def __init__(self, guard: Guard, callbacks: Iterable[Any], pieces: Sequence[Piece]) -> None:
        """Nobody leaves yet."""
        self._guard = guard
        self._callbacks = tuple(callbacks)
        self._pieces = pieces
        self._is_met = False
        self._saved_step = 0  # by :meth:`save`
        self._has_rejoined = False

    @property
    def is_guarded(self) -> bool:
        """Whether msrun watches this rank; else nobody but itself hears a request."""
        return self._guard.is_on

    @property
    def is_requested(self) -> bool:
        """Whether the training is to leave."""
        return self._guard.gate.is_asked

    @property
    def run_id(self) -> str:
        """The same for all ranks of a run, and another for each run; empty: there is no msrun."""
        return self._guard.told.record_id

    @property
    def drill_place(self) -> Path | None:
        """Where a drill keeps files: the user's own folders are none of its business."""
        plan = DrillPlan.decode(self._guard.told.drill)
        return Path(plan.ckpt) if plan is not None and plan.ckpt else None

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
        """Ask that the whole job leaves gracefully; without msrun, that this process does.

        Args:
            why: for people: ``rank 3 received SIGTERM``.
        """
        self._guard.request_exit(why)

    def rejoined(self) -> None:
        """A peer was replaced, who does not know what was saved before."""
        self._saved_step, self._has_rejoined = 0, True

    def save(self, state: Training) -> None:
        """Let callbacks save the newest step, unless it is saved."""
        if not state.step:
            log.warning("save(): no step was made yet; in a loop of your own ask should_exit first")
        elif state.step == self._saved_step or (
            state.step == self._guard.resumed_step and not self._has_rejoined
        ):
            log.warning("save(): step %d is saved already", state.step)
        elif save_now(self._callbacks, state, "asked for"):
            self._saved_step = state.step
        else:
            log.warning("save(): nothing saves: give callbacks=[ModelCheckpoint(...)]")

    def meet(self, state: Training) -> bool:
        """At a boundary: stay as long as the rank is held there; whether it is to leave.

        All is saved by then that a resume needs. Callbacks hear of it in ``exit_requested``, once.
        """
        if not self._guard.gate.pause():
            return False
        if not self._is_met:
            self._is_met = True
            log.warning(TRIGGERED)
            if not self.is_guarded:  # else msrun has saved this step
                save_now(self._callbacks, state, "graceful exit")
            tell(self._callbacks, "exit_requested", state)
        return True


def save_now(callbacks: Iterable[Any], state: Training, reason: str) -> int:
    """Let those callbacks that save checkpoints save one; how many there are."""
    savers = [callback for callback in callbacks if hasattr(callback, "save_now")]
    for callback in savers:
        callback.save_now(state, reason)
    return len(savers)
