"""Whether memory has room for a checkpoint, and for those that are started again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from agent.text.wording import sized

SPARE = 64 << 20  # bytes that a process takes besides the state, and the agent for a manifest
_MOST = 1 << 62


def room(limits: Iterable[int | None], used: int | None, idle: int, busy: int) -> int | None:
    """What a control group can still have; ``None``: it has no limit.

    Args:
        limits: in bytes; the lowest counts.
        used: bytes.
        idle: bytes of files among those, which nobody has looked at for long: they are given up.
        busy: bytes of files among those that are in use: half of them may go.
    """
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return None
    return max(0, min(known) - max(0, used - idle - busy // 2))


def needed(state: int, host: int, private: int, gone: int) -> int:
    """Bytes that a checkpoint in memory and the replacement of ``gone`` ranks take.

    Those ranks are dead, so what they had is free already, and their successors will need it.

    Args:
        state: bytes of the replicated state, as a rank says.
        host: what of it is not on an accelerator.
        private: bytes of what all ranks have for themselves.
        gone: how many ranks are to be started again.
    """
    state, host = (min(max(0, nbytes), _MOST) for nbytes in (state, host))
    return state + SPARE + gone * (host + SPARE) + private


def shortage(wanted: int, free: int | None) -> str:
    """Why there is no room, as a sentence; empty: there is, or nobody knows."""
    if free is None or wanted <= free:
        return ""
    return f"there is no room for the state: {sized(wanted)} needed, {sized(free)} free"
