"""Which files hold the output of a run's ranks: worker logs, and torchrun's tree beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.records.log_view import LogView
from agent.spec.job_spec import UsageError
from msrun.runs.run_state import RunState, WorkerState, files, last_status
from worker_hooks.contract.layout import RunLayout

STREAMS = ("stdout", "stderr")
STDOUT = 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user wants to see."""

    rank: int | None = None  # None: all ranks, each line with its rank
    attempt: int | None = None  # None: the current one
    scheduler: bool = False  # msrun's own log instead of the workers'
    node: int | None = None  # of this node's msrun; None: of this one's


def views(run: RunState, wanted: Wanted, attempt: int, *, is_new: bool = False) -> list[LogView]:
    """The files of one attempt, by rank; some may not exist.

    ``is_new``: without the files of ranks whose process is older than the attempt.

    Raises:
        UsageError: there is no such rank.
    """
    if wanted.scheduler:
        node = run.record.node if wanted.node is None else wanted.node
        own = files(run.record._replace(node=node), run.folder)
        return [LogView(own.scheduler_log, STDOUT, None)]
    return [
        LogView(
            path, STDOUT, _prefix(worker.rank) if wanted.rank is None else None, rank=worker.rank
        )
        for worker in _workers(run, wanted)
        if not (is_new and worker.began < attempt == worker.attempt)
        for path in _files(run, worker, attempt)
    ]


def checked_attempt(run: RunState, wanted: Wanted) -> int:
    """The attempt to show: the one that the user names, else the current one.

    Raises:
        UsageError: there was no such attempt.
    """
    current = run.status.attempt if run.status else 0
    if wanted.scheduler:
        return 0  # one file for all attempts
    if wanted.attempt is None:
        return current
    if wanted.attempt > current:
        known = "only attempt 0" if current == 0 else f"attempts 0 to {current}"
        raise UsageError(
            f"run {run.record.record_id} has no attempt {wanted.attempt}: it has {known}"
        )
    return wanted.attempt


def is_shared(run: RunState) -> bool:
    """Whether this node sees the log folder of all: what node 0 writes is there.

    Node 0 sets the files of earlier runs aside; on other nodes the log of another node's rank may
    be that of another job.
    """
    record = run.record
    head = files(record._replace(record_id=record.saves_as, node=0), run.folder)
    return not record.job or last_status(head) is not None


def _prefix(rank: int) -> bytes:
    return f"[rank {rank}]: ".encode()


def _workers(run: RunState, wanted: Wanted) -> list[WorkerState]:
    workers = sorted(run.status.workers if run.status else (), key=lambda worker: worker.rank)
    if wanted.rank is None:
        is_of_all = is_shared(run)
        return [each for each in workers if is_of_all or run.record.has_rank(each.rank)]
    chosen = [worker for worker in workers if worker.rank == wanted.rank]
    if workers and not chosen:
        ranks = f"{workers[0].rank} to {workers[-1].rank}"
        raise UsageError(
            f"run {run.record.record_id} has no rank {wanted.rank}: its ranks are {ranks}"
        )
    return chosen


def _files(run: RunState, worker: WorkerState, attempt: int) -> Iterator[Path]:
    stem = Path(worker.log).name.removesuffix(f"_{worker.rank}.log")
    layout = RunLayout(run.folder, run.record.record_id, run.record.run_id, stem)
    if attempt == worker.attempt:
        yield layout.worker_log(worker.rank)
    else:
        yield layout.earlier_worker_log(worker.rank, attempt)
    # torchrun's tree stays in the log folder even if a later run moves the other files aside
    tree = RunLayout(Path(run.record.log_dir), run.record.record_id, run.record.run_id)
    for name in STREAMS:
        folder = worker.began if attempt == worker.attempt else attempt
        path = tree.stream(folder, worker.local_rank, name)
        if os.path.exists(path):
            yield path
