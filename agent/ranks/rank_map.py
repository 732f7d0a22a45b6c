"""A mapping from ranks that is never changed; one more entry copies a small part of it.

The entries lie in dicts of 64 ranks: to set one copies its dict and the list of dicts, which takes
4 us at 16,384 ranks, where a copy of all entries takes 300.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Generic, TypeVar

from agent.ranks.rank_set import RankSet

V = TypeVar("V")

_SHIFT = 6  # 64 ranks in a dict
_NONE: Any = object()


class RankMap(Mapping[int, V], Generic[V]):
    """Values by rank. Up to 64 consecutive ranks come in the order in which they were set."""

    __slots__ = ("parts", "ranks")

    def __init__(self, items: Mapping[int, V] | Iterable[tuple[int, V]] = ()) -> None:
        """Of these items."""
        parts: dict[int, dict[int, V]] = {}
        pairs = items.items() if isinstance(items, Mapping) else items
        for rank, value in pairs:
            parts.setdefault(rank >> _SHIFT, {})[rank] = value
        self.parts = parts
        """By 64 ranks; shared with other mappings, so never changed."""
        self.ranks = RankSet(rank for part in parts.values() for rank in part)
        """Those that have a value."""

    def set(self, rank: int, value: V) -> RankMap[V]:
        """The mapping with this value for a rank."""
        index = rank >> _SHIFT
        part = self.parts.get(index)
        if part is not None and part.get(rank, _NONE) is value:
            return self
        found: RankMap[V] = RankMap.__new__(RankMap)
        found.parts = {**self.parts, index: {**(part or {}), rank: value}}
        found.ranks = self.ranks if part and rank in part else self.ranks | {rank}
        return found

    def with_all(self, items: Mapping[int, V]) -> RankMap[V]:
        """The mapping with all of these, too."""
        news: dict[int, dict[int, V]] = {}
        for rank, value in items.items():
            news.setdefault(rank >> _SHIFT, {})[rank] = value
        if not news:
            return self
        found: RankMap[V] = RankMap.__new__(RankMap)
        found.parts = self.parts | {
            index: self.parts.get(index, {}) | part for index, part in news.items()
        }
        found.ranks = self.ranks | RankSet(items)
        return found

    def without(self, rank: int) -> RankMap[V]:
        """The mapping without this rank."""
        if rank not in self:
            return self
        found: RankMap[V] = RankMap.__new__(RankMap)
        index = rank >> _SHIFT
        part = {other: value for other, value in self.parts[index].items() if other != rank}
        found.parts = {**self.parts, index: part}
        found.ranks = self.ranks - {rank}
        return found

    def only(self, ranks: RankSet) -> RankMap[V]:
        """The mapping of those of its ranks that are among these."""
        if not self.ranks - ranks:
            return self
        return RankMap((rank, value) for rank, value in self.items() if rank in ranks)

    def __getitem__(self, rank: int) -> V:
        return self.parts[rank >> _SHIFT][rank]

    def get(self, rank: int, default: Any = None) -> Any:
        """The value; ``default``: there is none."""
        part = self.parts.get(rank >> _SHIFT)
        return default if part is None else part.get(rank, default)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.get(rank, _NONE) is not _NONE

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.parts.values())

    def items(self) -> ItemsView[int, V]:
        """All pairs, without a look-up of each."""
        return _Items(self)

    def values(self) -> ValuesView[V]:
        """All values, in the same way."""
        return _Values(self)

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"RankMap({dict(self)})"


class _Items(ItemsView[int, V]):
    _mapping: RankMap[V]

    def __iter__(self) -> Iterator[tuple[int, V]]:
        return chain.from_iterable(map(dict.items, self._mapping.parts.values()))


class _Values(ValuesView[V]):
    _mapping: RankMap[V]

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(map(dict.values, self._mapping.parts.values()))
