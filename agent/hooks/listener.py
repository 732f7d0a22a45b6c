"""The socket that training scripts knock at: a name in Linux's abstract namespace, no file.

The name reaches workers by their environment. Anybody on the machine can find it and connect to it
(``/proc/net/unix`` lists all names), so ``agent.hooks.rank_links`` looks at who came.
"""

from __future__ import annotations

import os
import socket

BACKLOG = 4096  # every rank may knock before the agent looks


def open_listener(record_id: str) -> socket.socket:
    """Listen for hooks. Called in the process that will be the agent: peers read its pid there.

    Raises:
        OSError: no socket can be had.
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(f"\0msrun-{record_id}-{os.urandom(8).hex()}")
        door.listen(BACKLOG)
    except BaseException:
        door.close()
        raise
    door.setblocking(False)
    return door


def name_of(door: socket.socket) -> str:
    """What hooks connect to, without the leading NUL."""
    return bytes(door.getsockname()).decode().removeprefix("\0")
