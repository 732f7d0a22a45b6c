"""Shows that a rank's process exists, to peers that have no agent to ask.

Each rank locks its own byte of a file in memory, which the agent made and only processes of this
user can open. The kernel drops a lock the moment its process is gone, also while children that
inherited the descriptor live on. It costs nothing until a peer looks. (Names in the abstract
namespace of sockets can be seen by other users, and taken by them once their owner is dead.)
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct

log = logging.getLogger("msrun")

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid


class LivenessLock:
    """The lock of one rank."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        """Take the lock; without it, this rank counts as alive to itself only.

        Args:
            path: of the file in memory; empty: there is none.
            rank: the byte to lock.
            world_size: the count of all bytes.
        """
        self._rank, self._world_size = rank, world_size
        self._fd = -1
        if not path:
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except BlockingIOError:
            log.warning("msrun: another process has the place of rank %d", rank)
        except OSError as error:
            log.warning("msrun: peers cannot see whether rank %d is alive: %s", rank, error)

    def live_ranks(self) -> set[int]:
        """The ranks of this run on this host whose processes exist; all, if that is unknown."""
        if self._fd < 0:
            return set(range(self._world_size))
        others = (rank for rank in range(self._world_size) if self._is_held(rank))
        return {self._rank, *others}

    def _is_held(self, rank: int) -> bool:
        """Whether another process has the lock of this rank."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_GETLK, wanted)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the file; in a forked child the parent's lock stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
