"""Several msruns of one node, as Open MPI starts one a rank: the first runs the ranks of all.

The others wait for its end, and end as it does. They find it by a socket's name, and wait in the
kernel's queue of who wants to connect: it costs the first one nothing before its own end.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import time

from agent.spec.job_spec import NotStartedError

_CODE = struct.Struct("!i")
_LAST_ONES_S = 10.0  # for those that have not begun to wait when the job is over
_RETRY_S = 0.05
_QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOST_EXIT = 1


def _address(team: str) -> str:
    return f"\0msrun-team-{os.getuid()}-{team}"


class Leader:
    """The first msrun of a node; the others wait for it from now on."""

    def __init__(self, team: str, followers: int) -> None:
        """Begin. ``team``: names the msruns that belong together.

        Raises:
            NotStartedError: another one is there.
        """
        self._followers = followers
        self._door = socket.socket(socket.AF_UNIX)
        try:
            self._door.bind(_address(team))
        except OSError as error:
            self._door.close()
            raise NotStartedError(
                f"another msrun leads those of {team} on this node ({error.strerror})"
            ) from error
        self._door.listen(followers)

    def dismiss(self, code: int) -> None:
        """The job is over: the others end with its exit code."""
        deadline = time.monotonic() + _LAST_ONES_S
        with self._door, contextlib.suppress(OSError):  # nobody comes any more
            for _ in range(self._followers):
                self._door.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, _ = self._door.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(_CODE.pack(code))


def follow(team: str, start_s: float | None) -> int:
    """Wait until the job of the first msrun of this node is over; its exit code.

    Whoever asks the msruns of a node to end asks the first as well, so signals are left to it.

    Args:
        team: as the first one's.
        start_s: how long it may take to start; ``None``: for ever.

    Raises:
        NotStartedError: it has not started.
    """
    for signum in _QUIET:
        signal.signal(signum, signal.SIG_IGN)
    with _reached(team, start_s) as link:
        answer = b""
        with contextlib.suppress(OSError):
            answer = link.recv(_CODE.size, socket.MSG_WAITALL)
    return _CODE.unpack(answer)[0] if len(answer) == _CODE.size else LOST_EXIT


def _reached(team: str, start_s: float | None) -> socket.socket:
    deadline = math.inf if start_s is None else time.monotonic() + start_s
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(_address(team))
        except OSError as error:
            link.close()  # nothing tells when a name in the abstract namespace appears
            if time.monotonic() > deadline:
                raise NotStartedError(
                    f"the first msrun of this node has not started within {start_s:g} s"
                ) from error
            time.sleep(_RETRY_S)
        else:
            return link
