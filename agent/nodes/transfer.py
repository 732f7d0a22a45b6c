"""Files in memory travel from one node's msrun to another's, by a connection of their own.

The order to fetch or to bring them came by the line between the nodes, with a key that is used
once. It is the controller's node that listens. The bytes are sent as they are by ``sendfile``. All
of it is done in threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from weakref import finalize

from agent.machine.threads import begin_thread
from agent.nodes.tls import PLAIN, Security, UntrustedError

KEY_BYTES = 32
BACKLOG = 4096  # thousands come at once; whom the kernel turns away comes again seconds later
SILENCE_S = 20.0  # without a byte
PROOF_S = 5.0  # for whoever connects to send a key: anybody may
MOST_UNKNOWN = 64  # that have sent none yet; whoever comes then waits for one of them
_PIECE = 64 << 20  # bytes between two signs of progress
_BUFFER = 4 << 20
_SIZE = struct.Struct("!Q")
_COUNT = struct.Struct("!I")
_ALL = (1 << 32) - 1  # of an offer: no numbers follow
_HAS_ALL = b"+"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Progress = Callable[[int], object]
"""Takes how many bytes more have left, or come."""


class Span(NamedTuple):
    """A part of a file, by its descriptor."""

    file: int
    at: int = 0
    nbytes: int | None = None  # None: up to its end


class _Held:
    """A file that is open until the server is closed, and nobody is amid it any more."""

    def __init__(self, file: int, inode: int) -> None:
        self.file, self.inode = os.dup(file), inode
        finalize(self, os.close, self.file)


class _Offer(NamedTuple):
    """What somebody may fetch."""

    span: Span
    held: _Held  # its file, by a number of its own


class MemoryServer:
    """Sends files to whoever has a key, until it is closed."""

    def __init__(self, progress: Progress, security: Security = PLAIN) -> None:
        """Listen at a free port.

        Args:
            progress: called in threads, now and then, as bytes leave.
            security: of the connections.

        Raises:
            OSError: no socket can be opened, or no thread be begun.
        """
        self._progress = progress
        self._security = security
        self._offers: dict[bytes, Sequence[_Offer | Path]] = {}
        self._held: dict[int, _Held] = {}  # by the files' numbers when they were offered
        self._listener = _listening()
        self.port = int(self._listener.getsockname()[1])
        """Where it listens."""
        self._unknown = threading.Semaphore(MOST_UNKNOWN)
        self._free = 0  # threads that wait for somebody
        self._counting = threading.Lock()
        with self._counting:
            try:
                self._begin_thread()
            except OSError:
                self._listener.close()
                raise

    def offer(self, spans: Iterable[Span]) -> bytes:
        """A key to these; they are sent in this order.

        A file stays open as long as the server does: thousands fetch it, and to open it for each
        takes longer than to send what is small.
        """
        key = os.urandom(KEY_BYTES)
        offers = []
        for span in spans:
            held, inode = self._held.get(span.file), os.fstat(span.file).st_ino
            if held is None or held.inode != inode:  # the number is another file's by now
                held = self._held[span.file] = _Held(span.file, inode)
            offers.append(_Offer(span._replace(file=held.file), held))
        self._offers[key] = offers
        return key

    def offer_paths(self, paths: Iterable[Path]) -> bytes:
        """A key to these files, which are opened when somebody comes."""
        key = os.urandom(KEY_BYTES)
        self._offers[key] = tuple(paths)
        return key

    def close(self) -> None:
        """Send to nobody who comes later."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._offers, self._held = {}, {}

    def _begin_thread(self) -> None:
        begin_thread("msrun-memory", self._serve)
        self._free += 1

    def _serve(self) -> None:
        """Serve one after the other, while other threads serve others: one is always free.

        To begin a thread for each of thousands takes longer than to send them what is small. One
        that a stranger has had is not kept.
        """
        while True:
            with contextlib.ExitStack() as stack:
                with self._unknown:
                    try:
                        connection, _ = self._listener.accept()
                    except OSError:
                        return
                    self._take_from_free()
                    found = self._asked(stack.enter_context(connection), stack)
                if found is not None:
                    with contextlib.suppress(OSError):
                        self._send(*found)
            with self._counting:
                if found is None and self._free:
                    return
                self._free += 1

    def _take_from_free(self) -> None:
        with self._counting:
            self._free -= 1
            if not self._free:
                with contextlib.suppress(OSError):  # no thread is left: others wait
                    self._begin_thread()

    def _asked(
        self, connection: socket.socket, stack: contextlib.ExitStack
    ) -> tuple[socket.socket, Sequence[_Offer | Path]] | None:
        """The connection as it is secured, and what it asks for; ``None``: it has no key."""
        with contextlib.suppress(OSError):
            nbytes = KEY_BYTES + _COUNT.size
            connection, told = _proven(connection, self._security, stack, nbytes)
            # nobody learns a key from how long it takes to look it up: it is a number by chance
            if (offers := self._offers.get(told[:KEY_BYTES])) is not None:
                wanted = _wanted(connection, told[KEY_BYTES:], len(offers))
                return connection, [offers[number] for number in wanted]
        return None

    def _send(self, connection: socket.socket, offers: Sequence[_Offer | Path]) -> None:
        for offer in offers:
            if not self._send_offer(connection, offer):
                return
        if isinstance(connection, ssl.SSLSocket):
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # until the other end has all of it, and closes
        # else the kernel sends what is left, as nothing lies unread here

    def _send_offer(self, connection: socket.socket, offer: _Offer | Path) -> bool:
        """Whether all of it was sent."""
        if isinstance(offer, _Offer):
            return _sent(connection, offer.span, self._progress)
        file = os.open(offer, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _sent(connection, Span(file), self._progress)
        finally:
            os.close(file)


class MemoryInbox:
    """Takes one file from whoever has the key, until it is closed."""

    def __init__(
        self,
        name: str,
        taken: Callable[[int], object],
        progress: Progress,
        security: Security = PLAIN,
    ) -> None:
        """Listen at a free port.

        Args:
            name: the file's, which people may see in ``/proc``.
            taken: called in a thread with the file's descriptor, before its sender hears of it.
            progress: called in that thread, now and then, as bytes come.
            security: of the connection.

        Raises:
            OSError: no socket can be opened, or no thread be begun.
        """
        self.key = os.urandom(KEY_BYTES)
        self._name = name
        self._taken = taken
        self._progress = progress
        self._security = security
        self._unknown = threading.Semaphore(MOST_UNKNOWN)
        self._taking = threading.Lock()
        self._is_taken = False
        self._listener = _listening()
        self.port = int(self._listener.getsockname()[1])
        try:
            begin_thread("msrun-inbox", self._serve)
        except OSError:
            self._listener.close()
            raise

    def close(self) -> None:
        """Take nothing any more, unless it is on its way."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _serve(self) -> None:
        while True:
            self._unknown.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                begin_thread("msrun-inbox", self._hear, connection)
            except OSError:  # no thread is left
                self._unknown.release()
                connection.close()

    def _hear(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            # or the loop of the job is just over
            stack.enter_context(contextlib.suppress(OSError, RuntimeError))
            try:
                connection, key = _proven(connection, self._security, stack, KEY_BYTES)
            finally:
                self._unknown.release()
            if hmac.compare_digest(key, self.key):
                self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        told = received(connection, _SIZE.size)
        if len(told) < _SIZE.size:
            return
        (size,) = _SIZE.unpack(told)
        file = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fill(file, connection, size, self._progress)
        except BaseException:
            os.close(file)
            raise
        with self._taking:
            if self._is_taken:
                os.close(file)
                return
            self._taken(file)
            self._is_taken = True
        connection.sendall(_HAS_ALL)
        self.close()


def give(
    host: str,
    port: int,
    key: bytes,
    file: BinaryIO,
    progress: Progress,
    security: Security = PLAIN,
    nbytes: int | None = None,
) -> None:
    """Bring a file to the :class:`MemoryInbox` of another node, which has all of it then.

    Args:
        host: address of that node.
        port: of the inbox.
        key: the inbox's.
        file: from its beginning.
        progress: called now and then, as bytes leave.
        security: of the connection.
        nbytes: no more of it than that; ``None``: all.

    Raises:
        OSError: the other node has not got it.
    """
    count = os.fstat(file.fileno()).st_size if nbytes is None else nbytes
    with dialled(host, port, security) as connection:
        connection.sendall(key + _SIZE.pack(count))
        span = Span(file.fileno(), 0, count)
        if not _sent(connection, span, progress) or connection.recv(1) != _HAS_ALL:
            raise OSError("the controller's node has not taken all")


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=BACKLOG)


def _sent(connection: socket.socket, span: Span, progress: Progress) -> bool:
    """Send a part of a file; whether all of it: if it was cut short, the other end sees that."""
    file, at, nbytes = span
    end = os.fstat(file).st_size if nbytes is None else at + nbytes
    while at < end:
        sent = _sent_piece(connection, file, at, min(_PIECE, end - at))
        if not sent:
            return False
        at += sent
        progress(sent)
    return True


def _sent_piece(connection: socket.socket, file: int, at: int, count: int) -> int:
    """Send at most so many bytes; how many.

    What ``socket.sendfile`` does before it sends takes longer than to send what a rank alone has.
    """
    if isinstance(connection, ssl.SSLSocket):
        with open(file, "rb", closefd=False) as readable:
            return connection.sendfile(readable, at, count)
    while True:
        try:
            return os.sendfile(connection.fileno(), file, at, count)
        except BlockingIOError:
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            if not poll.poll(SILENCE_S * 1000):
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None


def fetch(
    host: str,
    port: int,
    key: bytes,
    spans: Iterable[Span],
    security: Security = PLAIN,
    only: Sequence[int] | None = None,
    within_s: float = SILENCE_S,
) -> None:
    """Fetch parts of files into files of this process.

    Args:
        host: address of the node that has them.
        port: of its :class:`MemoryServer`.
        key: the server's.
        spans: where they belong here, in the order in which they are sent.
        security: of the connection.
        only: which of those that the key is to; ``None``: all.
        within_s: until the connection is there.

    Raises:
        OSError: they cannot be fetched whole; there is no memory.
    """
    with asked(host, port, key, security, only, within_s) as connection:
        for file, at, nbytes in spans:
            assert nbytes is not None
            fill(file, connection, nbytes, lambda _: None, at)


def _wanted(connection: socket.socket, told: bytes, count: int) -> Iterable[int]:
    """The numbers of what somebody wants of an offer of ``count``; none: of what is not there."""
    if len(told) < _COUNT.size:
        return ()
    (wanted,) = _COUNT.unpack(told)
    if wanted == _ALL:
        return range(count)
    if wanted > count:
        return ()
    numbers = received(connection, _COUNT.size * wanted)
    whole = len(numbers) // _COUNT.size * _COUNT.size
    found = [number for (number,) in _COUNT.iter_unpack(numbers[:whole])]
    return found if len(found) == wanted and max(found, default=0) < count else ()


def memory_files(count: int, name: str) -> list[int]:
    """So many empty files in memory.

    ``name`` begins their names, which people may see in ``/proc``.

    Raises:
        OSError: there is no descriptor left.
    """
    files: list[int] = []
    try:
        for number in range(count):
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            files.append(os.memfd_create(f"{name}-{number}", flags))
    except BaseException:
        close_all(files)
        raise
    return files


def seal(files: Iterable[int]) -> None:
    """Let nobody change what is in them any more."""
    for file in files:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)


def close_all(files: Iterable[int]) -> None:
    """Close files by their descriptors."""
    for file in files:
        os.close(file)


def asked(
    host: str,
    port: int,
    key: bytes,
    security: Security,
    only: Sequence[int] | None = None,
    within_s: float = SILENCE_S,
) -> socket.socket:
    """A connection on which a :class:`MemoryServer` sends what the key is to.

    Args:
        host: address of its node.
        port: its.
        key: what it has made.
        security: of the connection.
        only: these of it, by their numbers; ``None``: all.
        within_s: until the connection is there.

    Raises:
        OSError: there is none, or that node is not to be trusted.
    """
    connection = dialled(host, port, security, within_s)
    try:
        numbers = b"".join(map(_COUNT.pack, only or ()))
        connection.sendall(key + _COUNT.pack(_ALL if only is None else len(only)) + numbers)
    except BaseException:
        connection.close()
        raise
    return connection


def dialled(host: str, port: int, security: Security, within_s: float = SILENCE_S) -> socket.socket:
    """A connection to another node, which has to be there ``within_s``.

    Raises:
        OSError: there is none, or that node is not to be trusted.
    """
    connection = socket.create_connection((host, port), within_s)
    try:
        connection.settimeout(SILENCE_S)
        return security.dialled(connection)
    except UntrustedError as error:
        raise OSError(f"the node {host} {error}") from error
    except BaseException:
        connection.close()
        raise


def fill(file: int, connection: socket.socket, size: int, progress: Progress, at: int = 0) -> None:
    """Write so many bytes, as they come, into a file by its descriptor, from ``at`` on.

    Raises:
        OSError: they do not come, or cannot be written.
    """
    buffer = memoryview(bytearray(min(_BUFFER, max(size, 1))))
    left = size
    while left:
        count = connection.recv_into(buffer[: min(left, len(buffer))])
        if not count:
            raise OSError("the other node closed the connection before all had come")
        written = 0
        while written < count:
            written += os.pwrite(file, buffer[written:count], at + written)
        progress(count)
        left -= count
        at += count


def received(connection: socket.socket, count: int, within_s: float | None = None) -> bytes:
    """So many bytes, or fewer if the other end has closed.

    ``within_s``: the time for all of them; ``None``: that of the connection, for each piece.

    Raises:
        OSError: nothing comes.
    """
    data, had = bytearray(count), 0
    end_s = None if within_s is None else time.monotonic() + within_s
    while had < count:
        if end_s is not None:
            connection.settimeout(max(end_s - time.monotonic(), 0.001))
        # not recv: what an encrypted line has decrypted may be more than was asked for
        more = connection.recv_into(memoryview(data)[had:])
        if not more:
            break
        had += more
    return bytes(data[:had])


def _proven(
    connection: socket.socket, security: Security, stack: contextlib.ExitStack, nbytes: int
) -> tuple[socket.socket, bytes]:
    """An accepted connection as it is secured, which ``stack`` closes, and its first bytes: a key.

    Raises:
        OSError: none comes in time.
    """
    connection.settimeout(PROOF_S)
    connection = stack.enter_context(security.accepted(connection))
    told = received(connection, nbytes, PROOF_S)
    connection.settimeout(SILENCE_S)
    return connection, told
