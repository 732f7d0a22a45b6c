"""The network interfaces of this machine."""

from __future__ import annotations


def interface_of(address: str) -> str:
    """The network interface that has this address; empty: none is known to."""
    import psutil  # only here: a job of one node starts without it

    wanted = address.removeprefix("::ffff:").partition("%")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == wanted for each in addresses):
            return str(name)
    return ""
