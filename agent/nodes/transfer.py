"""Files in memory travel from one node's msrun to another's, by a connection of their own.

The order to fetch them came by the line between the nodes, with a key that is used once. The bytes
are sent as they are by ``sendfile``. All of it is done in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO

from agent.nodes.tls import PLAIN, Security, UntrustedError

KEY_BYTES = 32
SILENCE_S = 20.0  # without a byte
_PIECE = 64 << 20  # bytes between two signs of progress
_BUFFER = 4 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Progress = Callable[[], object]


class MemoryServer:
    """Sends files to whoever has the key, until it is closed."""

    def __init__(
        self, files: Sequence[int], progress: Progress, security: Security = PLAIN
    ) -> None:
        """Listen at a free port.

        Args:
            files: descriptors, sent whole, in this order; the caller may close them at once.
            progress: called in threads, now and then, as bytes leave.
            security: of the connections.

        Raises:
            OSError: no socket can be opened.
        """
        self.key = os.urandom(KEY_BYTES)
        self._progress = progress
        self._security = security
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=True)
        else:
            self._listener = socket.create_server(("", 0))
        # a number is given to another file once it is closed: whoever sends has numbers of its own
        with contextlib.ExitStack() as failed:
            failed.callback(self._listener.close)
            kept = []
            for file in files:
                kept.append(os.dup(file))
                failed.callback(os.close, kept[-1])
            failed.pop_all()
        threading.Thread(target=self._serve, args=(kept,), name="msrun-memory", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Send to nobody who comes later."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _serve(self, kept: Sequence[int]) -> None:
        with contextlib.ExitStack() as stack:
            for file in kept:
                stack.callback(os.close, file)
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                try:
                    files = [open(os.dup(file), "rb") for file in kept]  # noqa: SIM115  in _send
                except OSError:  # no descriptor is left: nothing comes there
                    connection.close()
                    continue
                each = threading.Thread(target=self._send, args=(connection, files), daemon=True)
                each.start()

    def _send(self, connection: socket.socket, files: Sequence[BinaryIO]) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            for file in files:
                stack.enter_context(file)
            connection.settimeout(SILENCE_S)
            connection = stack.enter_context(self._security.accepted(connection))
            if not hmac.compare_digest(_received(connection, KEY_BYTES), self.key):
                return
            for file in files:
                size, at = os.fstat(file.fileno()).st_size, 0
                while at < size:
                    sent = connection.sendfile(file, at, min(_PIECE, size - at))
                    if not sent:
                        return  # it was cut short: the other end sees that not all has come
                    at += sent
                    self._progress()
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # until the other end has all of it, and closes


def fetch(
    host: str,
    port: int,
    key: bytes,
    sizes: Sequence[int],
    name: str,
    security: Security = PLAIN,
) -> list[int]:
    """Fetch files into memory of this process; their descriptors, sealed.

    Args:
        host: address of the node that has them.
        port: of its :class:`MemoryServer`.
        key: the server's.
        sizes: of the files, in bytes.
        name: begins the files' names, which people may see in ``/proc``.
        security: of the connection.

    Raises:
        OSError: they cannot be fetched whole; there is no memory.
    """
    files: list[int] = []
    try:
        with _dialled(host, port, security) as connection:
            connection.sendall(key)
            for number, size in enumerate(sizes):
                flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
                files.append(os.memfd_create(f"{name}-{number}", flags))
                _fill(files[-1], connection, size)
                fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return files


def _dialled(host: str, port: int, security: Security) -> socket.socket:
    connection = socket.create_connection((host, port), SILENCE_S)
    try:
        return security.dialled(connection)
    except UntrustedError as error:
        raise OSError(f"the controller's node {error}") from error
    except BaseException:
        connection.close()
        raise


def _fill(file: int, connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(min(_BUFFER, max(size, 1))))
    left = size
    while left:
        count = connection.recv_into(buffer[: min(left, len(buffer))])
        if not count:
            raise OSError("the other node closed the connection before all had come")
        written = 0
        while written < count:
            written += os.write(file, buffer[written:count])
        left -= count


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data
