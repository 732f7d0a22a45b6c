"""What one rank does for one checkpoint, in words that a process without torch understands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.contract.status_page import CommitRecord, Entry


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved; the sentence says why."""


class Share(NamedTuple):
    """The file of replicated state that the rank writes."""

    parts: int  # how many ranks write a part of the state; 1: this file is all of it
    head: str  # its header, a byte a character
    seed: str  # of the digest
    spans: tuple[tuple[int, bool], ...]  # all of the state's bytes: how many, and whether written
    buffers: int  # bytes that follow, and are the file's last

    @property
    def nbytes(self) -> int:
        """Of the state."""
        return sum(count for count, _ in self.spans)


class OwnShare(NamedTuple):
    """The rank's private state, without its bytes."""

    entries: tuple[Entry, ...]
    step: int
    epoch: int
    batch: int
    at_ns: int
    meta: str
    nbytes: int
    is_commit: bool

    def record(self, payload: bytes) -> CommitRecord:
        """The page's record again."""
        meta = self.meta.encode()
        where = self.step, self.epoch, self.batch, self.at_ns
        return CommitRecord(*where, meta, payload, self.is_commit)


class SaveRules(NamedTuple):
    """What holds for every checkpoint of a training."""

    keep_max: int  # 0: no such rule
    per_minutes: int  # the same
    is_read_back: bool
    stall_s: float  # without progress of any rank, until it is given up


class SaveOrder(NamedTuple):
    """One rank's part in one checkpoint."""

    layout: CheckpointLayout  # its record_id is of this life of the training: see life
    prefix: str  # of the complete folder, which may be numbered
    step: int
    epoch: int  # as the script counts
    batch: int
    rank: int
    world_size: int
    attempt: int
    record_id: str
    ancestor: str  # the run that this one went on from, and that is over therefore; or empty
    reason: str
    share: Share | None
    own: OwnShare | None
    rules: SaveRules

    @property
    def final(self) -> CheckpointLayout:
        """The folder under its final prefix."""
        return self.layout._replace(prefix=self.prefix)


def encoded(order: SaveOrder) -> str:
    """The order as one line of JSON."""
    layout = order.layout._replace(directory=str(order.layout.directory))  # type: ignore[arg-type]
    return json.dumps(order._replace(layout=layout))


def decoded(text: str) -> SaveOrder:
    """The order again."""
    fields: list[Any] = json.loads(text)
    (directory, *names), *about, share, own, rules = fields
    if share is not None:
        parts, head, seed, spans, buffers = share
        spans = tuple((count, is_mine) for count, is_mine in spans)
        share = Share(parts, head, seed, spans, buffers)
    if own is not None:
        entries, *others = own
        own = OwnShare(tuple(Entry(n, d, tuple(s), b) for n, d, s, b in entries), *others)
    layout = CheckpointLayout(Path(directory), *names)
    values: list[Any] = [layout, *about, share, own, SaveRules(*rules)]
    return SaveOrder(*values)
