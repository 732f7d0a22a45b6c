"""On which other node a rank runs, and which of some ranks run on each. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

H = TypeVar("H")


class Homes(dict[int, H], Generic[H]):
    """The nodes of ranks, but for those that run on this one."""

    def __init__(self, homes: Iterable[tuple[H, Iterable[int]]]) -> None:
        """``homes``: nodes with their ranks."""
        super().__init__((rank, home) for home, ranks in homes for rank in ranks)

    def split(self, ranks: Iterable[int]) -> tuple[tuple[int, ...], dict[H, tuple[int, ...]]]:
        """Those of some ranks that run here, and those of each node that has any, in order.

        In one pass: a node that looks for its own among all ranks makes it nodes times ranks.
        """
        here: list[int] = []
        found: dict[H, list[int]] = {}
        for rank in ranks:
            if rank in self:
                found.setdefault(self[rank], []).append(rank)
            else:
                here.append(rank)
        return tuple(here), {home: tuple(theirs) for home, theirs in found.items()}
