"""Finds gradients that add up from step to step: no optimizer uses them, and nothing clears them.

They are dropped at a replacement or resume, as all gradients are. Whoever uses them later, a group
that is added to the optimizer or a norm over all of the model, then gets others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_hooks.state.registry import Piece, scripts_tensors
from worker_hooks.state.snapshot import version
from worker_hooks.tensors.placements import part_of

FIRST_STEPS = 3  # of a process are looked at, and the first one of each loop
_SHOWN = 3  # names in a message

ADD_UP = (
    "the gradients of {} add up over steps, as nothing clears them, and begin anew after a "
    "replacement or resume: clear them in each step, or give them requires_grad_(False)"
)


class KeptGradients:
    """Looks at the gradients where backward begins and at commits. For the main thread."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """``pieces``: what was registered."""
        self._pieces = [piece for piece in pieces if piece.modules]
        self._looks = FIRST_STEPS + 1  # steps that are still looked at; the first has none
        self._is_said = False
        # by name, gradients that no backward of this step has found cleared, and their versions
        self._kept: dict[str, tuple[Tensor, int]] | None = None

    def begin_loop(self) -> None:
        """Look at the next step, too: the script may have thawed something."""
        self._looks = max(self._looks, 1)

    def abandon(self) -> None:
        """The step is not completed; gradients are dropped."""
        self._kept = None

    def backward_begins(self) -> None:
        """What is cleared for this backward does not add up."""
        if self._is_said or not self._looks:
            return
        if self._kept is None:
            named = scripts_tensors(self._pieces).items()
            self._kept = {
                name: (each, version(part_of(each.grad)))
                for name, each in named
                if each.grad is not None and _is_set(each.grad)
            }
        else:
            self._kept = {
                name: (each, then)
                for name, (each, then) in self._kept.items()
                if each.grad is not None and _is_set(each.grad)
            }

    def committed(self) -> str:
        """What adds up, as a sentence; empty: nothing does."""
        kept, self._kept = self._kept, None
        if kept is None:
            return ""
        self._looks -= 1
        names = [
            name
            for name, (each, then) in kept.items()
            if each.grad is not None and version(part_of(each.grad)) != then
        ]
        if not names:
            return ""
        self._is_said = True
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ADD_UP.format(", ".join(names[:_SHOWN]) + more)


@torch.no_grad()
def _is_set(gradient: Tensor) -> bool:
    mine = part_of(gradient)  # nobody else is asked
    values = mine.coalesce().values() if mine.is_sparse else mine
    return bool(values.any())
