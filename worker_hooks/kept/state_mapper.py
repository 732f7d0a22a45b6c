"""Notes at each commit where the state lies in this process's memory, for when it is killed.

The note must be cheap: what does not change from one commit to the next (names, shapes, the state
of an optimizer but for its tensors) is made once. So a commit costs a look at each tensor's version
and address, and the text of what did change.
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from worker_hooks.contract import kept_memory
from worker_hooks.contract.kept_memory import BOARD_BYTES, BoardWriter, Proof, StateMap
from worker_hooks.contract.status_page import Entry
from worker_hooks.kept.keeper import start_keeper
from worker_hooks.kept.tensor_chain import tensor_chain
from worker_hooks.state.committed_state import Commit, CommittedState
from worker_hooks.state.optimizer import OptimizerPiece
from worker_hooks.state.registry import Piece, boxes_of, scripts_tensors
from worker_hooks.state.replica import UnreadableState
from worker_hooks.state.snapshot import is_constant, version
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.shard_file import OBJECTS, REST, SHARDING
from worker_hooks.tensors import part_versions, shard
from worker_hooks.tensors.placements import Box, is_distributed
from worker_hooks.tensors.tensor_bytes import entry_of, plain, to_bytes

log = logging.getLogger("msrun")

_COUNT = 8  # bytes of a safetensors header's length
_ALIGNED = 64
_LAYOUTS = 4  # known at once: copies are made in turns in two places
_METADATA = "__metadata__"
SCATTERED = "{} does not lie in memory in the order of its elements"


class UnmappedError(Exception):
    """No note can be made, for the reason in the text."""


class _PieceState(NamedTuple):
    """What was made of a piece at a commit."""

    tensors: Mapping[str, Tensor]
    snapshot: Any
    text: str  # JSON
    small: Mapping[str, Tensor]
    boxes: Mapping[str, Box]
    is_lasting: bool  # true of any commit with the same tensors and snapshot


class _Layout(NamedTuple):
    """What these tensors make of a file, whatever is in them."""

    kept: Sequence[Tensor]  # alive, as their ids are the key
    tensors: Sequence[Tensor]  # in the file's order
    places: Sequence[int]  # their addresses
    sizes: Sequence[int]  # in bytes
    fields: bytes  # of the head: every tensor's
    metadata: str  # of the head: what is the same at each commit
    seed: tuple[str, str]  # of :func:`worker_hooks.tensors.shard.seed_texts`


class StateMapper:
    """One for each process; the main thread calls it."""

    def __init__(self, pieces: Sequence[Piece], why_unsafe: Callable[[], tuple[str, str]]) -> None:
        """Start the keeper; nothing is noted yet.

        Args:
            pieces: what was registered.
            why_unsafe: returns why no step of this training may be saved, and why none may be read
                in live memory; empty: some may.

        Raises:
            OSError: the kernel does not allow it.
            UnknownTensorLayoutError: of this torch nobody knows where it keeps versions.
        """
        self._pieces = tuple(pieces)
        self._why_unsafe = why_unsafe
        self._chain = tensor_chain()
        self._memory = ctypes.create_string_buffer(BOARD_BYTES)
        self._board = BoardWriter(memoryview(self._memory).cast("B"))
        self._maps: list[bytes] = [b""] * kept_memory.SLOTS  # kept alive
        self._known: list[_PieceState | None] = [None] * len(self._pieces)
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._said: set[str] = set()
        self.board = ctypes.addressof(self._memory)
        self.keeper = start_keeper()
        """Its process id."""

    def update_begins(self) -> None:
        """Until the next note, only what is copied is as of the newest one."""
        self._board.tear()

    def note(self, state: CommittedState, commit: Commit) -> None:
        """Note where the commit's state lies; never raises."""
        try:
            made = self._map(state, commit)
        except UnmappedError as error:
            made = self._nothing(commit.step, str(error))
        except Exception as error:  # noqa: BLE001  the script's own objects
            made = self._nothing(commit.step, repr(error))
        if made.why_not and made.why_not not in self._said:
            self._said.add(made.why_not)
            log.info("step %d is not to be read after a kill: %s", made.step, made.why_not)
        octets = kept_memory.encode(made)
        slot = commit.step % kept_memory.SLOTS
        self._maps[slot] = octets
        # the elements of a bytes object follow its fixed part, and one more byte, which is counted
        self._board.show(slot, id(octets) + bytes.__basicsize__ - 1, octets)
        self._board.mend()

    def _nothing(self, step: int, why: str) -> StateMap:
        return StateMap(
            step, b"", (), 0, (), self._chain, 0, "", b"", is_copied=False, why_not=why[:500]
        )

    def _map(self, committed: CommittedState, commit: Commit) -> StateMap:
        if committed.device is not None:
            raise UnmappedError("the state is on an accelerator")
        why_never, why_not_live = self._why_unsafe()
        if why_never:
            raise UnmappedError(why_never)
        names, copies = commit.tensors.versions.tensors, commit.tensors.copies
        own = {entry.name for entry in committed.buffers.entries}
        tensors: dict[str, Tensor] = {}
        boxes: dict[str, Box] = {}
        replicated, alike = list[str](), list[str]()
        buffers = [each for each in committed.private.read(commit.step) if each[0].name in own]
        small: dict[str, Tensor] = {}
        live: list[Tensor] = []
        for index, piece in enumerate(self._pieces):
            state = self._of(index, piece, commit.snapshots[index])
            boxes.update(state.boxes)
            for name, each in state.tensors.items():
                if name in names:
                    copy = copies.get(name)
                    tensors[name] = each if copy is None else copy
                    if copy is None:
                        live.append(each)
            text = f"{json.dumps(piece.name)}: {state.text}"
            if piece.is_compared:
                small.update(state.small)
                replicated.append(text)
            else:
                own_small = state.small.items()
                buffers += ((entry_of(name, each), to_bytes(each)) for name, each in own_small)
                alike.append(text)
        if live and (why := why_not_live or committed.why_unknown()):
            raise UnmappedError(why)
        rest = f'{{"pieces": {{{", ".join(replicated)}}}}}'
        layout = self._layout(tensors | small, boxes, [entry for entry, _ in buffers])
        inline = [content for _, content in buffers]
        is_small = set(map(id, small.values()))
        segments = [
            (0 if id(tensor) in is_small else place, size)
            for tensor, place, size in zip(layout.tensors, layout.places, layout.sizes, strict=True)
            if size
        ]
        facts = json.dumps(committed.facts_of(commit.step))
        ahead = [to_bytes(each) for each in layout.tensors if id(each) in is_small and each.nbytes]
        return StateMap(
            step=commit.step,
            head=_head(layout, rest, f"{{{', '.join(alike)}}}", facts),
            segments=(*segments, *((0, len(each)) for each in inline if len(each))),
            replicated=len(segments),
            proofs=self._proofs(live),
            chain=self._chain,
            changes=self._changes(),
            seed=shard.seed_of(*layout.seed, rest),
            inline=b"".join([*ahead, *inline]),
            is_copied=not live,
        )

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
        is_lasting = not isinstance(piece, OptimizerPiece) or piece.is_all_tensors
        found = boxes_of(piece, value)
        made = _PieceState(tensors, snapshot, json.dumps(value), small, found, is_lasting)
        self._known[index] = made._replace(is_lasting=is_lasting and not small)
        return made

    def _layout(
        self, tensors: Mapping[str, Tensor], boxes: Mapping[str, Box], buffers: Sequence[Entry]
    ) -> _Layout:
        key = (*map(id, tensors.values()), *map(hash, buffers))
        known = self._layouts.pop(key, None)
        if known is not None and [each.data_ptr() for each in known.tensors] == known.places:
            self._layouts[key] = known
        else:
            while len(self._layouts) >= _LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            known = self._layouts[key] = _layout(tensors, boxes, buffers)
        return known

    def _proofs(self, live: Sequence[Tensor]) -> tuple[Proof, ...]:
        if not live:
            return ()
        found = [Proof(id(each), version(each), each.untyped_storage().data_ptr()) for each in live]
        # of a distributed one, whose part this is, torch counts some changes alone
        every = scripts_tensors(self._pieces).values()
        found += [Proof(id(each), version(each), 0) for each in every if is_distributed(each)]
        return tuple(found)

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
    tensors: Mapping[str, Tensor], boxes: Mapping[str, Box], buffers: Sequence[Entry]
) -> _Layout:
    """As a dump's whole shard would have it.

    Raises:
        UnmappedError: one does not lie there as a file has it.
        TypeError: one cannot be saved.
    """
    cuts = shard.whole_cuts(tensors, boxes)
    bare = [plain(cut.tensor) for cut in cuts]
    for cut, each in zip(cuts, bare, strict=True):
        if not each.is_cpu:
            raise UnmappedError("the state is on an accelerator")
        if not each.is_contiguous() or each.is_conj() or each.is_neg():
            raise UnmappedError(SCATTERED.format(cut.entry.name))
    written = [(cut, each) for cut, each in zip(cuts, bare, strict=True) if cut.is_written]
    entries = [*(cut.entry for cut, _ in written), *buffers]
    head = safetensors_file.header(entries, {})[_COUNT:]
    fields: dict[str, Any] = json.loads(head)
    metadata = {
        **fields.pop(_METADATA, {}),
        SHARDING: shard.sharding([cut for cut, _ in written], entries),
        **shard.FORMAT,
    }
    ordered = [tensors[cut.entry.name] for cut, _ in written]
    return _Layout(
        kept=list(tensors.values()),
        tensors=ordered,
        places=[each.data_ptr() for each in ordered],
        sizes=[cut.entry.nbytes for cut, _ in written],
        fields=json.dumps(fields, separators=(",", ":")).encode()[1:-1],
        metadata=json.dumps(metadata)[1:-1],
        seed=shard.seed_texts(cuts),
    )


def _head(layout: _Layout, rest: str, objects: str, facts: str) -> bytes:
    texts = json.dumps({REST: rest, OBJECTS: objects, "facts": facts})[1:-1]
    fields = b"," + layout.fields if layout.fields else b""
    text = f'{{"{_METADATA}":{{{layout.metadata},{texts}}}'.encode() + fields + b"}"
    text += b" " * (-(_COUNT + len(text)) % _ALIGNED)
    return len(text).to_bytes(_COUNT, "little") + text
