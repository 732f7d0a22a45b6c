"""Which device each rank has, which ones are spare, and which are not used again. Pure.

Scripts take the device whose number is their LOCAL_RANK among those that CUDA_VISIBLE_DEVICES
lists. So a failed device leaves the list, and a spare one takes its place: the successor of its
rank and all that start later get that list, and ranks that live keep the list that they have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

_NONE: Mapping[int, str] = {}


class DevicePlan(NamedTuple):
    """The devices of one node; empty: nothing is planned, and workers inherit their list."""

    slots: Mapping[int, str] = _NONE  # rank -> the device that it has, or its successor gets
    spare: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # listed, but neither
    given_up: tuple[str, ...] = ()  # by this run and those that it resumed
    faults: Mapping[int, str] = _NONE  # rank whose device failed -> how, the first to fail first

    @property
    def is_on(self) -> bool:
        """Whether devices are planned."""
        return bool(self.slots)

    @property
    def visible(self) -> tuple[str, ...]:
        """The list for ranks that start now."""
        return (*self.slots.values(), *self.spare, *self.others)

    def failed(self, rank: int, fault: str) -> DevicePlan:
        """The plan once the device of a rank has failed; nothing is given up yet."""
        if rank not in self.slots:
            return self
        return self._replace(faults={**self.faults, rank: fault})

    def renewed(self, ranks: Collection[int]) -> tuple[DevicePlan, str]:
        """The plan once successors of ``ranks`` are ordered, and what changes, as text.

        A spare device goes to the rank whose device failed first, so that a rank which is ordered
        early gets the same one if more devices fail before the others are ordered.
        """
        plan, said = self, []
        for rank, fault in self.faults.items():
            if rank in ranks:
                plan, sentence = _with_successor(plan, rank, fault)
                said.append(sentence)
        faults = {rank: fault for rank, fault in self.faults.items() if rank not in ranks}
        return plan._replace(faults=faults), "; ".join(said)


def _with_successor(plan: DevicePlan, rank: int, fault: str) -> tuple[DevicePlan, str]:
    """The plan once the rank's successor is ordered, and where it goes."""
    failed = plan.slots[rank]
    how = f"device {failed} of rank {rank} failed ({fault})"
    if not plan.spare:
        return plan, f"{how}, and no spare device is left: its successor gets the same one"
    new, *rest = plan.spare
    left = f"{len(rest)} spare left" if rest else "the last spare one"
    plan = plan._replace(
        slots={**plan.slots, rank: new},
        spare=tuple(rest),
        given_up=(*plan.given_up, failed),
    )
    return plan, f"{how} and is not used again: its successor gets device {new}, {left}"
