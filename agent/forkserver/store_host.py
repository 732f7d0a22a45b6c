"""The store host: torch's TCPStore on a socket that the agent bound, in its own process.

No rank hosts the store, so any rank may die. Every attempt gets a new store, so no restarted rank
reads the address of a dead one.
"""

from __future__ import annotations

import os
import signal
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from agent.forkserver.store_host import main; main()"
)


def become(fd: int, host: str, port: int) -> None:
    """Become the store host: here if torch is loaded, else in a fresh interpreter."""
    if "torch" in sys.modules:
        serve(fd, host, port)
    os.set_inheritable(fd, True)
    argv = [sys.executable, "-c", _START, _ROOT, str(fd), host, str(port)]
    os.execv(sys.executable, argv)


def serve(fd: int, host: str, port: int) -> None:
    """Serve until killed.

    Args:
        fd: a listening socket; connections may be waiting.
        host: the address the socket is bound to.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public by its docs

    kept = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=fd)
    while kept is not None:
        signal.pause()


def main() -> None:
    """Run in a fresh interpreter; ``argv``: the folder of our packages, descriptor, host, port."""
    serve(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
