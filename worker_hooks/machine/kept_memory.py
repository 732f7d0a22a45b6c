"""What a rank leaves in its own memory for whoever reads it after the rank was killed.

A *board* of fixed size, whose address the agent knows, says which step's update has begun, and
where the newest two *maps* are. A map is of one commit: the head of the file to be written, where
in this memory each tensor's bytes lie, and what proves that they have not changed since. Each word
of the board is written by one store, so whoever reads it once the rank is dead finds the old map or
the new one, whole: at no moment is there none.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterable
from typing import NamedTuple

KEPT = "kept-"  # what its digests begin with
KEEPER = "msrun-keeper"  # the name of the process that holds it, as ps shows it; at most 15 bytes
WORD = 8  # bytes
SLOTS = 2
_TORN, _CHANGES, _MAPS = 0, 1, 2  # words of the board
BOARD_BYTES = WORD * (_MAPS + SLOTS)
_BOARD = struct.Struct(f"={_MAPS + SLOTS}Q")
_FRONT = struct.Struct("<QQ")  # bytes of a map behind this, and their CRC-32
FRONT_BYTES = _FRONT.size
_SIZES = struct.Struct("<7Q")  # bytes of facts, head, segments, proofs (3) and inline contents


class TensorChain(NamedTuple):
    """Where torch keeps what is read of a tensor, as offsets in bytes from one thing to the next.

    From the Python object to torch's; from there to the version's counter, in it to the number; and
    to the storage, in it to the elements' address.
    """

    inner: int
    counter: int
    number: int
    storage: int
    elements: int


class Proof(NamedTuple):
    """A tensor that is read where it lies is as of the commit if these are so still."""

    tensor: int  # the address of its Python object
    version: int
    elements: int  # the address of its storage's first byte


class StateMap(NamedTuple):
    """Where the state of one commit lies."""

    step: int
    head: bytes  # of the safetensors file that the segments follow in
    segments: tuple[tuple[int, int], ...]  # address and bytes; address 0: the next inline bytes
    replicated: int  # so many of these, the first, are alike on all replicas
    proofs: tuple[Proof, ...]
    chain: TensorChain
    changes: int  # the board's count of changes that no version shows
    seed: str  # equal on replicas; of names, shapes, and all state that is no tensor
    inline: bytes
    is_copied: bool  # an update that has begun since changes nothing of it
    why_not: str = ""  # why it must not be used

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self.head) + sum(size for _, size in self.segments)


class Board(NamedTuple):
    """A board as it was read."""

    torn: int  # the step whose update was the last to begin
    changes: int
    maps: tuple[int, ...]  # their addresses


def packed(numbers: Iterable[int]) -> bytes:
    """Numbers as a map has them."""
    return array("Q", numbers).tobytes()


def encode(
    *,
    step: int,
    head: bytes,
    segments: bytes,
    replicated: int,
    tensors: bytes = b"",
    versions: bytes = b"",
    elements: bytes = b"",
    chain: TensorChain,
    changes: int,
    seed: str,
    inline: bytes,
    is_copied: bool,
    why_not: str = "",
) -> bytes:
    """A map as bytes, behind their size and checksum: the fields of :class:`StateMap`.

    Some are :func:`packed`. Of the segments these are address and size in turn, of the proofs each
    field by itself.
    """
    facts = json.dumps(
        {
            "step": step,
            "replicated": replicated,
            "chain": chain,
            "changes": changes,
            "seed": seed,
            "is_copied": is_copied,
            "why_not": why_not,
        }
    ).encode()
    parts = (facts, head, segments, tensors, versions, elements, inline)
    sizes = _SIZES.pack(*map(len, parts))
    checksum, nbytes = zlib.crc32(sizes), len(sizes) + sum(map(len, parts))
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join((_FRONT.pack(nbytes, checksum), sizes, *parts))


def front(octets: bytes) -> tuple[int, int]:
    """How many bytes of a map follow these :data:`FRONT_BYTES`, and their checksum."""
    nbytes, checksum = _FRONT.unpack(octets)
    return nbytes, checksum


def decode(octets: bytes) -> StateMap:
    """The map that :func:`encode` made, without its front.

    Raises:
        ValueError, KeyError, TypeError, struct.error: it is none.
    """
    sizes, at = _SIZES.unpack_from(octets), _SIZES.size
    if at + sum(sizes) != len(octets):
        raise ValueError("a map has another size than it says")
    parts = []
    for size in sizes:
        parts.append(octets[at : at + size])
        at += size
    facts, head, segments, *proofs, inline = parts
    fields = json.loads(facts)
    return StateMap(
        step=fields["step"],
        head=head,
        segments=tuple(zip(*[iter(array("Q", segments))] * 2, strict=True)),
        replicated=fields["replicated"],
        proofs=tuple(map(Proof, *(array("Q", each) for each in proofs))),
        chain=TensorChain(*fields["chain"]),
        changes=fields["changes"],
        seed=fields["seed"],
        inline=inline,
        is_copied=fields["is_copied"],
        why_not=fields["why_not"],
    )


def read_board(octets: bytes) -> Board:
    """The board in these bytes."""
    torn, changes, *maps = _BOARD.unpack(octets)
    return Board(torn, changes, tuple(maps))


class BoardWriter:
    """Writes the board; the main thread calls it."""

    def __init__(self, memory: memoryview) -> None:
        """``memory``: of :data:`BOARD_BYTES`, all zero."""
        self._words = memory.cast("Q")

    def tear(self, step: int) -> None:
        """The update of this step is about to begin: live memory is that of no earlier one."""
        self._words[_TORN] = step

    def count(self, changes: int) -> None:
        """So many changes were made that no version shows."""
        self._words[_CHANGES] = changes

    def hide(self, slot: int) -> None:
        """No map is there any more."""
        self._words[_MAPS + slot] = 0

    def wipe(self) -> None:
        """Nothing that maps tell of is there any more."""
        for slot in range(SLOTS):  # first: what is torn must not look whole
            self.hide(slot)
        self._words[_TORN] = self._words[_CHANGES] = 0

    def show(self, slot: int, address: int) -> None:
        """Say where a map is; the one that was there must be alive until this returns."""
        self._words[_MAPS + slot] = address


def kept_digest(seed: str, checksum: int) -> str:
    """The digest of a state that was read in the memory of a killed rank.

    ``checksum``: CRC-32 of the bytes that are alike on all replicas.
    """
    return f"{KEPT}{seed[:24]}-{checksum:08x}"


def is_sound(octets: bytes, checksum: int) -> bool:
    """Whether a map is the one that the board shows."""
    return bool(octets) and zlib.crc32(octets) == checksum
