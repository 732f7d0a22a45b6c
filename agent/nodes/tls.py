"""TLS between the nodes: each side proves with a certificate of the job's own authority who it is.

Whoever has one belongs to the job; the host's name is not looked at, as nodes have names that
nobody knows beforehand.
"""

from __future__ import annotations

import os
import ssl
from socket import MSG_PEEK, SO_ERROR, SOL_SOCKET, socket
from typing import Any, Protocol

from agent.nodes.frames import PREAMBLE
from agent.nodes.guest import WRONG
from agent.nodes.line import bytes_of
from agent.nodes.messages import Refused

NEEDS_TLS = "the nodes of this job know each other by certificates: give --tls-config here, too"
_NOT_YET_VALID = 9  # X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL
_OF_MANY_KINDS = "bad certificate"  # what the other side is told of that one, and of others
_CLOCKS = " (are the clocks of both right?)"
_BLOCK_BYTES = 1 << 20  # of a file at a time
_RECORD_BYTES = 16 << 10  # the longest that TLS has


class Security(Protocol):
    """What connections between nodes are made of."""

    @property
    def is_both_ways(self) -> bool:
        """Whether any node may dial any other one, not only that of the controller."""

    def accepted(self, connection: socket) -> socket:
        """For a connection that this node has accepted; it shakes hands as it first reads."""

    def dialled(self, connection: socket) -> socket:
        """For a connection that this node has opened.

        Raises:
            OSError: it is gone, or does not speak TLS; another try may do.
            UntrustedError: one side does not trust the other.
        """


class UntrustedError(Exception):
    """The two sides do not trust each other: a clause that says why."""


class PlainText:
    """No TLS."""

    is_both_ways = True

    def accepted(self, connection: socket) -> socket:
        """As it is."""
        return connection

    def dialled(self, connection: socket) -> socket:
        """As it is."""
        return connection


PLAIN = PlainText()


class TlsSocket(ssl.SSLSocket):
    """A connection that waits, or does not, as a plain one does."""

    def recv(self, buflen: int = _RECORD_BYTES, flags: int = 0) -> bytes:
        """Some bytes, at most ``buflen`` and what is left of one record; empty: it is closed.

        What was decrypted and is not read yet would wake nobody who waits for the descriptor.

        Raises:
            BlockingIOError: there is nothing yet.
        """
        if self.server_side and self.version() is None and self._is_plain():
            socket.send(self, bytes_of(Refused(NEEDS_TLS, WRONG)))
            return b""
        if self.version() is not None and not self.pending():
            # the kernel's error, of which OpenSSL and older Pythons make an end of the stream
            socket.recv(self, 1, MSG_PEEK)
        try:
            data = super().recv(buflen, flags)
            while more := self.pending():
                data += super().recv(more)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        return data

    def sendfile(self, file: Any, offset: int = 0, count: int | None = None) -> int:
        """As a plain socket's: the file's own position neither counts nor moves."""
        sent = 0
        while count is None or sent < count:
            wanted = _BLOCK_BYTES if count is None else min(_BLOCK_BYTES, count - sent)
            data = os.pread(file.fileno(), wanted, offset + sent)
            if not data:
                break
            self.sendall(data)
            sent += len(data)
        return sent

    def _is_plain(self) -> bool:
        """Whether the other side is a node without certificates, as its first bytes show."""
        try:
            return socket.recv(self, len(PREAMBLE), MSG_PEEK) == PREAMBLE
        except BlockingIOError:
            return False

    def send(self, data: Any, flags: int = 0) -> int:
        """As a plain socket's.

        Raises:
            BlockingIOError: the kernel takes nothing at present.
        """
        if number := self.getsockopt(SOL_SOCKET, SO_ERROR):
            raise OSError(number, os.strerror(number))
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


class Tls:
    """Connections on which both sides show certificates, each that of its part."""

    is_both_ways = False

    def __init__(self, context: ssl.SSLContext) -> None:
        """``context``: of this side; it wants a certificate from the other one."""
        context.sslsocket_class = TlsSocket
        self._context = context

    def accepted(self, connection: socket) -> socket:
        """Shakes hands as it first reads."""
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def dialled(self, connection: socket) -> socket:
        """Shakes hands at once, within the connection's time-out."""
        wrapped = self._context.wrap_socket(connection, do_handshake_on_connect=False)
        try:
            wrapped.do_handshake()
        except ssl.SSLEOFError as error:
            wrapped.close()
            raise OSError("closed: perhaps it does not speak TLS") from error
        except ssl.SSLError as error:
            wrapped.close()
            if is_of_trust(error):
                raise UntrustedError(why_untrusted(error)) from error
            raise OSError(why_untrusted(error)) from error
        except OSError:
            wrapped.close()
            raise
        return wrapped


def is_of_trust(error: ssl.SSLError) -> bool:
    """Whether this is about certificates, which another try would not change."""
    reason = error.reason or ""
    about = "CERTIFICATE" in reason or "UNKNOWN_CA" in reason
    return about or isinstance(error, ssl.SSLCertVerificationError)


def why_untrusted(error: ssl.SSLError) -> str:
    """What went wrong between two sides, as a clause about the other one."""
    reason = (error.reason or "").replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        is_early = error.verify_code == _NOT_YET_VALID
        why = f"shows a certificate that is not accepted here: {error.verify_message}"
        return why + _CLOCKS * is_early
    if "alert" in reason:
        said = reason.partition("alert ")[2]
        why = f"does not accept this node's certificate, or its own list has expired: {said}"
        return why + _CLOCKS * (said == _OF_MANY_KINDS)
    if reason in {"wrong version number", "http request"}:
        return "does not speak TLS: all nodes need --tls-config, or none"
    return f"cannot agree with this node on TLS: {reason or error}"
