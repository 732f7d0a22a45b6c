"""A registered tensor that the script updates in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from worker_hooks.state.mismatch import compared
from worker_hooks.state.snapshot import version
from worker_hooks.tensors.state_json import Json
from worker_hooks.tensors.tensor_bytes import entry_of


class TensorPiece:
    """A tensor under its own name."""

    is_compared = True
    modules: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, name: str, tensor: Tensor) -> None:
        """Register a tensor.

        Raises:
            TypeError: it is of a kind that cannot be saved.
        """
        entry_of(name, tensor)
        self.name = name
        self._tensor = tensor
        self._tensors = {name: tensor}

    def tensors(self) -> dict[str, Tensor]:
        """The tensor."""
        return self._tensors

    def snapshot(self) -> Any:
        """Nothing: all of it is live state."""

    def marks(self) -> Any:
        """Its version."""
        return version(self._tensor)

    def encode(self, snapshot: Any) -> tuple[Json, dict[str, Tensor]]:  # noqa: ARG002
        """Nothing besides the tensor."""
        return None, {}

    def mismatches(self, like: Mapping[str, Tensor], value: Json) -> list[str]:  # noqa: ARG002
        """Why it cannot be restored from a tensor shaped like this."""
        return compared(self.tensors(), like)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], value: Json) -> None:  # noqa: ARG002
        """Put its value back, bit for bit."""
        self._tensor.copy_(tensors[self.name])
