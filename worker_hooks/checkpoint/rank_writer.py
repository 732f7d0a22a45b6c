"""A rank's own files of a checkpoint, and its report on them to rank 0.

Standard library only. Ranks communicate through files in the unfinished folder: each writes
``rank_N.part.json`` when its files are on the disk, or ``rank_N.failed.json``. The folder's name
contains the incarnation of the training, so that files of an earlier one are not mixed in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder, is_passing
from worker_hooks.contract.atomic_file import (
    FOLDER_MODE,
    describe_os_error,
    read_small,
    write_atomic,
)
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.storage import commit, shard_file
from worker_hooks.storage.checksum import Bytes
from worker_hooks.storage.manifest import COPY, Shard
from worker_hooks.storage.safetensors_file import sha256_of

Advance = Callable[[int], None]


class Content(Protocol):
    """The bytes to be written."""

    def state(self) -> Iterator[tuple[Bytes, bool]]:
        """The whole replicated state in order, and whether it belongs to this rank's share."""

    def buffers(self) -> Sequence[Bytes]:
        """The last bytes of the share's file."""

    def payload(self) -> bytes:
        """The private state."""


class RankPart(NamedTuple):
    """What a rank has written."""

    step: int
    shards: tuple[Shard, ...]
    digest: str  # of the replicated state; empty: this rank has not read it
    parts: int = 1  # of how many its file is one


def write_part(order: SaveOrder, content: Content, advance: Advance) -> None:
    """Write this rank's files, and report it to rank 0.

    Raises:
        CheckpointError: they could not be written; that is reported, too.
    """
    layout, rank = order.layout, order.rank
    try:
        done = _write_files(order, content, advance)
        shards = [shard._asdict() for shard in done.shards]
        _write_json(layout.unfinished / layout.part(rank), {**done._asdict(), "shards": shards})
    except (OSError, ValueError) as error:
        why, passes = describe_error(error) + _room(error, order), is_passing(error)
        own = (layout.unfinished / layout.shard(rank)).parent
        if isinstance(error, FileNotFoundError) and not own.exists():
            why, passes = "rank 0 could not write, and gave it up", True
        else:
            report_failure(failure_file(layout, rank), why, passes=passes)
        raise CheckpointError(
            f"{layout.folder} cannot be saved: {why}", is_passing=passes
        ) from error


def read_part(layout: CheckpointLayout, rank: int) -> RankPart | None:
    """What a rank has written; ``None``: it has not reported yet.

    Raises:
        CheckpointError: the rank has reported a failure.
    """
    try:
        fields = json.loads(read_small(layout.unfinished / layout.part(rank)))
    except (OSError, ValueError):
        raise_reported(layout, rank)
        return None
    shards = tuple(Shard(**shard) for shard in fields["shards"])
    return RankPart(fields["step"], shards, fields["digest"], fields["parts"])


def failure_file(layout: CheckpointLayout, rank: int) -> Path:
    """The file in which a rank reports a failure."""
    return layout.unfinished / f"rank_{rank}.failed.json"


def report_failure(path: Path, why: str, *, passes: bool) -> None:
    """Tell the other ranks that this one cannot write; where not even that has room, that alone."""
    try:
        _write_json(path, {"why": why, "is_passing": passes})
    except OSError:
        with contextlib.suppress(OSError):
            path.touch()


def raise_reported(layout: CheckpointLayout, rank: int) -> None:
    """Raise what a rank has reported, if it has.

    Raises:
        CheckpointError: it could not write.
    """
    try:
        content = read_small(failure_file(layout, rank))
    except OSError:
        return
    fields = {"why": "it had no room to say why", "is_passing": True}
    with contextlib.suppress(ValueError):
        fields |= json.loads(content)
    raise CheckpointError(
        f"{layout.folder} cannot be saved: rank {rank}: {fields['why']}",
        is_passing=bool(fields["is_passing"]),
    )


def _room(error: Exception, order: SaveOrder) -> str:
    """How much room there is and how much is needed, if that is what is wrong."""
    if not isinstance(error, OSError) or error.errno not in {errno.ENOSPC, errno.EDQUOT}:
        return ""
    needed = 0 if order.share is None else order.share.nbytes + order.share.buffers
    needed += 0 if order.own is None else order.own.nbytes
    try:
        disk = os.statvfs(order.layout.directory)
    except OSError:
        return ""
    free = disk.f_bavail * disk.f_frsize
    return f" ({needed / 1e6:.1f} MB to write, {free / 1e6:.1f} MB free)"


def describe_error(error: Exception) -> str:
    """An error as a part of a sentence."""
    if not isinstance(error, OSError):
        return str(error) or repr(error)
    return describe_os_error(error)


def _write_files(order: SaveOrder, content: Content, advance: Advance) -> RankPart:
    layout, rank = order.layout, order.rank
    folder = layout.unfinished
    commit.make_durable(folder.parent)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    for report in (folder / layout.part(rank), failure_file(layout, rank)):
        report.unlink(missing_ok=True)  # of an earlier try at this step
    shards, digest = [], ""
    if order.share is not None:
        file = layout.shard(rank)
        (folder / file).parent.mkdir(FOLDER_MODE, exist_ok=True)
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
        # rank 0 decides which of several whole models is the one to resume from
        shards.append(Shard(file, rank, COPY, done.nbytes, done.sha256))
        digest = done.digest
    if order.own is not None:
        record = order.own.record._replace(payload=content.payload())
        shards.append(commit.write_private(folder, rank, order.own.entries, record, advance))
    if order.rules.is_read_back:
        for shard in shards:
            _compare_with_disk(folder, shard, advance)
    parts = 1 if order.share is None else order.share.parts
    return RankPart(order.step, tuple(shards), digest, parts)


def _compare_with_disk(folder: Path, shard: Shard, advance: Advance) -> None:
    """Read a file from the disk, not from the kernel's page cache."""
    path = folder / shard.file
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if sha256_of(path, advance) != shard.sha256:
        raise OSError(errno.EIO, "what was read back is not what was written", str(path))


def _write_json(path: Path, fields: dict[str, object]) -> None:
    write_atomic(path, json.dumps(fields).encode(), durable=False)
