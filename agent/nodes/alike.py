"""What several ranks of a node say alike, or are told alike, travels as one message. Pure.

Merged is what comes within one turn of the loop. Between the messages of one rank nothing changes
its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from agent.nodes.messages import NodeMessage
from agent.nodes.run_messages import (
    FromRank,
    FromRanks,
    PageNews,
    PageSeen,
    ToRank,
    ToRanks,
    unpack_said,
)
from agent.nodes.vocabulary import CodecError

K = TypeVar("K")
V = TypeVar("V")

MOST_KINDS = 32  # of messages that wait
MOST_NEWEST = 3  # things that go to all in turn
MOST_ALIKE = 8 << 10  # characters of what ranks say alike, that is remembered

ANYTIME = PageNews | PageSeen
"""Not later than what the same rank says next; so it may overtake what waits."""


class Once(Generic[K, V]):
    """Makes something of the newest things once, however often it is asked for: they go to all.

    Each node may be told several before the next node is.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        """``make``: what is made of a thing, which is not changed afterwards."""
        self._make = make
        self._newest: list[tuple[K, V]] = []

    def __call__(self, thing: K) -> V:
        """What is made of it."""
        for known, made in self._newest:
            if known is thing:
                return made
        made = self._make(thing)
        self._newest = [(thing, made), *self._newest[: MOST_NEWEST - 1]]
        return made


class _Group(NamedTuple):
    """A message and the ranks that it is of."""

    kind: type[FromRank | ToRank]
    message: dict[str, object]  # without the rank
    ranks: list[int]


class Merger:
    """The messages that wait."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        """``ranks``: of this node, if it is another one than the controller's.

        A node may also tell what the ranks of a lost one have said.
        """
        self._ranks = frozenset(ranks)
        self._groups: list[_Group] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, message: NodeMessage) -> bool:
        """Keep a message; ``False``: it is none that others are merged with."""
        match message:
            case FromRank(message=said):
                rank, about = said.get("rank"), {**said, "rank": None}
            case ToRank(rank=rank, message=about):
                pass
            case _:
                return False
        if not isinstance(rank, int) or len(self._groups) >= MOST_KINDS:
            return False
        if (group := self._fitting(type(message), about, rank)) is None:
            self._groups.append(_Group(type(message), about, [rank]))
        else:
            group.ranks.append(rank)
        return True

    def _fitting(
        self, kind: type[FromRank | ToRank], about: dict[str, object], rank: int
    ) -> _Group | None:
        """A group of this message behind which nothing of the rank waits."""
        for group in reversed(self._groups):
            if rank in group.ranks:
                return None
            if group.kind is kind and (group.message is about or group.message == about):
                return group
        return None

    def take(self) -> Iterator[NodeMessage]:
        """What waits, in order; then nothing does."""
        groups, self._groups = self._groups, []
        for kind, about, ranks in groups:
            if kind is ToRank:
                yield ToRanks(tuple(ranks), about)
            else:
                yield said_alike(() if self._ranks == {*ranks} else ranks, about)


def said_alike(ranks: Iterable[int], message: dict[str, object]) -> FromRanks:
    """What these ranks have said, or all of a node; ``message``: packed, of any one of them."""
    return FromRanks(tuple(ranks), json.dumps({**message, "rank": 0}, separators=(",", ":")))


def said_by(message: FromRanks, all_ranks: Iterable[int]) -> Iterator[Any]:
    """What each of these ranks has said; ``all_ranks``: of the node.

    Thousands of nodes say the same words, but of other ranks: so they are read once.

    Raises:
        CodecError: it is nothing that a rank says.
    """
    text = message.message
    kind, others = _known(text) if len(text) <= MOST_ALIKE else _said(text)
    for rank in message.ranks or all_ranks:
        yield kind(rank, *others)  # of thousands of ranks, so not by ``_replace``


def _said(text: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The kind of what is said, and its fields behind the rank, which is the first one of all."""
    try:
        packed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"{text!r:.80} is no message: {error!r:.200}") from error
    said: Any = unpack_said(packed)
    if said._fields[0] != "rank":
        raise CodecError(f"{text!r:.80} is nothing that a rank says")
    return type(said), said[1:]


_known = lru_cache(maxsize=64)(_said)
