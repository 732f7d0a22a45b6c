"""Gathers what ``msrun top`` shows from what is there anyway: files, memory. Nobody is asked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from agent.controller.states import RankState
from agent.records.run_record import Record
from msrun.runs.run_state import ALIVE, LOST, RunState, WorkerState, look
from msrun.runs.status import script, uptime
from msrun.top.checkpoints import Checkpoints
from msrun.top.events import Events
from msrun.top.facts import JobFacts, RankFacts
from msrun.top.gpu import Gpus, GpuUse
from msrun.top.history import EventHistory
from msrun.top.processes import STOPPED, ProcessLoads, sample
from msrun.top.status_pages import OpenPages, PageFacts

HUNG, SLOW, SUSPENDED = "hung", "slow", "suspended"  # of ranks that status.json calls running
NO_GPU = GpuUse(None, None)


class RunSample(NamedTuple):
    """All that is read at one moment, of which ranks are told."""

    run: RunState
    pages: Mapping[int, PageFacts]
    gpus: Mapping[int, GpuUse]
    history: EventHistory
    now_ns: int  # monotonic


class Gatherer:
    """Looks at one run again and again."""

    def __init__(self, environ: Mapping[str, str], record: Record) -> None:
        """``record``: of the run."""
        self._record = record
        self._script = script(record)
        self._pages = OpenPages(record.pid)
        self._gpus = Gpus()
        self._loads = ProcessLoads()
        self._events = Events()
        self._checkpoints = Checkpoints(environ, record)

    def look(self, *, gpu_wait_s: float = 0.0) -> tuple[RunState, JobFacts]:
        """The run as it is now, and what is shown of it.

        ``gpu_wait_s``: how long to wait for the first answer of the GPUs, if there are any.
        """
        run = look(self._record)
        pages = self._pages.look()
        gpus = self._gpus.use(gpu_wait_s)
        seen = RunSample(run, pages, gpus, self._events.read(run.folder), time.monotonic_ns())
        return run, self._job(seen)

    def close(self) -> None:
        """Let go of everything."""
        self._pages.close()
        self._gpus.close()
        self._events.close()

    def _job(self, seen: RunSample) -> JobFacts:
        run, now = seen.run, time.time()
        word = run.status
        workers = word.workers if word else _unwritten(seen.pages)
        return JobFacts(
            run=run.record.record_id,
            script=self._script,
            state=run.state,
            uptime=uptime(run, now),
            ranks=tuple(
                self._rank(seen, worker) for worker in sorted(workers, key=lambda one: one.rank)
            ),
            counts=word.counts if word else (),
            history=seen.history,
            checkpoint=self._checkpoints.newest(),
            now=now,
            is_over=not run.alive,
        )

    def _rank(self, seen: RunSample, worker: WorkerState) -> RankFacts:
        lives = worker.state in ALIVE and seen.run.alive
        state = LOST if worker.state in ALIVE and seen.run.lost else worker.state
        facts = RankFacts(worker.rank, worker.pid, state)
        told = seen.pages.get(worker.rank)
        if told is not None and (told.is_held or not lives):  # else it is of a process that is gone
            facts = facts.telling(told.beat, told.paces, seen.now_ns if lives else None)
        if not lives or worker.pid is None or (now := sample(worker.pid)) is None:
            return facts
        if worker.rank in seen.history.slow:
            state = SLOW
        if worker.rank in seen.history.hung:
            state = HUNG
        gpu = seen.gpus.get(worker.pid, NO_GPU)
        return facts._replace(
            state=SUSPENDED if now.state == STOPPED else state,
            rss_bytes=now.rss_bytes,
            cpu_percent=self._loads.percent(worker.pid, now),
            gpu_bytes=gpu.nbytes,
            gpu_percent=gpu.percent,
        )


def _unwritten(pages: Mapping[int, PageFacts]) -> list[WorkerState]:
    """The ranks of a run that writes no files (``--log_dir /dev/null``), as their pages tell."""
    running = RankState.RUNNING.value
    return [
        WorkerState(rank, rank, None, running, told.attempt, None, None, "", "")
        for rank, told in pages.items()
    ]
