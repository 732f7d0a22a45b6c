"""Collects what ``msrun top`` shows from files and shared memory, without asking the job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agent.controller.states import RankState
from agent.records.run_record import Record, successor
from msrun.runs.cost import PastIncident
from msrun.runs.json_lines import JsonLines
from msrun.runs.run_state import ALIVE, LOST, LastStatus, RunState, WorkerState, look
from msrun.runs.status import script, uptime
from msrun.top.checkpoints import Checkpoints
from msrun.top.columns import size
from msrun.top.facts import NS, JobFacts, RankFacts
from msrun.top.gpu import Gpus, GpuUse
from msrun.top.history import EventHistory
from msrun.top.processes import STOPPED, ProcessLoads, ShadowUse, sample, shadows
from msrun.top.status_pages import OpenPages, PageFacts
from worker_hooks.contract.layout import EVENTS

HUNG, SLOW, SUSPENDED = "hung", "slow", "suspended"  # of ranks that status.json calls running
NO_GPU = GpuUse(None, None)


class RunSample(NamedTuple):
    """What is read of a run at one moment."""

    run: RunState
    pages: Mapping[int, PageFacts]
    gpus: Mapping[int, GpuUse]
    history: EventHistory
    now_ns: int  # monotonic


class Gatherer:
    """Reads one run repeatedly."""

    def __init__(self, environ: Mapping[str, str], record: Record) -> None:
        """``record``: of the run."""
        self._environ, self._record = environ, record
        self._script = script(record)
        self._pages = OpenPages(record.pid)
        self._gpus = Gpus()
        self._loads = ProcessLoads()
        self._events: JsonLines | None = None
        self._history = EventHistory()
        self._checkpoints = Checkpoints(environ, record)
        self._told: dict[int, tuple[int | None, int]] = {}  # rank -> step, since when, monotonic ns

    def look(self, *, gpu_wait_s: float = 0.0) -> tuple[RunState, JobFacts]:
        """The run as it is now, and the facts to show.

        ``gpu_wait_s``: how long to wait for the first figures of GPUs, if there are any.
        """
        run = look(self._record)
        seen = RunSample(
            run=run,
            pages=self._pages.look(),
            gpus=self._gpus.use(gpu_wait_s),
            history=self._read_events(run.folder),
            now_ns=time.monotonic_ns(),
        )
        return run, self._job(seen)

    def following(self) -> Record | None:
        """The run that its msrun goes on with; ``None``: none."""
        return successor(self._environ, self._record)

    def close(self) -> None:
        """Close pages, files and threads."""
        self._pages.close()
        self._gpus.close()
        if self._events is not None:
            self._events.close()

    def _read_events(self, folder: Path) -> EventHistory:
        """The history up to now, or up to the last time that the file could be read."""
        if self._events is None:
            self._events = JsonLines(folder / EVENTS)
        with contextlib.suppress(OSError):
            for event in self._events.new():
                # one of another version is skipped
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    self._history = self._history.after(event)
        return self._history

    def _job(self, seen: RunSample) -> JobFacts:
        run, now, saved = seen.run, time.time(), self._checkpoints.newest()
        workers = run.status.workers if run.status else _workers_of(seen.pages)
        return JobFacts(
            run=run.record.record_id,
            script=self._script,
            state=run.state,
            uptime=uptime(run, now),
            ranks=tuple(
                self._rank(seen, worker) for worker in sorted(workers, key=lambda one: one.rank)
            ),
            counts=_counts(run.status),
            shadows=self._shadows(run),
            incident=_incident(run.status),
            history=seen.history,
            resumed=self._checkpoints.record.resumed_step,
            checkpoint=saved,
            now=now,
            is_over=not run.alive,
        )

    def _shadows(self, run: RunState) -> str:
        """How many sleeping copies of ranks there are, and their memory; empty: none."""
        found = shadows(self._record.pid) if run.alive else ShadowUse()
        several = "s" * (found.processes > 1)
        return f"{found.processes} shadow{several} {size(found.nbytes)}" if found.processes else ""

    def _rank(self, seen: RunSample, worker: WorkerState) -> RankFacts:
        is_alive = worker.state in ALIVE and seen.run.alive
        state = LOST if worker.state in ALIVE and seen.run.lost else worker.state
        if is_alive and (worker.rank in seen.history.slow or worker.is_slow):
            state = SLOW
        if is_alive and worker.rank in seen.history.hung:
            state = HUNG
        facts = RankFacts(worker.rank, worker.pid, state)
        if not self._record.has_rank(worker.rank):
            return facts.as_told(worker, self._standing_s(seen, worker) if is_alive else None)
        page = seen.pages.get(worker.rank)
        if page is not None and (page.is_held or not is_alive):  # else an earlier process wrote it
            facts = facts.with_page(page.beat, page.paces, seen.now_ns if is_alive else None)
        if not is_alive or worker.pid is None or (now := sample(worker.pid)) is None:
            return facts
        gpu = seen.gpus.get(worker.pid, NO_GPU)
        return facts._replace(
            state=SUSPENDED if now.state == STOPPED else state,
            rss_bytes=now.rss_bytes,
            cpu_percent=self._loads.percent(worker.pid, now),
            gpu_bytes=gpu.nbytes,
            gpu_percent=gpu.percent,
        )

    def _standing_s(self, seen: RunSample, worker: WorkerState) -> float:
        """For how long a rank of another node is at its step, as far as these looks can tell."""
        step, since_ns = self._told.get(worker.rank, (worker.step, seen.now_ns))
        if step != worker.step:
            since_ns = seen.now_ns
        self._told[worker.rank] = worker.step, since_ns
        return (seen.now_ns - since_ns) * NS


def _counts(status: LastStatus | None) -> tuple[str, ...]:
    """Attempt, restarts, replaced ranks, and whether a rank's death costs anything."""
    if status is None:
        return ()
    level = status.protection.partition(":")[0]
    return (*status.counts, level) if level else status.counts


def _incident(status: LastStatus | None) -> PastIncident | None:
    """The last one, if any."""
    return status.cost.last[-1] if status and status.cost and status.cost.last else None


def _workers_of(pages: Mapping[int, PageFacts]) -> list[WorkerState]:
    """The ranks of a run without a ``status.json`` (``--log-dir /dev/null``), from their pages."""
    return [
        WorkerState(
            rank=rank,
            local_rank=rank,
            pid=None,
            state=RankState.RUNNING.value,
            attempt=page.attempt,
            started=None,
            ended=None,
            exit="",
            log="",
        )
        for rank, page in pages.items()
    ]
