"""A set of ranks that is never changed: one bit for each, so a copy of 16,384 takes 2 KiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any


class RankSet(AbstractSet[int]):
    """Ranks in ascending order; equal to any set of the same ranks.

    ``in``, ``|``, ``&``, ``-`` and ``len`` cost less than a microsecond at any size that a job has.
    """

    __slots__ = ("bits",)

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        """Of ranks that are 0 or more."""
        self.bits: int = bits_of(ranks)
        """Bit ``r`` is set if rank ``r`` is in it."""

    @staticmethod
    def of_bits(bits: int) -> RankSet:
        """The set with these bits."""
        found = RankSet.__new__(RankSet)
        found.bits = bits
        return found

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> RankSet:  # type: ignore[override]
        return RankSet(it)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank >= 0 and bool(self.bits >> rank & 1)

    def __iter__(self) -> Iterator[int]:
        # by bytes from the lowest on: to clear bits of the whole number would copy it each time
        octets = self.bits.to_bytes((self.bits.bit_length() + 7) // 8, "little")
        for index, octet in enumerate(octets):
            for bit in _BITS_IN[octet]:
                yield 8 * index + bit

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return bool(self.bits)

    def __or__(self, other: AbstractSet[Any]) -> RankSet:
        return RankSet.of_bits(self.bits | bits_of(other))

    def __and__(self, other: AbstractSet[Any]) -> RankSet:
        return RankSet.of_bits(self.bits & bits_of(other))

    def __sub__(self, other: AbstractSet[Any]) -> RankSet:
        return RankSet.of_bits(self.bits & ~bits_of(other))

    __ror__ = __or__
    __rand__ = __and__

    def __rsub__(self, other: AbstractSet[Any]) -> RankSet:
        return RankSet.of_bits(bits_of(other) & ~self.bits)

    def isdisjoint(self, other: Iterable[Any]) -> bool:
        """Whether they have no rank in common."""
        return not self.bits & bits_of(other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AbstractSet) or len(self) != len(other):
            return False
        try:
            return self.bits == bits_of(other)
        except (TypeError, ValueError):  # it has what is no rank
            return False

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"RankSet({list(self)})"


def bits_of(ranks: Iterable[int]) -> int:
    """The number in which bit ``r`` is set for each rank ``r``."""
    if isinstance(ranks, RankSet):
        return ranks.bits
    if isinstance(ranks, range) and ranks.step == 1:
        return (1 << ranks.stop) - (1 << ranks.start) if ranks else 0
    found = list(ranks)
    if len(found) <= _FEW:
        bits = 0
        for rank in found:
            bits |= 1 << rank
        return bits
    digits = bytearray(b"0") * (max(found) + 1)
    for rank in found:
        digits[rank] = _ONE
    return int(digits[::-1], 2)


_FEW = 16  # ranks, for which shifting is quicker
_ONE = ord("1")
_BITS_IN = [[bit for bit in range(8) if octet >> bit & 1] for octet in range(256)]
