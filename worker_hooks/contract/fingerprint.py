"""What ranks compare of their state: a short text for each part of it, by the part's name.

A text that begins with ``=`` is the value itself, any other one a digest; that of a part of a
distributed tensor begins with ``part``, that of a value with ``~``. Equal texts on all ranks show
that any rank's state stands for that of another. Pure; the standard library only.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

Fingerprint = Mapping[str, str]

LATE = "late: "
"""Prefix of a value of the script's own that changes between a backward and its commit."""

BUFFER, ONE_OF_BUFFERS = "buffer", "one of the buffers"
"""Begin the name of such a value if it is a module's."""

RESULT = "result: "
"""Prefix of one that does, and on which nothing depends but what training returns."""

ANEW = "anew: "
"""Prefix of what nothing keeps: said by one rank for all, in a report with a problem."""

UNSEEN = "unseen: "
"""Prefix of the step before which a death is not survived; without one: it is from now on."""

PART = "part "
"""What the text of a part of a distributed tensor begins with."""

VALUE = "~"
"""What the digest of what is no tensor begins with."""

MOST = 300  # parts; the names and texts of so many fit into one packet
_NAME = 120  # characters
_TO = " .. "
_NUMBERS = re.compile(r"\d+")
_NONE: Mapping[str, str] = {}
_SHOWN = 2  # differences that are named
_RANKS = 8  # ranks that are


class Difference(NamedTuple):
    """A part of the state that is not the same on all ranks."""

    name: str
    by_text: Mapping[str, tuple[int, ...]]  # the ranks that have it so; empty text: not at all

    @property
    def lone(self) -> tuple[int, ...]:
        """The smallest group of ranks; of equal ones that with the largest rank."""
        return min(self.by_text.values(), key=lambda ranks: (len(ranks), -ranks[-1]))

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the ranks have it alike."""
        counts = [len(ranks) for ranks in self.by_text.values()]
        return 2 * max(counts) > sum(counts)

    @property
    def is_value(self) -> bool:
        """Whether it is, or has in it, what is no tensor, or what nobody can tell apart."""
        return _TO in self.name or any(map(_is_value, self.by_text))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that have it alike."""
        return tuple(sorted(self.by_text.values()))

    def describe(self, suspects: Collection[int] = ()) -> str:
        """``optimizer lr is 0.1 on rank 1, 0.08 on ranks 0, 2``; without values who differs."""
        lone = self.lone
        in_order = sorted(
            self.by_text.items(),
            key=lambda item: (not {*item[1]} & {*suspects}, item[1] != lone, item[1]),
        )
        if all(map(_is_plain, self.by_text)):
            values = ", ".join(f"{text[1:]} on {_listed(ranks)}" for text, ranks in in_order)
            return f"{self.name} differs: {values}"
        if all(text.startswith(PART) for text in self.by_text):
            parts = sorted(self.by_text.values())  # none of them is odd
            if all(len(part) == 1 for part in parts):
                return f"{self.name} is cut over {_listed(rank for part in parts for rank in part)}"
            return f"{self.name} is cut over " + " and ".join(map(_listed, parts))
        if "" in self.by_text:
            lacking = _listed(self.by_text[""])
            return f"{self.name} is not registered on {lacking}"
        return f"{self.name} differs: " + " against ".join(_listed(ranks) for _, ranks in in_order)


def is_of_anew(texts: Fingerprint) -> bool:
    """Whether they say what nothing keeps, and not what the rank holds."""
    return any(each.startswith(ANEW) for each in texts)


def is_of_unseen(texts: Fingerprint) -> bool:
    """Whether they say from which step on the rank's state can be saved after a death."""
    return any(each.startswith(UNSEEN) for each in texts)


def bundled(
    texts: Mapping[str, str], labels: Mapping[str, str] = _NONE, most: int = MOST
) -> dict[str, str]:
    """The same in at most ``most`` parts.

    Those that differ in the numbers in their names, as those of alike layers do, become one: most
    likely the same ranks hold them. If that is not enough, consecutive ones become ``first ..
    last``.

    Args:
        labels: the names to go by, of those that have others.
        most: how many there may be.
    """
    if len(texts) <= most:
        return {_cut(name): text for name, text in texts.items()}
    alike: dict[str, dict[str, str]] = {}
    for name in sorted(texts):
        alike.setdefault(numberless(labels.get(name, name)), {})[name] = texts[name]
    texts = {key: _joined(each) for key, each in alike.items()}
    names = sorted(texts)
    size = -(-len(names) // most) or 1
    found: dict[str, str] = {}
    for at in range(0, len(names), size):
        group = names[at : at + size]
        key = _cut(group[0]) + (f"{_TO}{_cut(group[-1])}" if len(group) > 1 else "")
        found[key] = _joined({name: texts[name] for name in group})
    return found


def _joined(texts: Mapping[str, str]) -> str:
    """One text for several."""
    if len(texts) == 1:
        return next(iter(texts.values()))
    said = "\n".join(f"{name} {text}" for name, text in texts.items())
    kind = ""
    if all(text.startswith(PART) for text in texts.values()):
        kind = PART
    elif any(map(_is_value, texts.values())):
        kind = VALUE
    return f"{kind}{zlib.crc32(said.encode()):08x}"


def numberless(name: str) -> str:
    """The name of all tensors whose names differ from this one in their numbers."""
    return _NUMBERS.sub("*", name)


def is_named(name: str, label: str, names: Collection[str]) -> bool:
    """Whether a tensor is among those that :func:`bundled` gave these names."""
    return _cut(name) in names or _cut(numberless(label)) in names


def differences(of: Mapping[int, Fingerprint]) -> list[Difference]:
    """What is not the same on all of these ranks, by name."""
    names = sorted({name for each in of.values() for name in each})
    found = []
    for name in names:
        by_text: dict[str, list[int]] = {}
        for rank in sorted(of):
            by_text.setdefault(of[rank].get(name, ""), []).append(rank)
        if len(by_text) > 1:
            found.append(Difference(name, {text: tuple(each) for text, each in by_text.items()}))
    return found


def differences_within(
    of: Mapping[int, Fingerprint], groups_of: Callable[[str], Iterable[tuple[int, ...]]]
) -> list[Difference]:
    """What is not the same within groups of these ranks, but for values of the script's own.

    ``groups_of``: takes a name, and returns the ranks that are to have that alike.
    """
    found = []
    for each in differences(of):
        groups = () if is_own_value(each.name) else groups_of(each.name)
        text_of = {rank: text for text, ranks in each.by_text.items() for rank in ranks}
        for group in groups:
            by_text: dict[str, list[int]] = {}
            for rank in group:
                if rank in text_of:
                    by_text.setdefault(text_of[rank], []).append(rank)
            if len(by_text) > 1:
                by_ranks = {text: tuple(ranks) for text, ranks in by_text.items()}
                found.append(Difference(each.name, by_ranks))
    return found


def is_own_value(name: str) -> bool:
    """Whether it is that of a value of the script's own, which each rank keeps for itself."""
    return name.startswith((LATE, RESULT))


def is_buffer(name: str) -> bool:
    """Whether a value of this name, without its prefix, is a module's buffer, or one of several."""
    return name.startswith((f"{BUFFER} `", f"{ONE_OF_BUFFERS} `"))


def alike(of: Mapping[int, Fingerprint]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that hold the same, but for values of the script's own; by their first."""
    groups: dict[frozenset[tuple[str, str]], list[int]] = {}
    for rank in sorted(of):
        texts = ((name, text) for name, text in of[rank].items() if not is_own_value(name))
        groups.setdefault(frozenset(texts), []).append(rank)
    return tuple(map(tuple, groups.values()))


def describe(found: list[Difference], suspects: Collection[int] = ()) -> str:
    """The first differences as text; values before digests, since they say more.

    ``suspects``: ranks to be named first.
    """
    found = sorted(found, key=lambda each: not all(map(_is_plain, each.by_text)))
    more = f"; {len(found) - _SHOWN} more differ" if len(found) > _SHOWN else ""
    return "; ".join(each.describe(suspects) for each in found[:_SHOWN]) + more


def _is_plain(text: str) -> bool:
    return text.startswith("=")


def _is_value(text: str) -> bool:
    return text.startswith(("=", VALUE))


def _cut(name: str) -> str:
    name = ascii(name)[1:-1]
    if len(name) <= _NAME:
        return name
    return f"{name[: _NAME // 3]}...{name[-_NAME // 2 :]}~{zlib.crc32(name.encode()):08x}"


def _listed(ranks: Iterable[int]) -> str:
    found = [str(rank) for rank in ranks]
    more = ", ..." if len(found) > _RANKS else ""
    return f"rank{'s' if len(found) != 1 else ''} {', '.join(found[:_RANKS])}{more}"
