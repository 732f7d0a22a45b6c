"""A sign that a rank's process exists, for peers that have no agent to ask.

A bound socket in Linux's abstract namespace: it is gone the moment its process is, leaves no file,
and costs nothing until somebody looks.
"""

from __future__ import annotations

import contextlib
import socket

from worker_hooks.contract.env import RankEnv


class LivenessSocket:
    """A rank's sign."""

    def __init__(self, env: RankEnv) -> None:
        """Light it; a name that is taken stays dark."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            self._socket.bind(_name(env, env.rank))

    def close(self) -> None:
        """Put it out, in a forked child for that child alone."""
        self._socket.close()


def live_ranks(env: RankEnv) -> set[int]:
    """The ranks of this run on this host whose processes exist."""
    found = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as looking:
        for rank in range(env.world_size):
            with contextlib.suppress(OSError):
                looking.connect(_name(env, rank))
                found.add(rank)
    return found


def _name(env: RankEnv, rank: int) -> str:
    return f"\0msrun-{env.record_id}-rank-{rank}"  # of any attempt: a rank may see several
