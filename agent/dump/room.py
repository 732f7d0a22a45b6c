"""How much memory a checkpoint in memory takes, and whether it is there. Pure."""

from __future__ import annotations

from agent.text.wording import sized

SPARE = 64 << 20  # bytes that a process takes besides the state, and the agent for a manifest

_MOST = 1 << 62


def needed(state: int, host: int, private: int, gone: int, held: int = 0) -> int:
    """Bytes that a checkpoint in memory and the replacement of ``gone`` ranks take.

    Those ranks are dead, and their replacements will need the memory that they had. It is free
    already, or will be once the checkpoint is there.

    Args:
        state: bytes of the replicated state, as a rank reports.
        host: bytes of it that are not on an accelerator.
        private: bytes of all ranks' private state.
        gone: how many ranks will be started again.
        held: bytes of those ranks that are not free before the checkpoint is complete.
    """
    state, host = (min(max(0, nbytes), _MOST) for nbytes in (state, host))
    checkpoint = state + SPARE + private
    return checkpoint + max(0, gone * (host + SPARE) - held)


def shortage(wanted: int, free: int | None) -> str:
    """Why there is no room, as a sentence; empty: there is, or it is unknown."""
    if free is None or wanted <= free:
        return ""
    return f"there is no room for the state: {sized(wanted)} needed, {sized(free)} free"
