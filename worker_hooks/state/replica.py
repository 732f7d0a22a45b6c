"""What is read of the registered pieces at each commit, and written of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from operator import call
from typing import Any

import torch

from worker_hooks.contract.fingerprint import is_named
from worker_hooks.contract.status_page import Entry
from worker_hooks.device.side_stream import DeviceAccess
from worker_hooks.state.registry import Piece, boxes_of, cut_of, labels
from worker_hooks.state.snapshot import NotSavableError, UnreadableState
from worker_hooks.tensors.placements import Box
from worker_hooks.tensors.shard import Replica
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes

log = logging.getLogger("msrun")


class PieceReader:
    """Reads all pieces in one call of Python, at each step."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Nothing is read yet, and no parts are known."""
        self._pieces = pieces
        self._tensors = [piece.tensors for piece in pieces]
        self._marks = [piece.marks for piece in pieces]
        self._snapshots = [piece.snapshot for piece in pieces]
        self._cut = cut_of(())[1]
        self._warned: set[str] = set()

    def find_parts(self) -> dict[int, list[torch.Tensor]]:
        """Find the parts of distributed tensors; by piece, those that its updates change."""
        parts, self._cut = cut_of(self._pieces)
        return parts

    def count_parts(self) -> None:
        """Count changes of parts, which torch does not: before versions are read."""
        if self._cut.tensors:
            self._cut.count_on()

    def tensors(self) -> list[Mapping[str, torch.Tensor]]:
        """Of each piece, those in live memory."""
        if self._cut.tensors:  # else not even the call
            self._cut.count_on()
        return list(map(call, self._tensors))

    def marks(self) -> tuple[Any, ...]:
        """Of each piece, a value that differs after it was changed."""
        if self._cut.tensors:
            self._cut.count_on()
        try:
            return tuple(map(call, self._marks))
        except Exception:  # noqa: BLE001  the script's own code; find out in which piece
            return tuple(map(self._mark, self._pieces))

    def snapshots(self) -> tuple[Any, ...]:
        """Of each piece, a copy of its small state."""
        try:
            return tuple(map(call, self._snapshots))
        except Exception:  # noqa: BLE001  as above
            return tuple(map(self.snapshot, self._pieces))

    def snapshot(self, piece: Piece) -> Any:
        """A copy of one piece's small state."""
        try:
            return piece.snapshot()
        except Exception as error:  # noqa: BLE001  the script's own code
            return self._failed(piece, error)

    def _mark(self, piece: Piece) -> Any:
        try:
            return piece.marks()
        except Exception as error:  # noqa: BLE001  the script's own code
            return self._failed(piece, error)

    def _failed(self, piece: Piece, error: Exception) -> UnreadableState:
        if piece.name not in self._warned:
            self._warned.add(piece.name)
            log.warning("%s cannot be saved any more: %r", piece.name, error)
        return UnreadableState(repr(error))


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
        snapshots: their small state, in the same order.
        copies: by name, of tensors that are not read where they lie.
        own: what only this rank has.
        facts: the same on all replicas, to be saved.
        access: how accelerators are to be read.
        names: of the tensors that belong to it; ``None``: all that there are.

    Raises:
        NotSavableError: the state of a piece could not be read.
    """
    tensors: dict[str, torch.Tensor] = {}
    boxes: dict[str, Box] = {}
    replicated, alike, own = {}, {}, [*own]
    for piece, snapshot in zip(pieces, snapshots, strict=True):
        if isinstance(snapshot, UnreadableState):
            raise NotSavableError(f"{piece.name} cannot be saved: {snapshot.error}")
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


def rest_of(replica: Replica, pieces: Sequence[Piece], without: Collection[str]) -> Replica:
    """The part of a rank's state that it holds with other ranks than the rest.

    ``without``: names of tensors that belong to other parts, as ranks compare them.
    """
    label_of = labels(pieces)
    return replica.only(
        [name for name in replica.tensors if not is_named(name, label_of.get(name, name), without)]
    )
