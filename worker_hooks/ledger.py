"""The ledger of one rank: what its state was as of its newest commit, ready to be saved.

Large replicated state is not in it: that is live memory. In it are the small replicated things
(a scheduler's counters, an optimizer's learning rate), remembered at each commit because the
script may change them before the next update, and the private ones, written to the status page.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from worker_hooks import page as pages
from worker_hooks.buffers import Buffers
from worker_hooks.octets import entry_of, to_bytes
from worker_hooks.page import META_BYTES, Entry, Page, Phase
from worker_hooks.pieces import Piece
from worker_hooks.rng import Randomness
from worker_hooks.shard import Replica

log = logging.getLogger("msrun")

UNDER_WAY = 2  # the page's third record


class Position(NamedTuple):
    """Where in the data a rank is."""

    epoch: int
    batch: int  # consumed in this loop
    meta: bytes = b"{}"


class Private(Protocol):
    """Something that writes its bytes into a record."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What it writes."""

    def fill(self, address: int) -> int:
        """Write it; how many bytes that were."""


class Commit(NamedTuple):
    """What is remembered of a commit."""

    step: int
    snapshots: tuple[Any, ...]
    marks: tuple[Any, ...]
    ready: tuple[torch.Event, ...]  # passed by each accelerator when the state is as of the commit


class Ledger:
    """Written by the main thread at commits; read by the listener while the gate is closed."""

    def __init__(self, pieces: Sequence[Piece], extra: Callable[[], dict[str, Any]]) -> None:
        """Remember nothing yet.

        Args:
            pieces: what was registered.
            extra: JSON-able facts, the same on all replicas, that are saved with the state.
        """
        self.pieces = tuple(pieces)
        self.randomness = Randomness()
        self.buffers = Buffers(self.pieces)
        self.step = 0
        self.updates = [0] * len(self.pieces)  # since the commit
        self.usual: tuple[Any, ...] | None = None  # what a step changes, learned from the last
        self._extra = extra
        self._commit: Commit | None = None
        self._feed: Private | None = None
        self._devices: tuple[torch.device, ...] = ()  # accelerators that hold some of the state
        self._updated: tuple[torch.Event, ...] = ()  # the same after the last update
        self.page: Page | None = None

    def open(self, rank: int, attempt: int, feed: Private, position: Position) -> int:
        """Make the page for what this feed needs, with the present commit in it; its descriptor.

        Raises:
            OSError: no memory.
        """
        self._feed = feed
        self.randomness = Randomness()  # of what is in use by now
        entries = (*self.buffers.entries, *self.randomness.entries, *feed.entries)
        meta_bytes = max(META_BYTES, 4 * len(position.meta))
        fd = pages.create(rank, attempt, entries, meta_bytes)
        self.page = Page(fd)
        devices = {tensor.device for piece in self.pieces for tensor in piece.tensors().values()}
        self._devices = tuple(device for device in devices if device.type != "cpu")
        self.buffers.forget()
        self._note(position)
        return fd

    def is_open_for(self, feed: Private) -> bool:
        """Whether the page has the room that ``feed`` needs."""
        return self._feed is feed

    def commit(self, position: Position) -> None:
        """The state is whole again, one step further."""
        usual = self._changes()
        self.step += 1
        self._note(position)
        self.usual = usual
        self.updates = [0] * len(self.pieces)

    def updated(self, index: int) -> None:
        """A piece's optimizer has made an update."""
        self.updates[index] += 1
        if self._devices:
            self._updated = tuple(_recorded(device) for device in self._devices)

    def under_way(self, position: Position) -> None:
        """Backward begins: write down what this rank's private state will be at the next commit."""
        self._write(self.step + 1, position, is_commit=False)

    def beat(self, position: Position, phase: Phase) -> None:
        """Say how far the rank is."""
        if self.page is not None:
            self.page.beat(self.step, position.epoch, position.batch, phase)

    def _note(self, position: Position) -> None:
        self._commit = Commit(
            self.step,
            tuple(piece.snapshot() for piece in self.pieces),
            tuple(piece.marks() for piece in self.pieces),
            tuple(_recorded(device) for device in self._devices),
        )
        self._write(self.step, position, is_commit=True)

    def _write(self, step: int, position: Position, *, is_commit: bool) -> None:
        if self.page is None:
            return
        epoch, batch, meta = position
        slot = step % 2 if is_commit else UNDER_WAY
        try:
            self.page.write(
                step, epoch, batch, meta, lambda at: self._fill(at, slot), is_commit=is_commit
            )
        except ValueError as error:
            log.warning("rank's data position is not saved: %s", error)
            self.page.write(
                step, epoch, batch, b"{}", lambda at: self._fill(at, slot), is_commit=is_commit
            )

    def _fill(self, address: int, slot: int) -> None:
        assert self._feed is not None
        address += self.buffers.fill(address, slot)
        address += self.randomness.fill(address)
        self._feed.fill(address)

    def _changes(self) -> tuple[Any, ...]:
        """What changed since the commit: updates of each optimizer, and whether each piece did."""
        if self._commit is None:
            return ()
        marks = (piece.marks() for piece in self.pieces)
        changed = (new != old for new, old in zip(marks, self._commit.marks, strict=True))
        return (*self.updates, *changed)

    # --- for the guard, in the listener, with the gate closed ------------------------------------

    def is_complete(self) -> bool:
        """Whether all that a step usually changes has changed: only the commit is missing.

        The script may sit between its update and its commit in a collective that a dead rank never
        joins, an all_reduce of the loss for the log. Nothing of the state is missing then.
        """
        return self.usual is not None and self._changes() == self.usual

    def version(self) -> int:
        """A number that changes whenever a replicated tensor is changed."""
        return sum(
            tensor._version  # noqa: SLF001  torch's own counter of in-place changes
            for piece in self.pieces
            for tensor in piece.tensors().values()
        )

    def position(self, step: int) -> tuple[int, int]:
        """Epoch, counted from 1, and batch of a step."""
        record = None if self.page is None else self.page.record(step)
        return (0, 0) if record is None else (record.epoch + 1, record.batch)

    def replica(self, step: int) -> Replica:
        """The replicated state as of ``step``: the commit's, or that of the complete step after it.

        Raises:
            RuntimeError: it is neither.
        """
        commit = self._commit
        if commit is None or step not in {commit.step, commit.step + 1}:
            raise RuntimeError(f"rank holds step {self.step}, not step {step}")
        snapshots, ready = commit.snapshots, commit.ready
        if step != commit.step:
            ready = self._updated
            snapshots = tuple(piece.snapshot() for piece in self.pieces)
        tensors = {}
        own = self.private(step)[: len(self.buffers.entries)]  # a page begins with them
        replicated, alike = {}, {}
        for piece, snapshot in zip(self.pieces, snapshots, strict=True):
            tensors.update(piece.tensors())
            value, small = piece.encode(snapshot)
            if piece.is_compared:
                tensors.update(small)
                replicated[piece.name] = value
            else:  # a meter of the rank's own, say: one rank's is as good as another's
                own += [(entry_of(name, each), to_bytes(each)) for name, each in small.items()]
                alike[piece.name] = value
        facts = {"step": step, "usual": self.usual, **self._extra()}
        rest = json.dumps({"pieces": replicated})
        more = {"objects": json.dumps(alike), "facts": json.dumps(facts)}
        return Replica(tensors, own, rest, more, ready)

    def private(self, step: int) -> list[tuple[Entry, memoryview]]:
        """What the page has of a step, entry by entry; nothing if it has none."""
        record = None if self.page is None else self.page.record(step)
        if self.page is None or record is None:
            return []
        found, at, payload = [], 0, memoryview(record.payload)
        for entry in self.page.entries:
            found.append((entry, payload[at : at + entry.nbytes]))
            at += entry.nbytes
        return found


def _recorded(device: torch.device) -> torch.Event:
    """A mark in the device's work so far; costs no wait."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
