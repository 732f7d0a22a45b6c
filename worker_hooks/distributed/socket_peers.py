"""Finds the sockets of this machine at the other ends of TCP connections.

A request to the kernel for each of them (sock_diag(7)) takes 40 us. Where that is not allowed,
/proc/net/tcp is read, whose tables grow with the machine: 8 ms on a small one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

_DIAG = 4  # NETLINK_SOCK_DIAG, linux/netlink.h
_REQUEST, _ERROR = 1, 2  # NLM_F_REQUEST, NLMSG_ERROR
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY, linux/sock_diag.h
_ANY = 0xFFFFFFFF  # state, or cookie
_HEAD = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ASKED = struct.Struct("=BBBBI")  # inet_diag_req_v2: family, protocol, extensions, -, states
_PORTS = struct.Struct(">HH16s16s")  # inet_diag_sockid; _REST is its second part
_REST = struct.Struct("=III")  # interface, cookie
_STATE_AT = _HEAD.size + 1  # in the answer, an inet_diag_msg
_INODE_AT = _HEAD.size + 4 + _PORTS.size + _REST.size + 16
_LEAST = _INODE_AT + 4
_LISTENS = 10  # TCP_LISTEN, linux/tcp_states.h
ANSWER_S = 1.0  # the kernel answers at once
_INODE, _LOCAL, _REMOTE = 9, 1, 2  # columns of /proc/net/tcp
_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address that is written as IPv6


class _Link(NamedTuple):
    """A connection as seen from one end."""

    family: int
    local: tuple[bytes, int]  # address, 16 bytes, and port
    remote: tuple[bytes, int]
    interface: int  # of link-local addresses, else 0

    @property
    def reversed(self) -> _Link:
        """The connection as seen from the other end."""
        return self._replace(local=self.remote, remote=self.local)


def peers_of(descriptors: Iterable[int]) -> dict[int, int]:
    """Of those that are TCP connections within this machine, the other ends' inodes."""
    links = {fd: link for fd in descriptors if (link := _link(fd)) is not None}
    found = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as kernel:
            kernel.settimeout(ANSWER_S)
            for fd, link in links.items():
                # it says the same of what it cannot know and of what is not there: it must know us
                if not _ask(kernel, link):
                    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))  # noqa: TRY301
                if inode := _ask(kernel, link.reversed):
                    found[fd] = inode
    except OSError:  # a sandbox, a kernel without it, a socket bound to a device
        return _from_tables(links)
    return found


def _link(descriptor: int) -> _Link | None:
    """``None``: it is no TCP connection, or none any more."""
    try:
        # with a type of ours, lest Python make it non-blocking for all who have it, for the sake
        # of a script's socket.setdefaulttimeout
        end = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=descriptor)
    except OSError:
        return None
    try:
        family, kind = end.family, end.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        if kind != socket.SOCK_STREAM or family not in {socket.AF_INET, socket.AF_INET6}:
            return None
        local, remote = end.getsockname(), end.getpeername()
    except OSError:
        return None
    finally:
        end.detach()  # it is not ours to close
    interface = local[3] if family == socket.AF_INET6 else 0
    ends = [
        (socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0"), port)
        for address, port, *_ in (local, remote)
    ]
    return _Link(family, ends[0], ends[1], interface)


def _ask(kernel: socket.socket, link: _Link) -> int:
    """The inode of the end that is local to the connection; 0: it is nobody's on this machine.

    Raises:
        OSError: the kernel does not tell.
    """
    (address, port), (other, other_port) = link.local, link.remote
    asked = b"".join(
        (
            _ASKED.pack(link.family, socket.IPPROTO_TCP, 0, 0, _ANY),
            _PORTS.pack(port, other_port, address, other),
            _REST.pack(link.interface, _ANY, _ANY),
        )
    )
    kernel.send(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST, 0, 0) + asked)
    answer = kernel.recv(8192)
    kind = _HEAD.unpack_from(answer)[1]
    if kind == _ERROR:
        code = -struct.unpack_from("=i", answer, _HEAD.size)[0]
        if code == errno.ENOENT:
            return 0
        raise OSError(code, os.strerror(code))
    if kind != _BY_FAMILY or len(answer) < _LEAST:
        raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
    if answer[_STATE_AT] == _LISTENS:  # where there is no connection: to any address of its port
        return 0
    return int(struct.unpack_from("=I", answer, _INODE_AT)[0])


def _from_tables(descriptors: Iterable[int]) -> dict[int, int]:
    ends: dict[int, tuple[str, ...]] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as file:
            next(file, None)  # the head
            for line in file:
                words = line.split(maxsplit=_INODE + 1)
                pair = words[_LOCAL], words[_REMOTE]
                ends[int(words[_INODE])] = tuple(end.removeprefix(_MAPPED) for end in pair)
    owners = {pair: inode for inode, pair in ends.items()}
    found = {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError, KeyError):  # closed meanwhile; not on this machine
            local, remote = ends[os.fstat(descriptor).st_ino]
            found[descriptor] = owners[remote, local]
    return found
