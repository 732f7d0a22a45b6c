"""The manifest of a dump: what is in the folder, and by which checksums to believe it.

Written last; a folder without one, or with one that does not fit its files, is trusted by nobody.
Standard library only: the agent reads and writes it, too.
"""

from __future__ import annotations

from typing import NamedTuple

FORMAT = 1


class Shard(NamedTuple):
    """One file. ``file`` is relative to the folder; ``kind`` is replicated or private."""

    file: str
    rank: int
    kind: str
    nbytes: int
    sha256: str
    variant: int = 0  # replicas that disagreed without a majority are all kept; 0 is gone on from


class Manifest(NamedTuple):
    """One dump. Steps and epochs as the script counts them; times are seconds since the epoch."""

    kind: str  # dump; later: checkpoint
    step: int
    epoch: int
    batch: int
    world_size: int
    attempt: int
    record_id: str
    reason: str
    saved_at: float
    shards: tuple[Shard, ...]
    digest: str = ""
    odd: tuple[int, ...] = ()
    without_private: tuple[int, ...] = ()  # ranks whose private state is lost
    stale_private: tuple[int, ...] = ()  # ranks whose private state is of an earlier step
    format: int = FORMAT
