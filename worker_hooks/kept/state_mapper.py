"""Notes at each commit where the state lies in this process's memory, for when it is killed.

The note must be cheap: what does not change from one commit to the next (names, shapes, the state
of an optimizer but for its tensors) is made once. So a commit costs a look at each tensor's version
and address, and the text of what did change.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress, count
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from worker_hooks.contract.status_page import Entry
from worker_hooks.kept.keeper import start_keeper
from worker_hooks.kept.note_cost import NoteCost
from worker_hooks.kept.tensor_chain import tensor_chain
from worker_hooks.machine import kept_memory
from worker_hooks.machine.kept_memory import BOARD_BYTES, BoardWriter, packed
from worker_hooks.state.committed_state import Commit, CommittedState
from worker_hooks.state.private import PrivateParts
from worker_hooks.state.registry import Piece, boxes_of, is_told_by_tensors, scripts_tensors
from worker_hooks.state.snapshot import UnreadableState, is_constant, version
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.shard_file import OBJECTS, REST, SHARDING
from worker_hooks.tensors import part_versions, shard
from worker_hooks.tensors.placements import Box, is_cut
from worker_hooks.tensors.tensor_bytes import entry_of, plain, to_bytes

_COUNT = 8  # bytes of a safetensors header's length
_ALIGNED = 64
TIMES = 8  # commits in a row after which a reason is none of the first steps'
_LAYOUTS = 4  # known at once: copies are made in turns in two places
_METADATA = "__metadata__"
_mapping: list[StateMapper] = []
_WALL = 0x40000000  # __WALL, linux/wait.h: also children whose end signals nothing
_PIECES = json.dumps('"pieces"')[1:-1]


class UnmappedError(Exception):
    """No note can be made, for the reason in the text."""


class _PieceState(NamedTuple):
    """What was made of a piece at a commit."""

    tensors: Mapping[str, Tensor]
    snapshot: Any
    text: str  # name and value, of JSON that is a part of a JSON string
    small: Mapping[str, Tensor]
    boxes: Mapping[str, Box]
    is_lasting: bool  # true of any commit with the same tensors and snapshot


class _Layout(NamedTuple):
    """What some tensors, and the copies of some of them, make of a file, whatever is in them."""

    kept: Sequence[object]  # alive, as their ids are the key
    small: Sequence[str]  # the names of those that are made anew at each commit, in their order
    live: Sequence[Tensor]  # those that are not copied
    places: Sequence[int]  # their addresses
    counted: Sequence[bool]  # which of the versions that a commit reads are theirs
    cut: Sequence[Tensor]  # distributed tensors, whose parts are among them
    segments: bytes
    replicated: int
    tensors: bytes  # of the proofs
    elements: bytes
    fields: bytes  # of the head: every tensor's
    metadata: str  # of the head: what is the same at each commit
    seed: tuple[str, str]  # of :func:`worker_hooks.tensors.shard.seed_texts`


class StateMapper:
    """One for each process; the main thread calls it."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        why_unsafe: Callable[[], tuple[str, str]],
        say: Callable[[str], None],
        readers: tuple[int, ...],
        tell_cost: Callable[[float, float], None] | None = None,
    ) -> None:
        """Start the keeper; nothing is noted yet.

        Args:
            why_unsafe: returns why no step of this training may be saved, and why none may be read
                in live memory; empty: some may.
            say: tells people, once for each reason, why what lies there cannot be read.
            readers: the process id of who reads it; and of who outlives that one until all that it
                is needed for is saved, if there is such a one.
            tell_cost: is told now and then what a note and a step take, in seconds.

        Raises:
            OSError: the kernel does not allow it.
            UnknownTensorLayoutError: of this torch nobody knows where it keeps versions.
        """
        self._pieces = tuple(pieces)
        self._why_unsafe = why_unsafe
        self._say = say
        self._unread = "", 0  # why, and for how many commits in a row
        self._chain = tensor_chain()
        self._memory = ctypes.create_string_buffer(BOARD_BYTES)
        self._board = BoardWriter(memoryview(self._memory).cast("B"))
        # alive: the maps on the board, and the tensors that they tell of
        self._maps: list[tuple[bytes, _Layout | None]] = [(b"", None)] * kept_memory.SLOTS
        self._known: list[_PieceState | None] = [None] * len(self._pieces)
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._said: set[str] = set()
        self._step = 0  # of the newest note
        self._tell_cost, self._cost = tell_cost, NoteCost()
        self.is_over = False
        self._pid = os.getpid()
        self.board = ctypes.addressof(self._memory)
        self.keeper = start_keeper(*readers)
        """Its process id."""
        _mapping.append(self)  # what it tells of is not freed before the process ends by itself
        atexit.register(self._end)

    def _end(self) -> None:
        """The process ends by itself: then it frees its memory, and nobody needs that."""
        if os.getpid() == self._pid:
            self._board.wipe()
            with contextlib.suppress(ProcessLookupError):  # the agent may have killed it
                os.kill(self.keeper, signal.SIGKILL)

    def end(self) -> None:
        """Nobody will read any more what this process leaves."""
        self._end()
        atexit.unregister(self._end)
        _mapping.remove(self)
        if os.getpid() == self._pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.keeper, _WALL)

    def update_begins(self) -> None:
        """Until the next note, only what is copied is as of the newest one."""
        self._board.tear(self._step + 1)

    def commit_begins(self, step: int) -> None:
        """What was noted in this one's place is overwritten."""
        if self._tell_cost is not None:
            self._cost.commit_begins(perf_counter())
        self._board.hide(step % kept_memory.SLOTS)

    def forget(self) -> None:
        """There is no commit any more: another state takes the place of this one."""
        self._board.wipe()

    def note(self, state: CommittedState, commit: Commit, private: PrivateParts) -> None:
        """Note where the commit's state lies; never raises."""
        began, layout = perf_counter(), None
        try:
            octets, layout = self._map(state, commit, private)
        except UnmappedError as error:
            octets = self._nothing(commit.step, str(error))
        except Exception as error:  # noqa: BLE001  the script's own objects
            octets = self._nothing(commit.step, repr(error))
        slot, self._step = commit.step % kept_memory.SLOTS, commit.step
        # the elements of a bytes object follow its fixed part, and one more byte, which is counted
        self._board.show(slot, id(octets) + bytes.__basicsize__ - 1)
        self._maps[slot] = octets, layout  # last: it frees what was shown before
        if self._tell_cost is not None and (found := self._cost.noted(perf_counter() - began)):
            self._tell_cost(*found)

    def _nothing(self, step: int, why: str) -> bytes:
        known, times = self._unread
        self._unread = why, times + 1 if why == known else 1
        if self._unread[1] == TIMES and why not in self._said:
            self._said.add(why)
            self._say(why)
        return kept_memory.encode(
            step=step,
            head=b"",
            segments=b"",
            replicated=0,
            chain=self._chain,
            changes=0,
            seed="",
            inline=b"",
            is_copied=False,
            why_not=why[:500],
        )

    def _map(
        self, committed: CommittedState, commit: Commit, private: PrivateParts
    ) -> tuple[bytes, _Layout]:
        if committed.device is not None:
            raise UnmappedError("the state is on an accelerator")
        why_never, why_not_live = self._why_unsafe()
        if why_never:
            raise UnmappedError(why_never)
        own = {entry.name for entry in committed.buffers.entries}
        buffers = [each for each in private if each[0].name in own]
        small: dict[str, Tensor] = {}
        replicated, alike = list[str](), list[str]()
        states = list(map(self._of, count(), self._pieces, commit.snapshots))
        for piece, state in zip(self._pieces, states, strict=True):
            (replicated if piece.is_compared else alike).append(state.text)
            if piece.is_compared:
                small.update(state.small)
            else:
                mine = state.small.items()
                buffers += ((entry_of(name, each), to_bytes(each)) for name, each in mine)
        layout = self._layout(states, small, commit, [entry for entry, _ in buffers])
        if why := committed.why_unknown() or (why_not_live if layout.live else ""):
            raise UnmappedError(why)
        rest = f'"{{{_PIECES}: {{{", ".join(replicated)}}}}}"'
        facts = json.dumps(committed.facts_of(commit.step))
        versions = commit.tensors.versions.counts
        inline = [to_bytes(small[name]) for name in layout.small], [each for _, each in buffers]
        octets = kept_memory.encode(
            step=commit.step,
            head=_head(layout, rest, f'"{{{", ".join(alike)}}}"', json.dumps(facts)),
            segments=layout.segments,
            replicated=layout.replicated,
            tensors=layout.tensors,
            versions=packed([*compress(versions, layout.counted), *map(version, layout.cut)]),
            elements=layout.elements,
            chain=self._chain,
            changes=self._changes(),
            seed=shard.seed_of(*layout.seed, rest),
            inline=b"".join(chain.from_iterable(inline)),
            is_copied=not layout.live,
        )
        return octets, layout

    def _of(self, index: int, piece: Piece, snapshot: Any) -> _PieceState:
        if isinstance(snapshot, UnreadableState):
            raise UnmappedError(f"{piece.name} cannot be saved: {snapshot.error}")
        tensors, known = piece.tensors(), self._known[index]
        if (
            known is not None
            and known.is_lasting
            and known.tensors is tensors
            and _is_same(snapshot, known.snapshot)
        ):
            return known
        value, small = piece.encode(snapshot)
        is_lasting = is_told_by_tensors(piece)
        found = boxes_of(piece, value)
        text = json.dumps(f"{json.dumps(piece.name)}: {json.dumps(value)}")[1:-1]
        made = _PieceState(tensors, snapshot, text, small, found, is_lasting)
        self._known[index] = made._replace(is_lasting=is_lasting and not small)
        return made

    def _layout(
        self,
        states: Sequence[_PieceState],
        small: dict[str, Tensor],
        commit: Commit,
        buffers: Sequence[Entry],
    ) -> _Layout:
        versions, copies = commit.tensors
        mappings = [versions.tensors, *filter(None, (state.tensors for state in states))]
        key = (*map(id, chain(mappings, copies.values(), small.values())), *map(hash, buffers))
        known = self._layouts.pop(key, None)
        if known is None or [each.data_ptr() for each in known.live] != known.places:
            while len(self._layouts) >= _LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            boxes = {name: box for state in states for name, box in state.boxes.items()}
            every = {name: each for state in states for name, each in state.tensors.items()}
            kept = [*mappings, *copies.values(), *small.values()]
            known = _layout(every, small, commit, boxes, buffers)._replace(kept=kept)
            cut = [each for each in scripts_tensors(self._pieces).values() if is_cut(each)]
            if known.live and cut:  # torch counts some of their changes on them alone
                tensors = known.tensors + packed(map(id, cut))
                elements = known.elements + packed([0] * len(cut))
                known = known._replace(cut=cut, tensors=tensors, elements=elements)
        self._layouts[key] = known
        return known

    def _changes(self) -> int:
        """Count on the board what no version shows, from the first note on."""
        if part_versions.board is None:
            part_versions.board = self._board
        return part_versions.noted()


def _is_same(new: Any, old: Any) -> bool:
    """Whether two snapshots of a piece are of the same objects."""
    if not isinstance(new, tuple) or not isinstance(old, tuple) or len(new) != len(old):
        return False
    return all(
        one is other or (is_constant(one) and is_constant(other) and one == other)
        for one, other in zip(new, old, strict=True)
    )


def _layout(
    every: Mapping[str, Tensor],
    small: dict[str, Tensor],
    commit: Commit,
    boxes: Mapping[str, Box],
    buffers: Sequence[Entry],
) -> _Layout:
    """As a dump's whole shard would have it.

    Raises:
        UnmappedError: one does not lie there as a file has it.
        TypeError: one cannot be saved.
    """
    versions, copies = commit.tensors
    there = every.keys() & versions.tensors.keys()
    held = {name: copies.get(name, each) for name, each in every.items() if name in there}
    cuts = [cut for cut in shard.whole_cuts(held | small, boxes) if cut.is_written]
    for cut in cuts:
        each = plain(cut.tensor)
        if not each.is_contiguous() or each.is_conj() or each.is_neg():
            raise UnmappedError(f"{cut.entry.name} is not in the order of its elements in memory")
    live = {name: each for name, each in held.items() if name not in copies}
    if lacking := live.keys() - set(versions.names):
        raise UnmappedError(f"torch counts no changes of {min(lacking)}")
    places = ((0 if c.entry.name in small else held[c.entry.name].data_ptr(), c) for c in cuts)
    segments = [(place, cut.entry.nbytes) for place, cut in places if cut.entry.nbytes]
    entries = [*(cut.entry for cut in cuts), *buffers]
    fields: dict[str, Any] = json.loads(safetensors_file.header(entries, {})[_COUNT:])
    sharding = {SHARDING: shard.sharding(cuts, entries)}
    metadata = {**fields.pop(_METADATA, {}), **sharding, **shard.FORMAT}
    counted = [name in live for name in versions.names]
    proven = list(compress(versions.counted, counted))
    inline = ((0, entry.nbytes) for entry in buffers if entry.nbytes)
    return _Layout(
        kept=(),
        small=[cut.entry.name for cut in cuts if cut.entry.name in small],
        live=list(live.values()),
        places=[each.data_ptr() for each in live.values()],
        counted=counted,
        cut=(),
        segments=packed(chain.from_iterable((*segments, *inline))),
        replicated=len(segments),
        tensors=packed(map(id, proven)),
        elements=packed(each.untyped_storage().data_ptr() for each in proven),
        fields=json.dumps(fields, separators=(",", ":")).encode()[1:-1],
        metadata=json.dumps(metadata)[1:-1],
        seed=shard.seed_texts(shard.whole_cuts(held | small, boxes)),
    )


def _head(layout: _Layout, rest: str, objects: str, facts: str) -> bytes:
    """Of the file; what varies is given as JSON strings."""
    texts = f'"{REST}": {rest}, "{OBJECTS}": {objects}, "facts": {facts}'
    fields = b"," + layout.fields if layout.fields else b""
    text = f'{{"{_METADATA}":{{{layout.metadata},{texts}}}'.encode() + fields + b"}"
    text += b" " * (-(_COUNT + len(text)) % _ALIGNED)
    return len(text).to_bytes(_COUNT, "little") + text
