"""Shows that a rank's process exists, to peers that have no agent to ask.

A bound socket in Linux's abstract namespace: it is gone the moment its process is, leaves no file,
and costs nothing until a peer looks.
"""

from __future__ import annotations

import contextlib
import socket

from worker_hooks.contract.env import RankEnv


class LivenessSocket:
    """The socket of one rank."""

    def __init__(self, env: RankEnv) -> None:
        """Bind the socket; if the name is taken, this rank stays invisible."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            self._socket.bind(_name(env, env.rank))

    def close(self) -> None:
        """Close the socket; in a forked child, for that child alone."""
        self._socket.close()


def live_ranks(env: RankEnv) -> set[int]:
    """The ranks of this run on this host whose processes exist."""
    found = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        for rank in range(env.world_size):
            with contextlib.suppress(OSError):
                probe.connect(_name(env, rank))
                found.add(rank)
    return found


def _name(env: RankEnv, rank: int) -> str:
    # without the attempt: a surviving rank lives through several
    return f"\0msrun-{env.record_id}-rank-{rank}"
