"""The training process's end of the connection to the agent.

One packet socket; the main thread and the listener both send on it, and the kernel keeps packets
apart. If the agent closes it, the agent is dead, or wants nothing of this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from worker_hooks.contract import protocol, wire

ANSWER_S = 30.0  # for the answer of an agent that has a thousand ranks to greet
VERIFY_S = 1800.0  # for an agent that has to read a large checkpoint first
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


class AgentLink:
    """A connected socket."""

    def __init__(self, name: str) -> None:
        """Connect to the agent's socket.

        ``name``: in Linux's abstract namespace, without the leading NUL.

        Raises:
            OSError: no agent listens there.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(ANSWER_S)
            self._socket.connect(f"\0{name}")
            size = _PEER.size
            peer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            self.agent_pid, user, _ = _PEER.unpack(peer)
            _check_user(user)
            self._agent = os.pidfd_open(self.agent_pid)
        except BaseException:
            self._socket.close()
            raise
        self._send_lock = threading.Lock()

    def send(self, message: protocol.Message, fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            OSError: the agent is gone.
        """
        with self._send_lock:
            wire.send(self._socket, message, fds)

    def try_send(self, message: protocol.Message) -> None:
        """Send one message, unless the agent has read nothing for hundreds of them.

        Raises:
            OSError: the agent is gone, or does not read.
        """
        with self._send_lock:
            self._socket.send(wire.encode(message), socket.MSG_DONTWAIT)

    def ask(self, message: protocol.Message, within_s: float = ANSWER_S) -> protocol.Message | None:
        """Send one message and wait for the answer; ``None``: the agent wants nothing of us.

        Raises:
            OSError: the agent is gone or does not answer.
        """
        self.send(message)
        self._socket.settimeout(within_s)
        answer, _ = wire.receive(self._socket)
        return answer

    def listen(
        self, other: int = -1, on_other: Callable[[], None] = lambda: None
    ) -> tuple[protocol.Message | None, list[int]]:
        """Wait for the next message and what is beside it; ``None``: the connection is closed.

        Args:
            other: a descriptor to wait for, too.
            on_other: called each time that ``other`` can be read.

        Raises:
            wire.ProtocolError: the agent speaks another version.
        """
        self._socket.settimeout(None)
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if other >= 0:
            waiting.register(other, select.POLLIN)
        ready: set[int] = set()
        while self._socket.fileno() not in ready:
            ready = {fd for fd, _ in waiting.poll()}
            if other in ready:
                on_other()
        try:
            return wire.receive(self._socket)
        except OSError:
            return None, []

    def is_agent_dead(self, within_s: float) -> bool:
        """Whether the agent's process ended; the kernel closes its sockets a moment before."""
        waiting = select.poll()
        waiting.register(self._agent, select.POLLIN)
        return bool(waiting.poll(within_s * 1000))

    def close(self) -> None:
        """Close the connection; that also ends :meth:`listen` in another thread."""
        with contextlib.suppress(OSError):  # the agent has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """Close only the descriptors; in a forked child, whose parent still needs the line."""
        os.close(self._socket.detach())
        os.close(self._agent)


def _check_user(user: int) -> None:
    """Refuse who took the name after the agent was gone."""
    if user != os.geteuid():
        raise PermissionError(errno.EACCES, f"user {user} listens in msrun's place")
