"""The ledger of one rank: what its state was as of its newest commit, ready to be saved.

Large replicated state is not in it: that is live memory. In it are the small replicated things
(a scheduler's counters, an optimizer's learning rate), remembered at each commit because the
script may change them before the next update, and the private ones, written to the status page.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from operator import ge
from typing import Any, NamedTuple

import torch

from worker_hooks.contract.status_page import Entry, Page, Phase
from worker_hooks.rng.randomness import TORCH
from worker_hooks.state.buffers import Buffers
from worker_hooks.state.module import ModulePiece
from worker_hooks.state.private import Position, PrivateSource, PrivateState
from worker_hooks.state.registry import Piece
from worker_hooks.state.snapshot import tensors_in, version
from worker_hooks.state.tensor import TensorPiece
from worker_hooks.tensors.reader import Reader
from worker_hooks.tensors.shard import Replica, digest
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes

__all__ = ["Commit", "CommittedState", "Position"]

log = logging.getLogger("msrun")


class Failed(NamedTuple):
    """Instead of what a piece could not tell."""

    error: str


class Commit(NamedTuple):
    """What is remembered of a commit."""

    step: int
    snapshots: tuple[Any, ...]
    ready: tuple[torch.Event, ...]  # passed by each accelerator when the state is as of the commit


class CommittedState:
    """Written by the main thread at commits; read by the listener while the gate is closed."""

    def __init__(self, pieces: Sequence[Piece], extra: Callable[[], dict[str, Any]]) -> None:
        """Remember nothing yet.

        Args:
            pieces: what was registered.
            extra: JSON-able facts, the same on all replicas, that are saved with the state.
        """
        self.pieces = tuple(pieces)
        self.private = PrivateState(self.pieces)
        self.step = 0
        self.updates = [0] * len(self.pieces)  # since the commit
        self.usual: tuple[Any, ...] | None = None  # all that any step has changed so far
        self._extra = extra
        self._commit: Commit | None = None
        self._marks: tuple[Any, ...] | None = None  # of the pieces, as of the commit or the loop
        self._after: tuple[Any, ...] | None = None  # the same as of the step's last update
        self._said: set[str] = set()
        self._last_changes: tuple[int, ...] = ()  # by the last step
        self._live = [isinstance(piece, ModulePiece | TensorPiece) for piece in self.pieces]
        self._devices: tuple[torch.device, ...] = ()  # accelerators that hold some of the state
        self._updated: tuple[torch.Event, ...] = ()  # the same after the last update

    @property
    def page(self) -> Page | None:
        """The status page, once there is one."""
        return self.private.page

    @property
    def buffers(self) -> Buffers:
        """The buffers of what was registered."""
        return self.private.buffers

    def open(self, rank: int, attempt: int, source: PrivateSource, position: Position) -> int:
        """Make the page for what this loader needs; its descriptor.

        The newest commit stays as it was. Is there none yet, then it is made here.

        Raises:
            OSError: no memory.
        """
        fd = self.private.open(rank, attempt, source, self.step, position.meta)
        devices = {tensor.device for piece in self.pieces for tensor in piece.tensors().values()}
        self._devices = tuple(device for device in devices if device.type != "cpu")
        if self.page is not None and self.page.record(self.step) is None:
            self._note(position)
        return fd

    def forget(self) -> None:
        """Write to no page any more."""
        self.private.forget()

    def modules(self) -> list[torch.nn.Module]:
        """Every registered module, without its wrappers."""
        return [module for piece in self.pieces for module in piece.modules]

    def resume_at(
        self, step: int, usual: tuple[Any, ...] | None, late_buffers: frozenset[str]
    ) -> None:
        """Training continues from this step, with what was known of it when it was saved."""
        self.step, self.usual = step, usual
        self.private.late |= late_buffers

    def begin_again(self, step: int) -> None:
        """Training goes on from a checkpoint of this step, in the same process as before."""
        self.forget()
        self.step = step
        self.updates = [0] * len(self.pieces)
        self._commit = self._marks = self._after = None
        self._updated = ()

    def begin_loop(self, epoch: int, batch: int) -> None:
        """What was changed since the commit belongs to no step: a schedule's by epoch, say.

        Live state that was changed stays touched: it is not what the commit had.
        """
        new = self._marked()
        trios = zip(new, self._marks or new, self._live, strict=True)
        self._marks = tuple(old if is_live else now for now, old, is_live in trios)
        self.beat(epoch, batch, Phase.IDLE)

    def commit(self, position: Position) -> None:
        """The state is whole again, one step further."""
        marks = self._marked()
        if position.batch:  # else the script came from elsewhere, not from the step of a batch
            changed = self._changes(marks)
            if changed != self._last_changes:
                self._last_changes = changed
                self.usual = tuple(map(max, self.usual or changed, changed))
        self.updates = [0] * len(self.pieces)  # first: an interrupted commit is no complete step
        self.step += 1
        self._note(position, marks)

    def updated(self, index: int) -> None:
        """A piece's optimizer has made an update."""
        self.updates[index] += 1
        self._after = self._marked()
        if self._devices:
            self._updated = tuple([_recorded(device) for device in self._devices])

    def under_way(self, position: Position) -> None:
        """Backward begins: write down what this rank's private state will be at the next commit."""
        self.private.write(self.step + 1, position, is_commit=False)

    def beat(self, epoch: int, batch: int, phase: Phase) -> None:
        """Say how far the rank is."""
        page = self.private.page
        if page is not None:
            page.beat(self.step, epoch, batch, phase)

    def enter(self, phase: Phase) -> None:
        """Say what the rank does now."""
        page = self.private.page
        if page is not None:
            page.enter(phase)

    def _note(self, position: Position, marks: tuple[Any, ...] | None = None) -> None:
        self._commit = Commit(
            self.step,
            self._snapshots(),
            tuple([_recorded(device) for device in self._devices]) if self._devices else (),
        )
        self._marks, self._after = marks or self._marked(), None
        self.private.write(self.step, position, is_commit=True)

    def _marked(self) -> tuple[Any, ...]:
        try:
            return tuple([piece.marks() for piece in self.pieces])
        except Exception:  # noqa: BLE001  the script's own code; once more to see whose
            return tuple(map(self._mark, self.pieces))

    def _snapshots(self) -> tuple[Any, ...]:
        try:
            return tuple([piece.snapshot() for piece in self.pieces])
        except Exception:  # noqa: BLE001  as above
            return tuple(map(self._snapshot, self.pieces))

    def _mark(self, piece: Piece) -> Any:
        try:
            return piece.marks()
        except Exception as error:  # noqa: BLE001  the script's own code
            return self._failed(piece, error)

    def _snapshot(self, piece: Piece) -> Any:
        try:
            return piece.snapshot()
        except Exception as error:  # noqa: BLE001  the script's own code
            return self._failed(piece, error)

    def _failed(self, piece: Piece, error: Exception) -> Failed:
        if piece.name not in self._said:
            self._said.add(piece.name)
            log.warning("%s cannot be saved any more: %r", piece.name, error)
        return Failed(repr(error))

    def _changes(self, marks: tuple[Any, ...] | None = None) -> tuple[int, ...]:
        """Updates of each optimizer in the step, and what changed in each piece after the last.

        What changes before the updates says nothing about how far the script is behind them.
        """
        then = self._marks if self._after is None else self._after
        if then is None:
            return ()
        pairs = zip(marks or self._marked(), then, strict=True)
        # what did not move, which is most, is cheap to tell
        return (*self.updates, *[0 if new == old else _moved(new, old) for new, old in pairs])

    # --- for the guard, in the listener, with the gate closed ------------------------------------

    def is_complete(self) -> bool:
        """Whether all that a step usually changes has changed: only the commit is missing.

        The script may sit between its update and its commit in a collective that a dead rank never
        joins, an all_reduce of the loss for the log. Nothing of the state is missing then.
        """
        if self.usual is None or self._marks is None:
            return False
        return all(map(ge, self._changes(), self.usual))

    def is_touched(self) -> bool:
        """Whether live state was changed since the commit, by an optimizer or by the script."""
        if self._marks is None:
            return False
        pairs = zip(self.pieces, self._marks, self._live, strict=True)
        return any(is_live and piece.marks() != old for piece, old, is_live in pairs)

    def version(self) -> int:
        """A number that changes whenever a replicated tensor is changed."""
        return sum(version(tensor) for piece in self.pieces for tensor in piece.tensors().values())

    def nbytes(self) -> tuple[int, int]:
        """About how large live state is, and what of it is in ordinary memory; it never fails."""
        try:
            held = [
                [one.state for one in each.optimizers] or each.tensors() for each in self.pieces
            ]
            found = tensors_in(held)
            here = sum(tensor.nbytes for tensor in found if tensor.device.type == "cpu")
            return sum(tensor.nbytes for tensor in found), here
        except Exception:  # noqa: BLE001  the script's own kinds of tensors; to save them says why
            return 0, 0

    def position(self, step: int) -> tuple[int, int]:
        """Epoch, counted from 1, and batch of a step."""
        record = None if self.page is None else self.page.record(step)
        return (0, 0) if record is None else (record.epoch + 1, record.batch)

    def replica(self, step: int) -> Replica:
        """The replicated state as of ``step``: the commit's, or that of the complete step after it.

        Raises:
            RuntimeError: it is neither, or a piece could not tell its state.
        """
        commit = self._commit
        if commit is None or step not in {commit.step, commit.step + 1}:
            raise RuntimeError(f"rank holds step {self.step}, not step {step}")
        snapshots, ready = commit.snapshots, commit.ready
        own = self.private.read(step)[: len(self.buffers.entries)]  # a page begins with them
        if step == commit.step and self.is_touched():
            raise RuntimeError(f"the script has changed the state after step {step}")
        if step != commit.step:
            ready = self._updated
            own = [(entry, self._newest(entry, octets)) for entry, octets in own]
            snapshots = self._snapshots()
        late = sorted(self.private.late)
        facts = {"step": step, "usual": self.usual, "late": late, **self._extra()}
        return self._replica(snapshots, own, facts, ready)

    def present(self) -> Replica:
        """What is registered as it is at this moment, for its digest; the main thread asks.

        Raises:
            RuntimeError: a piece cannot tell its state.
        """
        return self._replica(self._snapshots(), [], {}, ())

    def _replica(
        self,
        snapshots: Sequence[Any],
        own: list[tuple[Entry, memoryview]],
        facts: dict[str, Any],
        ready: Sequence[torch.Event],
    ) -> Replica:
        tensors = {}
        replicated, alike = {}, {}
        for piece, snapshot in zip(self.pieces, snapshots, strict=True):
            if isinstance(snapshot, Failed):
                raise RuntimeError(f"{piece.name} cannot be saved: {snapshot.error}")  # noqa: TRY004
            tensors.update(piece.tensors())
            value, small = piece.encode(snapshot)
            if piece.is_compared:
                tensors.update(small)
                replicated[piece.name] = value
            else:  # a meter of the rank's own, say: one rank's is as good as another's
                own += [(entry_of(name, each), to_bytes(each)) for name, each in small.items()]
                alike[piece.name] = value
        rest = json.dumps({"pieces": replicated})
        more = {"objects": json.dumps(alike), "facts": json.dumps(facts)}
        return Replica(tensors, own, rest, more, ready)

    def digests(self) -> tuple[str, str]:
        """For a drill: of the replicated state, and of what is the rank's own, at the commit.

        What numpy and python drew, perhaps without a seed, differs between any two runs.
        """
        replicated = digest(self.replica(self.step), lambda _: None)
        own = hashlib.sha256()
        wanted = {TORCH, *(entry.name for entry in self.buffers.entries)}
        for entry, octets in self.private.read(self.step):
            if entry.name in wanted:
                own.update(octets)
        return replicated, own.hexdigest()

    def _newest(self, entry: Entry, octets: memoryview) -> memoryview:
        """A buffer as it will be at the commit that is missing: as it is now, if it is a late one.

        The record under way has those of before the last backward.
        """
        if entry.name not in self.private.late:
            return octets
        modules = (piece for piece in self.pieces if isinstance(piece, ModulePiece))
        places = (place for piece in modules for place in piece.places())
        tensor = next((place.tensor for place in places if place.name == entry.name), None)
        if tensor is None or tensor.nbytes != entry.nbytes:
            return octets
        return memoryview(b"".join(Reader(self._updated).pieces(tensor)))


def _moved(new: Any, old: Any) -> int:
    """How far a counter went; at least one, for whatever else is another now."""
    return max(1, new - old) if isinstance(new, int) and isinstance(old, int) else 1


def _recorded(device: torch.device) -> torch.Event:
    """A mark in the device's work so far; costs no wait."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
