"""What lies in the memory of a rank that was killed, as long as its keeper holds it."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator

from worker_hooks.machine import kept_memory
from worker_hooks.machine.kept_memory import (
    BOARD_BYTES,
    FRONT_BYTES,
    WORD,
    Proof,
    StateMap,
    TensorChain,
)

PIECE = 4 << 20  # bytes read at once
MOST = 256 << 20  # bytes of a map; a longer one is none
_WORD, _NUMBER = struct.Struct("<Q"), struct.Struct("<I")


class LeftMemory:
    """One rank's memory, to be read once the rank is dead."""

    def __init__(self, memory: int, board: int) -> None:
        """Nothing is read yet.

        Args:
            memory: a descriptor of ``/proc/<keeper>/mem``; it stays the caller's.
            board: the address of the rank's board.
        """
        self._memory, self._board = memory, board

    def states(self) -> list[StateMap]:
        """What is whole in it, the newest first. Whatever lies there, nothing raises."""
        try:
            board = kept_memory.read_board(self._read(self._board, BOARD_BYTES))
        except (OSError, struct.error):
            return []
        found = []
        for address in filter(None, board.maps):
            with contextlib.suppress(
                OSError, OverflowError, ValueError, KeyError, TypeError, struct.error
            ):
                nbytes, checksum = kept_memory.front(self._read(address, FRONT_BYTES))
                octets = self._read(address + FRONT_BYTES, nbytes) if nbytes <= MOST else b""
                if not kept_memory.is_sound(octets, checksum):
                    continue
                state = kept_memory.decode(octets)
                is_torn = state.step < board.torn or state.changes != board.changes
                if state.why_not or (is_torn and not state.is_copied):
                    continue
                if all(self._is_proven(proof, state.chain) for proof in state.proofs):
                    found.append(state)
        return sorted(found, key=lambda state: -state.step)

    def pieces(self, state: StateMap) -> Iterator[tuple[bytes, bool]]:
        """The bytes that follow the head in a file, and whether all replicas hold them.

        Raises:
            OSError: the memory is gone.
        """
        inline = 0
        for index, (address, nbytes) in enumerate(state.segments):
            is_replicated = index < state.replicated
            if not address:
                yield state.inline[inline : inline + nbytes], is_replicated
                inline += nbytes
                continue
            for at in range(0, nbytes, PIECE):
                yield self._read(address + at, min(PIECE, nbytes - at)), is_replicated

    def summed(self, state: StateMap, digest: list[str]) -> Iterator[bytes]:
        """The bytes behind the head; behind their end ``digest`` has what :meth:`checksum` returns.

        Raises:
            OSError: the memory is gone.
        """
        found = 0
        for piece, is_replicated in self.pieces(state):
            if is_replicated:
                found = zlib.crc32(piece, found)
            yield piece
        digest.append(kept_memory.kept_digest(state.seed, found))

    def checksum(self, state: StateMap, take: Callable[[bytes], object] = len) -> str:
        """What is equal on replicas that hold the same.

        Args:
            state: of :meth:`states`.
            take: is given all of a file's bytes, in order.

        Raises:
            OSError: the memory is gone, or what ``take`` raises.
        """
        digest = list[str]()
        take(state.head)
        for piece in self.summed(state, digest):
            take(piece)
        return digest[0]

    def _is_proven(self, proof: Proof, chain: TensorChain) -> bool:
        inner = self._word(proof.tensor + chain.inner)
        counter = self._word(inner + chain.counter)
        (version,) = _NUMBER.unpack(self._read(counter + chain.number, _NUMBER.size))
        if version != proof.version:
            return False
        storage = self._word(inner + chain.storage) if proof.elements else 0
        return not proof.elements or self._word(storage + chain.elements) == proof.elements

    def _word(self, address: int) -> int:
        (value,) = _WORD.unpack(self._read(address, WORD))
        return int(value)

    def _read(self, address: int, nbytes: int) -> bytes:
        octets = os.pread(self._memory, nbytes, address)
        if len(octets) != nbytes:  # the end of the process, or of what is mapped
            raise OSError(f"the memory of the rank is gone at {address:#x}")
        return octets
