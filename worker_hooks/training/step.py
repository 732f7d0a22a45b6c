"""The step that is under way, as torch's own hooks tell of it: backward, updates, the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from worker_hooks.contract.status_page import Phase
from worker_hooks.drill.inject import FaultInjector
from worker_hooks.drill.trace import TrainingTrace
from worker_hooks.guard.gate import Gate
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.training.torch_hooks import watch_backward, watch_optimizer


class StepTracker:
    """What happened since the last commit; only the main thread comes by here."""

    def __init__(
        self,
        ledger: CommittedState,
        gate: Gate,
        position: Callable[[], Position],
        saboteur: FaultInjector | None,
        witness: TrainingTrace | None,
    ) -> None:
        """Watch nothing yet.

        Args:
            ledger: told of what happens.
            gate: asked before each update.
            position: where in the data the rank is.
            saboteur: of a drill.
            witness: of a drill.
        """
        self.phase = Phase.IDLE
        self.has_updated = False
        self.has_gradients = False  # of a backward that no update has used yet
        self.is_watched = False
        self._ledger = ledger
        self._gate = gate
        self._position = position
        self._saboteur = saboteur
        self._witness = witness
        self._loss: torch.Tensor | float | None = None
        self._loss_is_told = False

    @property
    def loss(self) -> float | None:
        """The last loss: what the script set, else what it called ``backward`` on."""
        value = self._loss
        return float(value.item()) if isinstance(value, torch.Tensor) else value

    @loss.setter
    def loss(self, value: torch.Tensor | float) -> None:
        self._loss = value.detach() if isinstance(value, torch.Tensor) else value
        self._loss_is_told = True

    def forget(self, attempt: int) -> None:
        """Nothing is under way: the script was taken out of its step, for a new attempt."""
        if self._saboteur is not None:
            self._saboteur.attempt = attempt
        if self._witness is not None:
            self._witness.begin(attempt)
        self.phase = Phase.IDLE
        self.has_updated = self.has_gradients = self._loss_is_told = False

    def watch(self) -> None:
        """Watch backward and all registered optimizers, from the first call on."""
        if self.is_watched:
            return
        self.is_watched = True
        watch_backward(self.began_backward)
        for index, piece in enumerate(self._ledger.pieces):
            for optimizer in piece.optimizers:
                watch_optimizer(optimizer, self._begin_update, self._ended_update(index))

    def enter(self, phase: Phase) -> None:
        """The step is so far."""
        self.phase = phase
        self._ledger.enter(phase)
        if self._saboteur is not None:
            self._saboteur.at(phase, self._ledger.step + 1)

    def is_due(self) -> bool:
        """Whether a commit is due.

        Changed weights are an update, too, but not for a validation, where they are changed for a
        while, nor while gradients wait for an optimizer: those would be lost in a resume.
        """
        if self.has_updated:
            return True
        pieces = self._ledger.pieces
        if self.has_gradients and any(piece.optimizers for piece in pieces):
            return False
        module = next((module for piece in pieces for module in piece.modules), None)
        is_training = torch.is_grad_enabled() and (module is None or module.training)
        return is_training and self._ledger.is_touched()

    def end(self) -> None:
        """It is committed, and the next one is under way."""
        self._loss_is_told = False

    def began_backward(self, root: torch.Tensor) -> None:
        """Backward begins at this tensor."""
        if not self._loss_is_told and root.numel() == 1:
            self._loss = root.detach()
        if self._witness is not None:
            self._witness.loss(self._ledger.step + 1, root)
        if self.phase is not Phase.UPDATE:  # a closure's backward is a part of the update
            self.has_gradients = True
            self._ledger.under_way(self._position())
            self.enter(Phase.BACKWARD)

    def _begin_update(self, *_: Any) -> None:
        self._gate.begin_update()
        self.enter(Phase.UPDATE)

    def _ended_update(self, index: int) -> Callable[..., None]:
        def ended(*_: Any) -> None:
            self._ledger.updated(index)
            self.has_updated, self.has_gradients = True, False
            self._gate.end_update()
            self.enter(Phase.UPDATED)

        return ended
