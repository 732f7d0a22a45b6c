"""What one rank does for one checkpoint, as data that a process without torch can use."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.contract.protocol import runs_of
from worker_hooks.contract.status_page import CommitRecord, Entry

_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}
"""Errors of a disk that may be another one at the next checkpoint: it is full, or fails."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved; the message says why."""

    def __init__(self, why: str, *, is_passing: bool = False) -> None:
        """``is_passing``: the next one may be saved; training need not end for it."""
        super().__init__(why)
        self.is_passing = is_passing


def is_passing(error: Exception) -> bool:
    """Whether what raised this may succeed later, with nothing changed but the disk."""
    is_disk = isinstance(error, OSError) and error.errno in _PASSING
    return is_disk or (isinstance(error, CheckpointError) and error.is_passing)


class Share(NamedTuple):
    """The file of replicated state that the rank writes."""

    parts: int  # how many ranks write a part of the state; 1: this file has all of it
    head: str  # its header; one character for each byte
    seed: str  # of the digest
    spans: tuple[
        tuple[int, bool], ...
    ]  # the whole state: how many bytes, and whether this rank writes them
    buffers: int  # bytes that follow at the end of the file

    @property
    def nbytes(self) -> int:
        """The size of the state in bytes."""
        return sum(count for count, _ in self.spans)


class OwnShare(NamedTuple):
    """The rank's private state, without its bytes."""

    entries: tuple[Entry, ...]
    record: CommitRecord  # of the status page, without its payload
    nbytes: int  # of the payload


class SaveRules(NamedTuple):
    """What applies to every checkpoint of a training."""

    keep_max: int  # keep so many; 0: no such rule
    per_minutes: int  # keep one for each so many minutes; 0: no such rule
    is_read_back: bool
    stall_s: float  # without progress of any rank, until the checkpoint is given up


class SaveOrder(NamedTuple):
    """One rank's part in one checkpoint."""

    layout: CheckpointLayout  # with the incarnation of this training as record_id
    prefix: str  # of the complete folder; may be numbered
    step: int
    epoch: int  # as the script counts
    batch: int
    rank: int
    world_size: int
    attempt: int
    record_id: str
    lineage: str  # record ids of the runs that this one resumed, newest first, joined by ":"
    resumed_step: int  # of those runs, that this one began from
    reason: str
    groups: tuple[tuple[int, ...], ...]  # of ranks that hold different states; none: all hold one
    is_merged: bool  # the files of these groups become one, too
    share: Share | None
    own: OwnShare | None
    rules: SaveRules

    @property
    def runs(self) -> tuple[str, ...]:
        """The record ids of this run and of those that it resumed, which are over."""
        return (self.record_id, *runs_of(self.lineage))

    @property
    def final(self) -> CheckpointLayout:
        """The folder under its final prefix."""
        return self.layout._replace(prefix=self.prefix)


def encode(order: SaveOrder) -> str:
    """The order as one line of JSON."""
    layout = order.layout._replace(directory=str(order.layout.directory))  # type: ignore[arg-type]
    own = order.own
    if own is not None:
        bare = own.record._replace(meta=own.record.meta.decode(), payload="")  # type: ignore[arg-type]
        own = own._replace(record=bare)
    return json.dumps(order._replace(layout=layout, own=own))


def decode(text: str) -> SaveOrder:
    """The order again."""
    fields: list[Any] = json.loads(text)
    (directory, *names), *about, groups, is_merged, share, own, rules = fields
    if share is not None:
        parts, head, seed, spans, buffers = share
        spans = tuple((count, is_mine) for count, is_mine in spans)
        share = Share(parts, head, seed, spans, buffers)
    if own is not None:
        entries, bare, nbytes = own
        record = CommitRecord(*bare)
        record = record._replace(meta=str(record.meta).encode(), payload=b"")
        own = OwnShare(tuple(Entry(n, d, tuple(s), b) for n, d, s, b in entries), record, nbytes)
    layout = CheckpointLayout(Path(directory), *names)
    groups = tuple(map(tuple, groups))
    values: list[Any] = [layout, *about, groups, is_merged, share, own, SaveRules(*rules)]
    return SaveOrder(*values)
