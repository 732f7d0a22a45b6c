"""Gradients that an optimizer will use in a later step than the others: they are not saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, strided

from worker_hooks.state.registry import Piece, gradients_of

log = logging.getLogger("msrun")

PENDING = (
    "gradients wait for an update of {} in a later step than that of the other optimizers, and "
    "cannot be saved"
)


class PendingGradients:
    """Found where several optimizers are registered, and not each has an update in each step."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.why = ""
        """Why the newest commit is no place to resume from; empty: it is one."""
        self._pieces = pieces
        self._trained = [index for index, piece in enumerate(pieces) if piece.optimizers]
        self._used: dict[int, list[int]] = {}  # gradients of a piece as of its last update
        self._has_said = False
        self.are_possible = len(self._trained) > 1

    def forget(self) -> None:
        """There is no commit any more."""
        self.why, self._used = "", {}

    def updated(self, index: int) -> None:
        """The optimizer of a piece has used its gradients."""
        self._used[index] = gradients_of(self._pieces[index])

    def committed(self, updates: Sequence[int]) -> None:
        """A commit: find gradients that are left.

        ``updates``: of each piece, how many its optimizer has made in the step.
        """
        self.why = ""
        for index in self._trained:
            piece, used = self._pieces[index], self._used.get(index, [])
            if updates[index] or used == (now := gradients_of(piece)) or not now:
                continue
            if not _are_zero(piece):
                self.why = PENDING.format(piece.name)
                if not self._has_said:
                    self._has_said = True
                    log.warning("%s; a death in such a step loses it", self.why)


def _are_zero(piece: Piece) -> bool:
    """Whether nothing was added to its gradients: a resume sets those that there were to zero.

    Those on an accelerator, and of other kinds of tensors, are not looked at: that would wait.
    """
    found = [
        parameter.grad
        for optimizer in piece.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    are_plain = all(type(each) is Tensor and each.is_cpu for each in found)
    return are_plain and all(each.layout is strided and not each.any() for each in found)
