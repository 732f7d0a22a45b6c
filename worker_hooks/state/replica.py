"""What is written of a rank's state, put together of the registered pieces."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from worker_hooks.contract.status_page import Entry
from worker_hooks.device.side_stream import DeviceAccess
from worker_hooks.state.registry import Piece, boxes_of
from worker_hooks.tensors.placements import Box
from worker_hooks.tensors.shard import Replica
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes


class UnreadableState(NamedTuple):
    """Placeholder for a piece whose state could not be read."""

    error: str


def replica_of(
    pieces: Sequence[Piece],
    snapshots: Sequence[Any],
    copies: Mapping[str, torch.Tensor],
    own: list[tuple[Entry, memoryview]],
    facts: dict[str, Any],
    access: DeviceAccess,
    names: Collection[str] | None = None,
) -> Replica:
    """The state of these pieces that replicas hold the same, and what else is written with it.

    Args:
        pieces: what was registered.
        snapshots: their small state, in the same order.
        copies: by name, of tensors that are not read where they lie.
        own: what only this rank has.
        facts: the same on all replicas, to be saved.
        access: how accelerators are to be read.
        names: of the tensors that belong to it; ``None``: all that there are.

    Raises:
        RuntimeError: the state of a piece could not be read.
    """
    tensors: dict[str, torch.Tensor] = {}
    boxes: dict[str, Box] = {}
    replicated, alike, own = {}, {}, [*own]
    for piece, snapshot in zip(pieces, snapshots, strict=True):
        if isinstance(snapshot, UnreadableState):
            raise RuntimeError(f"{piece.name} cannot be saved: {snapshot.error}")  # noqa: TRY004
        tensors.update(
            (name, copies.get(name, each))
            for name, each in piece.tensors().items()
            if names is None or name in names
        )
        value, small = piece.encode(snapshot)
        boxes |= boxes_of(piece, value)
        if piece.is_compared:
            tensors.update(small)
            replicated[piece.name] = value
        else:  # e.g. a meter of the rank's own: any rank's will do
            own += [(entry_of(name, each), to_bytes(each)) for name, each in small.items()]
            alike[piece.name] = value
    rest = json.dumps({"pieces": replicated})
    more = {"objects": json.dumps(alike), "facts": json.dumps(facts)}
    return Replica(tensors, own, rest, more, access, boxes)
