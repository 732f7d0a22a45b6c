"""How much memory a checkpoint in memory takes, and whether it is there. Pure."""

from __future__ import annotations

from agent.text.wording import sized

SPARE = 64 << 20  # bytes that a process takes besides the state, and the agent for a manifest

_MOST = 1 << 62


def needed(state: int, host: int, private: int, gone: int) -> int:
    """Bytes that a checkpoint in memory and the replacement of ``gone`` ranks take.

    Those ranks are dead, so their memory is free already, and their replacements will need it.

    Args:
        state: bytes of the replicated state, as a rank reports.
        host: bytes of it that are not on an accelerator.
        private: bytes of all ranks' private state.
        gone: how many ranks will be started again.
    """
    state, host = (min(max(0, nbytes), _MOST) for nbytes in (state, host))
    return state + SPARE + gone * (host + SPARE) + private


def shortage(wanted: int, free: int | None) -> str:
    """Why there is no room, as a sentence; empty: there is, or it is unknown."""
    if free is None or wanted <= free:
        return ""
    return f"there is no room for the state: {sized(wanted)} needed, {sized(free)} free"
