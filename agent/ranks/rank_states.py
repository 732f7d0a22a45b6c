"""The state of each rank, as a set of ranks for each state: each of these is known at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TypeVar

from agent.ranks.rank_set import RankSet

S = TypeVar("S", bound=Enum)


class RankStates(Mapping[int, S]):
    """Ranks in ascending order, with their states; never changed."""

    __slots__ = ("all", "by_state")

    def __init__(self, states: Mapping[int, S]) -> None:
        """Of these ranks."""
        found: dict[S, list[int]] = {}
        for rank, state in states.items():
            found.setdefault(state, []).append(rank)
        self.by_state = {state: RankSet(ranks) for state, ranks in found.items()}
        """The ranks that are in each."""
        self.all = RankSet(states)
        """All ranks."""

    def set(self, rank: int, state: S) -> RankStates[S]:
        """The same once a rank is in this state."""
        was = self.get(rank)
        if was is state:
            return self
        found: RankStates[S] = RankStates.__new__(RankStates)
        found.by_state = {**self.by_state, state: self.in_state(state) | {rank}}
        if was is not None:
            found.by_state[was] = found.by_state[was] - {rank}
        found.all = self.all if was is not None else self.all | {rank}
        return found

    def with_all(self, ranks: Iterable[int], state: S) -> RankStates[S]:
        """The same once these ranks are in this state."""
        moved = RankSet(ranks)
        found: RankStates[S] = RankStates.__new__(RankStates)
        found.by_state = {each: having - moved for each, having in self.by_state.items()}
        found.by_state[state] = self.in_state(state) | moved
        found.all = self.all | moved
        return found

    def in_state(self, *states: S) -> RankSet:
        """The ranks that are in one of these."""
        found = RankSet()
        for state in states:
            if (ranks := self.by_state.get(state)) is not None:
                found |= ranks
        return found

    def since(self, before: RankStates[S]) -> Iterator[tuple[int, S]]:
        """The ranks that were in another state before, or in none, with their states."""
        for state, ranks in self.by_state.items():
            for rank in ranks - before.in_state(state):
                yield rank, state

    def __getitem__(self, rank: int) -> S:
        for state, ranks in self.by_state.items():
            if rank in ranks:
                return state
        raise KeyError(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self.all)

    def items(self) -> list[tuple[int, S]]:  # type: ignore[override]
        """All pairs, in ascending order of ranks."""
        return sorted((rank, state) for state, ranks in self.by_state.items() for rank in ranks)

    def __len__(self) -> int:
        return len(self.all)

    def __repr__(self) -> str:
        return f"RankStates({dict(self.items())})"
