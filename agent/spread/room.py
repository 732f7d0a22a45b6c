"""Whether this node's memory has room for what is to come."""

from __future__ import annotations

from agent.dump.room import SPARE, shortage
from worker_hooks.machine.free_memory import free_bytes


def check_room(nbytes: int) -> None:
    """Return if it has.

    Raises:
        OSError: there is no room for so many bytes.
    """
    if why := shortage(nbytes + SPARE, free_bytes()):
        raise OSError(why)
