"""A registered tensor that the script updates in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from worker_hooks.state.mismatch import compared
from worker_hooks.state.snapshot import put, version
from worker_hooks.tensors import state_json
from worker_hooks.tensors.placements import Box, box_of, is_distributed, part_of
from worker_hooks.tensors.state_json import Json
from worker_hooks.tensors.tensor_bytes import entry_of


class TensorPiece:
    """A tensor under its own name; of a distributed one this rank's part."""

    is_compared = True
    modules: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, name: str, tensor: Tensor) -> None:
        """Register a tensor.

        Raises:
            TypeError: it is of a kind that cannot be saved.
        """
        self.name = name
        self.tensor = tensor
        self._tensors = {name: part_of(tensor)}
        entry_of(name, self._tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """The tensor, or the part."""
        part = part_of(self.tensor)
        if part is not self._tensors[self.name]:
            self._tensors = {self.name: part}
        return self._tensors

    def boxes(self) -> dict[str, Box]:
        """Which part of the tensor this rank has, by the tensor's name; none: it has all of it.

        Raises:
            TypeError: the part cannot be saved.
        """
        box = box_of(self.name, self.tensor)
        return {} if box is None else {self.name: box}

    def snapshot(self) -> Any:
        """Nothing: all of it is live state."""

    def marks(self) -> Any:
        """Its version."""
        return version(part_of(self.tensor))

    def encode(self, snapshot: Any) -> tuple[Json, dict[str, Tensor]]:  # noqa: ARG002
        """Nothing besides the tensor, but which part of a distributed one it is.

        Raises:
            TypeError: it has become one whose part cannot be saved.
        """
        if not is_distributed(self.tensor):
            return None, {}
        return state_json.encode(self.tensor, self.name, takes_parts=True)[0], {}

    def mismatches(self, like: Mapping[str, Tensor], value: Json) -> list[str]:  # noqa: ARG002
        """Why it cannot be restored from a tensor shaped like this."""
        return compared(self.tensors(), like)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], value: Json) -> None:  # noqa: ARG002
        """Put its value back, bit for bit."""
        put(tensors, self.name, part_of(self.tensor))
