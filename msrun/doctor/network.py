"""How ranks find each other: the loopback, ports, and the name of this host."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from msrun.doctor.finding import Finding, doubtful, fine, unfit
from msrun.doctor.probe import Probe, ProbeAnswer
from worker_hooks.machine.kernel_files import text

LIMIT_S = 10.0
FEW_PORTS = 1000
LOOPBACK = "127.0.0.1"
_CODE = """
import socket
name = socket.gethostname()
print(name, *sorted({each[4][0] for each in socket.getaddrinfo(name, None)}))
"""


def name_probe() -> Probe:
    """Begin to look up the name of this host: a name server may not answer."""
    return Probe((sys.executable, "-I", "-S", "-c", _CODE), LIMIT_S)


def findings(name: ProbeAnswer, root: Path = Path("/")) -> Iterator[Finding]:
    """All of it; ``name`` is the probe's answer, and ``root`` holds ``proc``."""
    yield loopback()
    yield ports(text(root / "proc/sys/net/ipv4/ip_local_port_range"))
    yield own_name(name, socket.gethostname())


def loopback() -> Finding:
    """Whether two sockets of this machine reach each other on a free port."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(LIMIT_S)
            address = server.getsockname()
            with socket.create_connection(address, LIMIT_S):
                server.accept()[0].close()
    except OSError as error:
        advice = "bring it up: ip link set lo up"
        return unfit("loopback", f"{LOOPBACK}: {error.strerror or error}", advice)
    return fine("loopback", f"{LOOPBACK} connects, port {address[1]} was free")


def ports(text: str) -> Finding:
    """Those that the kernel gives to connections."""
    words = text.split()
    if len(words) != 2 or not all(map(str.isdecimal, words)):  # noqa: PLR2004
        return fine("ports", "the range is not known")
    low, high = map(int, words)
    found = f"{low}-{high}"
    if high - low < FEW_PORTS:
        advice = "widen it: sysctl net.ipv4.ip_local_port_range; gloo connects each rank to each"
        return doubtful("ports", found, advice)
    return fine("ports", found)


def own_name(answer: ProbeAnswer, name: str) -> Finding:
    """Gloo and NCCL take the address of the host's name unless they are told an interface."""
    advice = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
    if answer.code is None:
        found = f"{name} was not resolved within {LIMIT_S:.0f} s"
        return doubtful("host name", found, f"a name server does not answer: {advice}")
    if answer.code != 0:
        return doubtful("host name", f"{name} does not resolve", advice)
    return fine("host name", " ".join(answer.out.split()))
