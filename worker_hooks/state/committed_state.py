"""The state of one rank as of its newest commit, ready to be saved.

Large replicated state is not copied: it is live memory, except for what changes there between a
commit and the next update. Small replicated state (a scheduler's
counters, an optimizer's learning rate) is copied at each commit because the script may change it
before the next update. Private state is written to the status page.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import ge
from typing import Any, NamedTuple

import torch

from worker_hooks.changes.observer import Audited, ChangeObserver, CommittedTensors
from worker_hooks.contract.status_page import Entry, Page, Phase
from worker_hooks.device import devices
from worker_hooks.device.timeline import MarkKind
from worker_hooks.distributed import process_group
from worker_hooks.rng.randomness import TORCH
from worker_hooks.state.buffers import Buffers
from worker_hooks.state.device_state import DeviceReading, DeviceState, HeldStep
from worker_hooks.state.mismatch import listed
from worker_hooks.state.module import ModulePiece
from worker_hooks.state.optimizer import OptimizerPiece
from worker_hooks.state.pending_gradients import PendingGradients
from worker_hooks.state.private import Position, PrivateSource, PrivateState
from worker_hooks.state.registry import (
    CommitPlaces,
    Piece,
    live_tensors,
    names_between_loops,
    structures,
)
from worker_hooks.state.replica import PieceReader, replica_of, rest_of
from worker_hooks.state.snapshot import NotSavableError, tensors_in, version
from worker_hooks.state.tensor import TensorPiece
from worker_hooks.tensors.placements import part_of
from worker_hooks.tensors.reader import Reader
from worker_hooks.tensors.shard import Replica, digest

__all__ = ["Commit", "CommittedState", "Position"]

log = logging.getLogger("msrun")

CAPTURED = "an optimizer's update was captured in a CUDA graph, whose replays nobody can see"


class Commit(NamedTuple):
    """What a commit keeps in memory."""

    step: int
    snapshots: tuple[Any, ...]
    tensors: CommittedTensors  # those in live memory, and copies of some


class CommittedState:
    """Written by the main thread at commits; read by the listener while the gate is closed."""

    def __init__(self, pieces: Sequence[Piece], extra_facts: Callable[[], dict[str, Any]]) -> None:
        """There is no commit yet.

        ``extra_facts``: returns more facts as JSON, the same on all replicas, to be saved.
        """
        self.pieces = tuple(pieces)
        self.private = PrivateState(self.pieces)
        self.step = 0
        self.updates = [0] * len(self.pieces)  # since the commit
        # the most that any step has changed so far
        self.typical_changes: tuple[Any, ...] | None = None
        self._reader = PieceReader(self.pieces)
        self.changes = ChangeObserver(self._reader.tensors)
        self.settled_position: Callable[[], Position | None] | None = None
        """Returns where in the data a blocked step will be committed; ``None``: something in the
        script has yet to change."""
        self._extra_facts = extra_facts
        self._commit: Commit | None = None
        self._marks: tuple[Any, ...] | None = None  # as of the commit, or of the loop's begin
        self._after: tuple[Any, ...] | None = None  # the same, as of the last update of the step
        self._begun: tuple[Any, ...] | None = None  # and as a loop began behind the commit
        self._last_changes: tuple[int, ...] = ()  # of the last step
        self._changes_between = [False] * len(self.pieces)  # seen to change between loops
        self._live = [isinstance(piece, ModulePiece | TensorPiece) for piece in self.pieces]
        self.device: DeviceState | None = None  # of accelerators that hold some of the state
        self.reading = DeviceReading()
        self._before: Commit | None = None  # the commit before, which these may still hold
        self._pending = PendingGradients(self.pieces)
        # whether, and how many collectives had begun by the last update
        self._changes_behind, self._collectives = False, 0
        self._registered = structures(self.pieces)
        self._structures = self._registered  # as seen last
        self.parts: dict[int, list[torch.Tensor]] = {}  # torch counts no changes of these
        self.kept: CommitPlaces | None = None

    @property
    def why_pending(self) -> str:
        """Why the newest commit is no place to resume from; empty: it is one."""
        return self._pending.why

    @property
    def page(self) -> Page | None:
        """The status page; ``None`` before :meth:`open`."""
        return self.private.page

    @property
    def buffers(self) -> Buffers:
        """The buffers of what was registered."""
        return self.private.buffers

    def open(self, rank: int, attempt: int, source: PrivateSource, position: Position) -> int:
        """Make a page with room for what this loader needs; return its descriptor.

        The newest commit is kept. If there is none yet, the present state becomes it.

        Raises:
            OSError: there is no memory.
        """
        live = live_tensors(self.pieces).values()
        held = devices.devices_of(live)
        if held and self.device is None:
            self.device, self.changes.keeps_host = DeviceState(devices.timeline_of(held)), True
            self.reading.prepare(live)
        fd = self.private.open(rank, attempt, source, position.meta, held)
        if self.kept is not None and self.page is not None:
            self.page.note_keeper(self.kept.keeper, self.kept.board)
        if self.page is not None and self.page.record(self.step) is None:
            self._note(position)
            self.private.wait()  # no peer's progress will prove that a device has written this one
            self.audit()
        return fd

    def forget(self) -> None:
        """Drop the page."""
        self.private.forget()

    def modules(self) -> list[torch.nn.Module]:
        """Every registered module, without its wrappers."""
        return [module for piece in self.pieces for module in piece.modules]

    def reshaped(self) -> list[str]:
        """The names of what has other parameters, modules or groups than when it was registered."""
        now = structures(self.pieces)
        return sorted(name for name in now if now[name] != self._registered[name])

    def has_new_structure(self, *, is_committed: bool) -> bool:
        """Whether something has other parameters, modules or groups than when this was asked last.

        ``is_committed``: this is asked right behind a commit, which has looked for them.
        """
        if not is_committed:
            live_tensors(self.pieces)
        was, self._structures = self._structures, structures(self.pieces)
        return was != self._structures

    def resume_at(
        self,
        step: int,
        typical_changes: tuple[Any, ...] | None,
        late_buffers: frozenset[str],
        changing: frozenset[str] = frozenset(),
        audited: Audited | None = None,
    ) -> None:
        """Training continues from this step, with what was known of it when it was saved."""
        self.step, self.typical_changes = step, typical_changes
        self.private.late_buffers |= late_buffers
        self.changes.expect(changing, audited)

    def begin_again(self, step: int) -> None:
        """Training continues from a checkpoint of this step, in the same process as before."""
        self.forget()
        if self.kept is not None:
            self.kept.forget()
        self.step = step
        self.updates = [0] * len(self.pieces)
        self._pending.forget()
        self._commit = self._before = self._marks = self._after = self._begun = None
        self.changes.forget()
        if self.device is not None:
            self.device.forget()

    def begin_loop(self, epoch: int, batch: int) -> None:
        """Changes since the commit belong to no step: those of a schedule by epoch, for example.

        Live state that was changed still counts as touched: the commit had another one.
        """
        self._begun = new = self._reader.marks()
        trios = list(zip(new, self._marks or new, self._live, strict=True))
        for index, (now, old, _) in enumerate(trios):
            self._changes_between[index] |= now != old
        self._marks = tuple(old if is_live else now for now, old, is_live in trios)
        if self._commit is not None:
            self.changes.begin_loop(self._commit.tensors)
        self.beat(epoch, batch, Phase.IDLE)

    def commit(self, position: Position) -> None:
        """The step is complete: the state is whole again."""
        marks = self._reader.marks()
        if self.changes.is_open or self.changes.baseline is not None:
            self.changes.step_ends(self._committed_tensors, is_step=bool(position.batch))
        if position.batch:  # else the changes are not those of a batch's step
            changed = self._changes(marks)
            self._look_behind(marks)
            if changed != self._last_changes:
                self._last_changes = changed
                self.typical_changes = tuple(map(max, self.typical_changes or changed, changed))
        if self._pending.are_possible:
            self._pending.committed(self.updates)
        # first: a commit that is interrupted must not look like a complete step
        self.updates = [0] * len(self.pieces)
        self.step += 1
        self._note(position, marks)

    def _look_behind(self, marks: tuple[Any, ...]) -> None:
        """Find out whether a step changes weights behind its update, and has a collective there.

        A rank that waits in such a collective may have yet to change them. Nobody can tell.
        """
        behind = () if self._after is None else zip(self._live, marks, self._after, strict=True)
        has_changed = self.changes.has_unseen or any(
            is_live and new != old for is_live, new, old in behind
        )
        if self._changes_behind and has_changed and process_group.collectives() > self._collectives:
            self.changes.keep_all()
        self._changes_behind |= has_changed

    def audit(self) -> None:
        """Behind a commit: look at the content of tensors, if the next step is audited."""
        if self._commit is not None:
            self.changes.committed(self._commit.tensors)

    def leave_loop(self, wait: Callable[[], object]) -> None:
        """A loop is over; its last step is committed.

        ``wait``: waits while this rank's state may be read.
        """
        if self._commit is None:
            return
        held, names = self._commit.tensors, names_between_loops(self.pieces)
        copies = self.changes.copies_between_loops(held, *names)
        if copies:
            wait()  # who reads the state is to find the same places as it began
            held = held._replace(copies={**held.copies, **copies})
            self._commit = self._commit._replace(tensors=held)
            if self.kept is not None:
                self.kept.note(self, self._commit, self.private.read(self.step))
        self.changes.leave_loop(held)

    def update_begins(self) -> None:
        """An optimizer is about to begin an update."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self.changes.give_up(CAPTURED)
        if self.changes.is_open and self._commit is not None:
            self._reader.count_parts()
            self.changes.update_begins(self._commit.tensors)

    def updated(self, index: int) -> None:
        """The optimizer of a piece has made an update."""
        self.updates[index] += 1
        if parts := self.parts.get(index):
            torch.autograd.graph.increment_version(parts)
        if self._pending.are_possible:
            self._pending.updated(index)
        self._after = self._reader.marks()
        if self.changes.baseline is not None:
            self.changes.updated()
        if self._changes_behind:
            self._collectives = process_group.collectives()
        if self.device is not None:
            self.device.timeline.end_update(self.step + 1)

    def under_way(self, position: Position) -> None:
        """Backward begins: write the private state that this rank will have at the next commit."""
        try:  # noqa: SIM105  suppress() costs more, in each step
            self.private.script.look(is_commit=False)
        except TypeError:  # the commit will say what cannot be saved
            pass
        self.private.write(self.step + 1, position, is_commit=False)

    def beat(self, epoch: int, batch: int, phase: Phase) -> None:
        """Write to the page how far the rank is."""
        page = self.private.page
        if page is not None:
            page.beat(self.step, epoch, batch, phase)

    @property
    def _committed_tensors(self) -> CommittedTensors | None:
        return None if self._commit is None else self._commit.tensors

    def _note(self, position: Position, marks: tuple[Any, ...] | None = None) -> None:
        snapshots = self._reader.snapshots()  # first: they say which tensors of an object are large
        if (kept := self.kept) is not None and kept.is_over:
            kept.end()
            kept = self.kept = None
            self.changes.keep_less()
        if kept is not None:
            kept.commit_begins(self.step)
        before, tensors = self._commit, self.changes.commit(self.step)
        if before is None or before.tensors.versions.tensors is not tensors.versions.tensors:
            marks = None  # those that were read are of other tensors
            self.parts = self._reader.find_parts()
            pairs = zip(self.pieces, snapshots, strict=True)  # a module may have others inside
            again = self._reader.snapshot
            snapshots = tuple(
                again(one) if isinstance(one, ModulePiece) else old for one, old in pairs
            )
        is_as_updated = marks is not None and marks == self._after and not self.changes.has_unseen
        self._before, self._commit = before, Commit(self.step, snapshots, tensors)
        self._marks, self._after, self._begun = marks or self._reader.marks(), None, None
        # the page's record counts once it is noted: whatever a dead rank's page says is to be found
        noted = None if kept is None else partial(kept.note, self, self._commit)
        self.private.write(self.step, position, is_commit=True, noted=noted)
        if self.device is not None:  # behind what the device copies to the page
            is_as_updated &= all(map(devices.is_on_host, tensors.copies.values()))
            is_as_updated &= not self.private.may_have_late_buffers()
            self.device.committed(self.step, is_as_updated=is_as_updated)

    def _changes(self, marks: tuple[Any, ...] | None = None) -> tuple[int, ...]:
        """Each optimizer's updates in this step, and what changed in each piece after the last one.

        Changes before the updates do not show how far the script has come after them.
        """
        if (then := self._after or self._begun or self._marks) is None:
            return ()
        pairs = zip(marks or self._reader.marks(), then, strict=True)
        # most pieces did not change, and that is cheap to see
        return (*self.updates, *[0 if new == old else _moved(new, old) for new, old in pairs])

    # --- for the guard, in the listener, with the gate closed ------------------------------------

    def is_complete(self) -> bool:
        """Whether everything that a step usually changes has changed: only the commit is missing.

        Between its update and its commit the script may be blocked in a collective that a dead rank
        never joins, such as an all_reduce of the loss for the log. The state is complete then.
        """
        if self.typical_changes is None or self._marks is None or self._commit is None:
            return False
        if not self.changes.sees_all or self.private.has_drawn_late():
            return False
        is_usual = all(map(ge, self._changes(), self.typical_changes))
        is_doubtful = self._is_in_doubt(self._commit, self._marks)
        if not is_usual or is_doubtful:
            return False
        try:
            if self.settled_position is None:
                return self.private.script.settle()
            position = self.settled_position()
            return position is not None and self.private.settle(self.step + 1, position)
        except Exception:  # the main thread may wake up, and change what is read
            log.exception("step %d is not taken for complete", self.step + 1)
            return False

    def is_copied(self) -> bool:
        """Whether the newest commit can be saved in spite of an update that has begun since."""
        commit = self._commit
        if commit is None or self.why_unknown():
            return False
        names, copies = commit.tensors.versions.tensors.keys(), commit.tensors.copies.keys()
        try:
            has_all = bool(names) and copies >= names and live_tensors(self.pieces).keys() == names
            return has_all and self.are_all_tensors()
        except (RuntimeError, AttributeError):
            # an optimizer makes its state just now, or is an odd one
            return False

    def are_all_tensors(self) -> bool:
        """What else an optimizer's state holds is read as it is now."""
        optimizers = (each for each in self.pieces if isinstance(each, OptimizerPiece))
        return all(each.is_all_tensors for each in optimizers)

    def settle_devices(
        self, grace_s: float, *, is_updated: bool, is_held: bool = False
    ) -> HeldStep:
        """Which step the accelerators hold, and why it cannot be saved.

        Args:
            grace_s: how long an update may take there, in seconds.
            is_updated: only the commit of the update is missing.
            is_held: the main thread waits at a commit, and gives the accelerators nothing to do.
        """
        assert self.device is not None
        held = self.device.settle(grace_s, self.step, is_updated=is_updated)
        commit = self._commit_of(held.step)
        if held.why_not or commit is None or held.step != commit.step:
            return held
        on_devices = devices.devices_of(commit.tensors.versions.tensors.values())
        self.changes.is_idle = is_held and devices.are_idle(on_devices)
        why = self.changes.why_unknown(commit.tensors)
        if self.device.is_behind(held.step):
            names = commit.tensors.versions.tensors
            host = {name for name, each in names.items() if devices.is_on_host(each)}
            if not self.are_all_tensors():
                why = why or "an optimizer's state holds more than tensors, which has gone on"
            if lacking := host - commit.tensors.copies.keys():
                why = why or f"{listed(lacking)} in host memory has gone on"
            if live_tensors(self.pieces).keys() != names.keys():  # as in the first step
                why = why or "the state has other tensors by now"
        else:
            why = why or self.why_changed()
        return held._replace(why_not=why)

    def why_moved(self) -> str:
        """Why what was read of accelerators may be of two steps; empty: it is of one."""
        return "" if self.device is None else self.device.why_moved()

    def _commit_of(self, step: int) -> Commit | None:
        """The commit of this step, or the newest one for the complete step after it."""
        newest, before = self._commit, self._before
        is_before = newest is not None and step == newest.step - 1 and self.device is not None
        return before if is_before else newest

    def _is_in_doubt(self, commit: Commit, marks: tuple[Any, ...]) -> bool:
        """Whether something has not changed in this step that may change seldom, behind this point.

        An average that is taken every tenth step, say: nobody knows before the tenth step.
        """
        trained = {
            id(part_of(parameter))
            for piece in self.pieces
            for optimizer in piece.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        now, moved = self._reader.marks(), self.changes.moved_in_step(commit.tensors)
        for index, piece in enumerate(self.pieces):
            if piece.optimizers:
                is_still = not self.updates[index]
            elif self._live[index]:
                found = piece.tensors().items()
                is_still = any(
                    id(each) not in trained and name not in moved for name, each in found
                )
            else:  # what was seen to change between loops, and there alone, does so
                is_known = self._changes_between[index] or not commit.snapshots[index]
                is_still = now[index] == marks[index] and not is_known
            if is_still:
                return True
        return False

    @property
    def is_loop_without_step(self) -> bool:
        """Whether a loop has begun since the newest commit."""
        return self._begun is not None

    def is_touched(self) -> bool:
        """Whether weights were changed since the commit, by an optimizer or by the script."""
        return self._has_moved(self._marks)

    def is_touched_in_loop(self) -> bool:
        """As :meth:`is_touched`, but not before the loop began."""
        return self._has_moved(self._begun or self._marks)

    def _has_moved(self, then: tuple[Any, ...] | None) -> bool:
        if then is None:
            return False
        trios = zip(self._reader.marks(), then, self._live, strict=True)
        return any(is_live and now != old for now, old, is_live in trios)

    def why_changed(self) -> str:
        """What is not as of the commit any more, and has no copy, as text; empty: all is."""
        tensors = self._committed_tensors
        changed = set() if tensors is None else self.changes.changed(tensors)
        return f"{listed(changed)} changed after step {self.step}" if changed else ""

    def why_unknown(self) -> str:
        """Why the state of the newest commit is not known although nothing seems to be wrong."""
        tensors = self._committed_tensors
        if tensors is None or self.why_pending:
            return self.why_pending
        return self.changes.why_unknown(tensors)

    def is_as_committed(self) -> bool:
        """Whether all of the state in live memory is known to be that of the newest commit."""
        held = self._committed_tensors
        if self.device is not None and not self.device.holds(self.step):
            return False
        return held is not None and not (held.copies or self.why_changed() or self.why_unknown())

    def version(self, step: int) -> int:
        """A number that changes whenever a tensor changes that :meth:`replica` reads where it lies.

        Of the newest commit some may be copied; of the complete step after it none is.
        """
        commit = self._commit_of(step)
        held = None if commit is None else commit.tensors
        copies = {} if commit is None or step != commit.step else commit.tensors.copies
        live = live_tensors(self.pieces)
        new = set() if held is None else live.keys() - held.versions.tensors.keys()
        changed = 0 if held is None else len(self.changes.changed(held) | new)
        return changed + sum(version(each) for name, each in live.items() if name not in copies)

    def nbytes(self) -> tuple[int, int]:
        """About how large live state is, and what part of it is in host memory. Never raises."""
        try:
            held = [
                [one.state for one in each.optimizers] or each.tensors() for each in self.pieces
            ]
            found = tensors_in(held)
            here = sum(tensor.nbytes for tensor in found if tensor.device.type == "cpu")
            return sum(tensor.nbytes for tensor in found), here
        except Exception:  # noqa: BLE001  the script's own kinds of tensors; saving them will say why
            return 0, 0

    def position(self, step: int) -> tuple[int, int]:
        """Epoch, counted from 1, and batch of a step."""
        found = None if self.page is None else self.page.position(step)
        return (0, 0) if found is None else (found[0] + 1, found[1])

    def replica(self, step: int, without: Collection[str] = ()) -> Replica:
        """The replicated state as of ``step``: the commit's, or that of the complete step after it.

        ``without``: names of what is left out, as ranks compare them.

        Raises:
            NotSavableError: it is neither, or the state of a piece could not be read.
        """
        commit = self._commit_of(step)
        if commit is None or step not in {commit.step, commit.step + 1}:
            raise NotSavableError(f"rank holds step {self.step}, not step {step}")
        is_behind = self.device is not None and self.device.is_behind(step)
        if step == commit.step and not is_behind and (why := self.why_changed()):
            raise NotSavableError(why)
        found = self._as_of(commit, step)
        return rest_of(found, self.pieces, without) if without else found

    def _as_of(self, commit: Commit, step: int) -> Replica:
        snapshots, copies = commit.snapshots, commit.tensors.copies
        access = self.reading.passed(self.device, commit.step, MarkKind.COMMIT)
        names = {entry.name for entry in self.buffers.entries}
        own = [each for each in self.private.read(step) if each[0].name in names]
        held: Collection[str] | None = commit.tensors.versions.tensors
        if step != commit.step:
            held = None
            access, copies = self.reading.passed(self.device, step, MarkKind.END), {}
            own = [(entry, self._newest(entry, octets)) for entry, octets in own]
            snapshots = self._reader.snapshots()
        facts = self.facts_of(step)
        return replica_of(self.pieces, snapshots, copies, own, facts, access, held)

    def facts_of(self, step: int) -> dict[str, Any]:
        """What else is saved of a step."""
        return {
            "step": step,
            "usual": self.typical_changes,
            "late": sorted(self.private.late_as_of(step)),
            "late_on_device": [each.name for each in self.buffers.device_entries],
            "changing": self.changes.changing,
            "audited": self.changes.audited,
            "reshaped": self.reshaped(),
            **self._extra_facts(),
        }

    def present(self) -> Replica:
        """The registered state as it is now, for its digest. For the main thread.

        Raises:
            RuntimeError: the state of a piece cannot be read.
        """
        self.reading.prepare(live_tensors(self.pieces).values())
        return replica_of(self.pieces, self._reader.snapshots(), {}, [], {}, self.reading.queued())

    def digests(self) -> tuple[str, str]:
        """For a drill: of the replicated and of the private state, as of the commit.

        The states of numpy and Python are left out: without a seed they differ between two runs.
        """
        assert self._commit is not None  # whatever changed after it, which no step has seen
        self.private.wait()
        replicated = digest(self._as_of(self._commit, self.step), lambda _: None)
        own = hashlib.sha256()
        wanted = {TORCH, *(entry.name for entry in self.buffers.entries)}
        for entry, octets in self.private.read(self.step):
            if entry.name in wanted:
                own.update(octets)
        return replicated, own.hexdigest()

    def _newest(self, entry: Entry, octets: memoryview) -> memoryview:
        """A buffer as it will be at the missing commit: a late buffer is so now.

        The page's record of the step under way has the buffers from before the last backward.
        """
        if entry.name not in self.private.late_buffers:
            return octets
        modules = (piece for piece in self.pieces if isinstance(piece, ModulePiece))
        places = (place for piece in modules for place in piece.places())
        tensor = next((place.tensor for place in places if place.name == entry.name), None)
        if tensor is None or tensor.nbytes != entry.nbytes:
            return octets
        access = self.reading.passed(self.device, self.step + 1, MarkKind.END)
        return memoryview(b"".join(Reader(access).pieces(tensor)))


def _moved(new: Any, old: Any) -> int:
    """How far a counter went; at least 1, which also stands for any other change."""
    return max(1, new - old) if isinstance(new, int) and isinstance(old, int) else 1
