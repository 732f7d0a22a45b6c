"""How a graceful exit's time is shared out. Pure."""

from __future__ import annotations

ROOM = 1 / 3  # of a short grace, for the dump that follows where ranks come to no common step


def room_s(grace_s: float, freeze_s: float) -> float:
    """Seconds that are kept for ranks to stand still and to save, once waiting was in vain.

    Args:
        grace_s: from the request to the end of the dump.
        freeze_s: what ranks may need to stand still.
    """
    return min(freeze_s, grace_s * ROOM)


def hold_s(grace_s: float, freeze_s: float) -> float:
    """Seconds that ranks have to come to the end of one step."""
    return grace_s - room_s(grace_s, freeze_s)


def hurried_freeze_s(grace_s: float, freeze_s: float) -> float:
    """Seconds that they have to stand still when they did not: the rest is for writing."""
    return room_s(grace_s, freeze_s) / 2
