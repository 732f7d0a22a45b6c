"""Which shadows belong together: those of all ranks at one optimizer step of one attempt. Pure.

What is compared is what the ranks did, not what their script should do: the shadows of a cut are
only believed in if each rank had begun as many collectives of each group as its peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from agent.text.wording import listed

_MOST_AHEAD = 2  # cuts of which some ranks have no shadow yet: ranks are hardly further apart


class Cut(NamedTuple):
    """A common point of the ranks: those of later attempts are newer, whatever their steps."""

    attempt: int
    step: int


class CutBoard(NamedTuple):
    """The shadows that exist, by cut and rank: how many collectives of each group had begun."""

    made: Mapping[Cut, Mapping[int, Mapping[str, int]]] = {}

    def with_shadow(self, cut: Cut, rank: int, collectives: Mapping[str, int]) -> CutBoard:
        """The board once one more exists."""
        return CutBoard({**self.made, cut: {**self.made.get(cut, {}), rank: collectives}})

    def without(self, cut: Cut, rank: int) -> CutBoard:
        """The board once one is gone."""
        left = {other: which for other, which in self.made.get(cut, {}).items() if other != rank}
        rest = {each: which for each, which in self.made.items() if each != cut}
        return CutBoard({**rest, cut: left} if left else rest)

    def newest(self, ranks: Iterable[int]) -> Cut | None:
        """The newest cut at which every rank has a shadow, and they belong together."""
        wanted = frozenset(ranks)
        whole = [cut for cut, which in self.made.items() if wanted <= which.keys()]
        return max((cut for cut in whole if not self.difference(cut)), default=None)

    def difference(self, cut: Cut) -> str:
        """Why the shadows of a cut do not belong together, as far as they exist; empty: they do."""
        by_group: dict[str, dict[int, list[int]]] = {}
        for rank, collectives in self.made.get(cut, {}).items():
            for group, count in collectives.items():
                by_group.setdefault(group, {}).setdefault(count, []).append(rank)
        for group, by_count in sorted(by_group.items()):
            if len(by_count) > 1:
                said = ", ".join(
                    f"{listed(ranks)} {count}" for count, ranks in sorted(by_count.items())
                )
                return (
                    f"at optimizer step {cut.step} the ranks have not begun the same number of "
                    f"collectives of group {group or 'world'} ({said})"
                )
        return ""

    def outdated(self, ranks: Iterable[int]) -> list[tuple[Cut, int]]:
        """Shadows that nobody needs any more: older than the newest cut.

        Of those that wait for others' only the newest few are kept: a rank that cannot be copied,
        or was past the step, has its peers' pile up.
        """
        newest = self.newest(ranks)
        rest = sorted(cut for cut in self.made if newest is None or cut > newest)
        kept = {newest, *rest[-_MOST_AHEAD:]}
        return [
            (cut, rank) for cut, which in self.made.items() if cut not in kept for rank in which
        ]
