"""A rank's own files of a checkpoint, and what it says of them to rank 0.

Standard library only. Ranks agree through files in the unfinished folder, whose name is that of
this life of the training, so that nothing an earlier life has left there is mixed in: each says
``rank_N.part.json`` when its files are on the disk, or ``rank_N.failed.json``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder
from worker_hooks.contract.atomic_file import describe_os_error, write_atomic
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.storage import commit, shard_file
from worker_hooks.storage.checksum import Bytes
from worker_hooks.storage.manifest import COPY, Shard
from worker_hooks.storage.safetensors_file import sha256_of

Advance = Callable[[int], None]


class Content(Protocol):
    """The bytes that an order is about."""

    def state(self) -> Iterator[tuple[Bytes, bool]]:
        """All of the replicated state in order, and whether it belongs to this rank's share."""

    def buffers(self) -> Sequence[Bytes]:
        """What ends the share's file."""

    def payload(self) -> bytes:
        """The private state."""


class RankPart(NamedTuple):
    """What a rank has written."""

    step: int
    shards: tuple[Shard, ...]
    digest: str  # of the replicated state; empty: it was not looked at


def carry_out(order: SaveOrder, content: Content, advance: Advance) -> None:
    """Write this rank's files, and say so.

    Raises:
        CheckpointError: they could not be written, and rank 0 will know.
    """
    layout, rank = order.layout, order.rank
    try:
        done = _written(order, content, advance)
        shards = [shard._asdict() for shard in done.shards]
        _tell(layout.unfinished / layout.part(rank), {**done._asdict(), "shards": shards})
    except (OSError, ValueError) as error:
        why = words(error)
        with contextlib.suppress(OSError):
            _tell(failed(layout, rank), {"why": why})
        raise CheckpointError(f"{layout.folder} cannot be saved: {why}") from error


def read(layout: CheckpointLayout, rank: int) -> RankPart | None:
    """What a rank has written; ``None``: it has not said so yet.

    Raises:
        CheckpointError: it said that it cannot.
    """
    try:
        fields = json.loads((layout.unfinished / layout.part(rank)).read_bytes())
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError, KeyError):
            why = json.loads(failed(layout, rank).read_bytes())["why"]
            raise CheckpointError(f"{layout.folder} cannot be saved: rank {rank}: {why}") from None
        return None
    shards = tuple(Shard(**shard) for shard in fields["shards"])
    return RankPart(fields["step"], shards, fields["digest"])


def failed(layout: CheckpointLayout, rank: int) -> Path:
    """Where a rank says that it cannot."""
    return layout.unfinished / f"rank_{rank}.failed.json"


def words(error: Exception) -> str:
    """An error as a part of a sentence."""
    if not isinstance(error, OSError):
        return str(error) or repr(error)
    return describe_os_error(error)


def _written(order: SaveOrder, content: Content, advance: Advance) -> RankPart:
    layout, rank = order.layout, order.rank
    folder = layout.unfinished
    commit.make_durable(folder.parent)
    folder.mkdir(exist_ok=True)
    for said in (folder / layout.part(rank), failed(layout, rank)):
        said.unlink(missing_ok=True)  # of a first try at this very step
    shards, digest = [], ""
    if order.share is not None:
        file = layout.shard(rank)
        (folder / file).parent.mkdir(exist_ok=True)
        share = order.share
        head = share.head.encode("latin-1")
        done = shard_file.write(
            folder / file,
            head,
            share.seed,
            content.state(),
            content.buffers(),
            advance,
            is_whole=share.parts == 1,
        )
        # which of several whole models is gone on from is rank 0's to say
        shards.append(Shard(file, rank, COPY, done.nbytes, done.sha256))
        digest = done.digest
    if order.own is not None:
        record = order.own.record(content.payload())
        shards.append(commit.write_private(folder, rank, order.own.entries, record, advance))
    if order.rules.is_read_back:
        for shard in shards:
            _compare(folder, shard, advance)
    return RankPart(order.step, tuple(shards), digest)


def _compare(folder: Path, shard: Shard, advance: Advance) -> None:
    """Read a file from the disk, not from the memory that the kernel keeps it in."""
    path = folder / shard.file
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if sha256_of(path, advance) != shard.sha256:
        raise OSError(errno.EIO, "what was read back is not what was written", str(path))


def _tell(path: Path, fields: dict[str, object]) -> None:
    write_atomic(path, json.dumps(fields).encode(), durable=False)
