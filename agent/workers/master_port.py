"""The socket on MASTER_PORT: the agent binds it before anything starts, so no race loses the port.

The agent keeps it for the whole job. A store host gets a copy when the first worker connects; a
restart gives the same socket to a new store host, a replacement opens a second one.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping
from types import MappingProxyType

from agent.spec.job_spec import UsageError

OTHER_MACHINE = "it must be the first node's own, and the same on all nodes"
TAKEN_FOR_NODES = "choose another --master-port, the same on all nodes"
CURES = {
    errno.EADDRINUSE: "choose another --master-port, or leave it out and a free one is taken",
    errno.EADDRNOTAVAIL: "with one node leave it out or give a local address",
}
BACKLOG = 4096  # every rank may connect before the store host is up


def listen(host: str, port: int | None) -> socket.socket:
    """Bind and listen at MASTER_ADDR:MASTER_PORT.

    A loopback address is bound as it is. For any other address of this machine all addresses are
    bound, so that ``localhost`` works, too.

    Args:
        host: name or address of this machine.
        port: TCP port; ``None`` or 0: a free one.

    Raises:
        UsageError: the host does not resolve or is another machine, or the port is taken.
    """
    family, address = _resolve(host)
    wanted = port or 0
    try:
        if is_loopback(address[0]):
            return _bind(family, address[0], wanted)
        with contextlib.closing(_bind(family, address[0], 0)):  # proves that the address is ours
            pass
        return _bind_all(wanted)
    except OSError as error:
        raise UsageError(_why(error, host, wanted)) from error


def listen_for_nodes(host: str, port: int | None) -> socket.socket:
    """The same for other nodes: this host's own name may be a loopback address in its hosts file.

    Raises:
        UsageError: the host does not resolve or is another machine, or the port is taken.
    """
    family, address = _resolve(host)
    wanted = port or 0
    try:
        if host == "localhost" or is_loopback(host):
            return _bind(family, address[0], wanted)
        if not is_loopback(address[0]):
            with contextlib.closing(_bind(family, address[0], 0)):  # proves that it is ours
                pass
        return _bind_all(wanted)
    except OSError as error:
        cures = {errno.EADDRNOTAVAIL: OTHER_MACHINE, errno.EADDRINUSE: TAKEN_FOR_NODES}
        raise UsageError(_why(error, host, wanted, cures)) from error


def listen_in_reserve(host: str) -> socket.socket | None:
    """Where another node than the first could be found if it had to take the first one's part.

    A free port: who listens at the one where the nodes meet is taken for the first node.
    ``host``: the first node's; one that is this machine alone's is not left.
    """
    with contextlib.suppress(OSError):
        if host == "localhost" or is_loopback(host):
            return _bind(socket.AF_INET6 if ":" in host else socket.AF_INET, host, 0)
        return _bind_all(0)
    return None


def is_of_this_host(host: str) -> bool:
    """Whether a name or an address is this machine's; not as long as it does not resolve."""
    try:
        family, address = _resolve(host)
        with contextlib.closing(_bind(family, address[0], 0)):
            return True
    except (UsageError, OSError):
        return False


def why_unresolved(host: str) -> str:
    """Why a name is not known here yet, as a verb phrase; empty: it is, or never will be."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"does not resolve ({error.strerror})"
    except ValueError:  # no host can have such a name
        return ""
    return ""


def second_listener(listener: socket.socket) -> socket.socket:
    """A listener at the same address on a free port; ``listener`` itself if there is none."""
    try:
        if listener.family is socket.AF_INET6 and listener.getsockname()[0] == "::":
            return _bind_all(0)
        return _bind(listener.family, listener.getsockname()[0], 0)
    except OSError:
        return listener


def loopback_host(listener: socket.socket) -> str:
    """An address at which this machine itself reaches the socket."""
    address = str(listener.getsockname()[0])
    return "127.0.0.1" if address in {"::", "0.0.0.0"} else address  # noqa: S104  not bound here


def is_loopback(address: str) -> bool:
    """Whether an address is one of this machine alone."""
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _resolve(host: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise UsageError(
            f"--master-addr {host!r} does not resolve ({why}): give a name or address of this host"
        ) from error
    # IPv4 first: what `localhost` means to most scripts
    family, _, _, _, address = min(found, key=lambda info: info[0] is not socket.AF_INET)
    return family, (str(address[0]), 0)


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # connections of an earlier job may still be in TIME_WAIT; a live listener still refuses us
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    return _bind(socket.AF_INET, "0.0.0.0", port)  # noqa: S104  the user named an outer address


def _why(
    error: OSError, host: str, port: int, cures: Mapping[int, str] = MappingProxyType(CURES)
) -> str:
    cure = cures.get(error.errno or 0, "")
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is already in use: {cure}"
        case errno.EACCES:
            return f"port {port} needs privileges to bind: choose a --master-port above 1023"
        case errno.EADDRNOTAVAIL:
            return f"--master-addr {host} is not an address of this machine: {cure}"
        case _:
            return f"cannot listen on {host}:{port}: {error.strerror}"
