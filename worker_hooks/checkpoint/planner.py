"""Turns a rank's live state into a plan: what is to be written, and where the bytes are now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from worker_hooks.checkpoint.save_plan import CheckpointError, OwnShare, Share
from worker_hooks.contract.status_page import CommitRecord
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.tensors import shard
from worker_hooks.tensors.reader import Reader
from worker_hooks.tensors.shard import Replica, ShardPlan

APPENDED = "append_info"


class PlannedCheckpoint(NamedTuple):
    """What a rank contributes to a checkpoint, still in live memory."""

    share: Share | None
    own: OwnShare | None
    replica: Replica | None
    plan: ShardPlan | None
    payload_of: CommitRecord | None

    @property
    def nbytes(self) -> int:
        """The size of everything."""
        share = 0 if self.share is None else self.share.nbytes + self.share.buffers
        return share + (0 if self.own is None else self.own.nbytes)

    @property
    def tensors(self) -> list[Tensor]:
        """The replicated state in order."""
        return [] if self.plan is None else [segment for segment, _ in self.plan.segments]

    @property
    def octets(self) -> list[bytes | memoryview]:
        """What follows the state: buffers, and the private state."""
        return [*self.buffers(), self.payload()]

    # --- as rank_writer.Content, from live memory -----------------------------------------------

    def state(self) -> Iterator[tuple[memoryview, bool]]:
        """The replicated state in pieces."""
        if self.plan is not None and self.replica is not None:
            yield from self.plan.pieces(Reader(self.replica.access))

    def buffers(self) -> Sequence[memoryview]:
        """The last bytes of the share."""
        return () if self.plan is None else self.plan.buffers

    def payload(self) -> bytes:
        """The private state."""
        return b"" if self.payload_of is None else self.payload_of.payload


def plan_checkpoint(
    committed: CommittedState, step: int, part: tuple[int, int] | None, appended: Mapping[str, Any]
) -> PlannedCheckpoint:
    """What a rank contributes to a checkpoint.

    Args:
        step: the newest commit, or the next one if only the commit is missing.
        part: which part of the state, of how many; ``None``: another rank writes it.
        appended: the user's own data, as JSON.

    Raises:
        CheckpointError: the state as of this step cannot be saved.
    """
    committed.private.wait()  # a checkpoint has this commit's buffers, wherever they are
    record = None if committed.page is None else committed.page.record(step)
    own = None if record is None else _own(record, committed)
    if part is None:
        return PlannedCheckpoint(None, own, None, None, record)
    try:
        replica = committed.replica(step)
        metadata = {**replica.metadata, APPENDED: json.dumps(appended)} if appended else None
        replica = replica._replace(metadata=metadata or replica.metadata)
        plan = shard.plan(replica, *part)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"step {step} cannot be saved: {error}") from error
    spans = tuple((segment.nbytes, is_mine) for segment, is_mine in plan.segments)
    buffers = sum(map(len, plan.buffers))
    share = Share(part[1], plan.head.decode("latin-1"), plan.seed, spans, buffers)
    return PlannedCheckpoint(share, own, replica, plan, record)


def _own(record: CommitRecord, committed: CommittedState) -> OwnShare:
    assert committed.page is not None
    entries = tuple(committed.page.entries)
    return OwnShare(entries, record._replace(payload=b""), len(record.payload))
