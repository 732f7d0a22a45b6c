"""The socket that training scripts connect to: a name in Linux's abstract namespace, no file.

The name reaches workers by their environment. Anybody on the machine can find it and connect to it
(``/proc/net/unix`` lists all names), so ``agent.hooks.rank_links`` checks who did.
"""

from __future__ import annotations

import os
import socket
import struct

BACKLOG = 4096  # every rank may connect before the agent accepts
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def open_listener(record_id: str) -> socket.socket:
    """Listen for hooks. Called in the process that will be the agent: peers read its pid there.

    Raises:
        OSError: no socket can be had.
    """
    return listen(f"msrun-{record_id}-{os.urandom(8).hex()}")


def listen(name: str) -> socket.socket:
    """Listen under a name, given without the leading NUL.

    Raises:
        OSError: no socket can be had.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def name_of(listener: socket.socket) -> str:
    """What hooks connect to, without the leading NUL."""
    return bytes(listener.getsockname()).decode().removeprefix("\0")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(told)
    return pid, uid
