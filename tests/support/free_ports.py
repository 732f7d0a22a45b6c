"""Ports for programs that take a number: nobody else takes them meanwhile.

A port that the kernel has chosen and that is free again may be chosen by it once more before the
program has it, and the tests beside this one have many ports chosen.
"""

from __future__ import annotations

import itertools
import os
import re
import socket

FIRST, OF_ONE = 20_000, 600  # below those that Linux chooses from, 32768 and up
_next = itertools.count()


def free_port() -> int:
    """A port that is this process's own among all processes of a test run."""
    number = re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "0"))
    first = FIRST + OF_ONE * (int(number) % 20)
    while True:
        port = first + next(_next) % OF_ONE
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
