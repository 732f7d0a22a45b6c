"""How the time for a graceful exit is divided. Pure."""

from __future__ import annotations

ROOM = 1 / 3  # of a short grace: for the dump that follows if the ranks do not reach a common step


def room_s(grace_s: float, freeze_s: float) -> float:
    """Seconds reserved to freeze the ranks and to save, in case they reach no common step.

    Args:
        grace_s: from the request to the end of the dump.
        freeze_s: how long ranks may take to freeze.
    """
    return min(freeze_s, grace_s * ROOM)


def hold_s(grace_s: float, freeze_s: float) -> float:
    """Seconds that ranks have to reach the end of one common step."""
    return grace_s - room_s(grace_s, freeze_s)


def hurried_freeze_s(grace_s: float, freeze_s: float) -> float:
    """Seconds that ranks have to freeze if they reached none; the rest is for writing."""
    return room_s(grace_s, freeze_s) / 2
