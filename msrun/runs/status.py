"""``msrun status``: a run's state and its ranks as a table, or all runs, or JSON.

A pipe gets one line for each rank, however wide, without colours.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from agent.records.run_record import Record
from agent.spec.job_spec import UsageError
from agent.text.sanitize import sanitized
from agent.text.wording import lasting
from msrun.runs.cost import INCIDENT_COLUMNS, incident_rows
from msrun.runs.run_state import ALIVE, LOST, RunState, WorkerState
from msrun.terminal.stdout import put
from msrun.terminal.table import UNKNOWN, brief, moment, table

RUN_COLUMNS = ("run", "state", "pid", "workers", "started", "script", "logs")
RANK_COLUMNS = ("rank", "pid", "state", "attempt", "uptime", "exit")
PROGRESS_COLUMNS = ("step", "epoch")  # if ranks report them
TEMPO_COLUMNS = ("median", "p95")  # of the time of a step, once it is known


def show_run(run: RunState, now: float) -> None:
    """Print one run with its ranks."""
    lines = [f"{name:<8} {sanitized(value)}" for name, value in facts(run, now)]
    put("\n".join(lines) + "\n")
    if run.status and run.status.workers:
        rows = [rank_row(run, worker, now) for worker in run.status.workers]
        columns: tuple[str, ...] = RANK_COLUMNS
        if any(worker.step is not None for worker in run.status.workers):
            columns += PROGRESS_COLUMNS
            steps = [progress(worker) for worker in run.status.workers]
            rows = [(*row, *step) for row, step in zip(rows, steps, strict=True)]
        if any(worker.step_median_s is not None for worker in run.status.workers):
            columns += TEMPO_COLUMNS
            times = [(each.step_median_s, each.step_p95_s) for each in run.status.workers]
            rows = [(*row, *map(brief, pair)) for row, pair in zip(rows, times, strict=True)]
        put("\n" + table(columns, rows, styled="state"))
    if run.status and run.status.cost and (last := run.status.cost.last):
        put("\n" + table(INCIDENT_COLUMNS, incident_rows(last), styled="answer", wrapped={"cause"}))


def show_runs(runs: Iterable[RunState]) -> None:
    """Print all runs, a line each."""
    put(table(RUN_COLUMNS, [run_row(run) for run in runs], styled="state"))


def facts(run: RunState, now: float) -> Iterable[tuple[str, str]]:
    """What is shown of a run, by name."""
    record, status = run.record, run.status
    named = "" if record.run_id == record.record_id else f" (run id {record.run_id})"
    yield "run", record.record_id + named
    yield "state", run.state_words
    yield "msrun", f"pid {record.pid}" if run.alive else f"pid {record.pid} (ended)"
    if status:
        yield "attempt", ", ".join(status.counts).removeprefix("attempt ")
    if status and status.protection:
        yield "safety", status.protection
    if status and status.cost:
        yield "goodput", status.cost.words
    yield "uptime", f"{uptime(run, now)} (started {moment(record.started)})"
    if status and status.reason:
        yield "reason", status.reason
    if status and run.alive:
        for worker in status.workers:
            if worker.is_slow:
                yield "slow", straggler(status.workers, worker)
    if not run.alive and record.checkpoints:
        from agent.failure.resume_advice import newest_checkpoint  # rarely needed

        if (kept := newest_checkpoint(record)) is not None:
            yield "saved", f"step {kept.step}: {kept.path}"
            yield "resume", f"msrun --resume {record.record_id}"
    gone = "" if os.path.isdir(run.folder) else " (gone)"
    yield "logs", f"{run.folder}{gone}"
    yield "command", shlex.join(record.argv)


def uptime(run: RunState, now: float) -> str:
    """How long the run has lasted, as far as msrun knows."""
    if run.status and run.status.ended is not None:
        return lasting(run.status.ended - run.record.started)
    if run.alive:
        return lasting(now - run.record.started)
    if run.status:
        return f"{lasting(run.status.updated - run.record.started)} or more"
    return UNKNOWN


def rank_row(run: RunState, worker: WorkerState, now: float) -> tuple[str, ...]:
    """A rank's cells; a rank that was alive when msrun died is lost."""
    alive = worker.state in ALIVE
    last = worker.ended if worker.ended is not None else now if run.alive else None
    known = worker.started is not None and last is not None
    return (
        str(worker.rank),
        str(worker.pid or UNKNOWN),
        LOST if alive and run.lost else worker.state,
        str(worker.attempt),
        lasting((last or 0) - (worker.started or 0)) if known else UNKNOWN,
        worker.exit or UNKNOWN,
    )


def progress(worker: WorkerState) -> tuple[str, ...]:
    """A rank's step and epoch."""
    known = (worker.step, worker.epoch)
    return tuple(UNKNOWN if number is None else str(number) for number in known)


def straggler(workers: Sequence[WorkerState], slow: WorkerState) -> str:
    """Which rank is slow, and how much."""
    peers = [
        worker.step_own_median_s
        for worker in workers
        if worker is not slow and worker.step_own_median_s is not None
    ]
    peers_s = median(peers) if peers else None
    own = brief(slow.step_own_median_s)
    return f"rank {slow.rank} needs {own} a step without waiting, its peers {brief(peers_s)}"


def run_row(run: RunState) -> tuple[str, ...]:
    """A run's cells in the list of all."""
    return (
        run.record.record_id,
        run.state_words,
        str(run.record.pid),
        str(len(run.status.workers)) if run.status else UNKNOWN,
        moment(run.record.started),
        script(run.record),
        str(run.folder),
    )


def script(record: Record) -> str:
    """The run's script; its command line if a YAML file names the script."""
    from msrun.options.argv import scan

    argv = record.argv[1:]
    try:
        return scan(argv).script or shlex.join(argv)
    except UsageError:  # a record of another version
        return shlex.join(argv)


def as_json(run: RunState) -> dict[str, Any]:
    """Everything known about a run, for JSON."""
    shown = run.record._asdict()
    del shown["environ"]  # only a resume needs it
    return {
        **shown,
        "state": run.state,
        "state_words": run.state_words,
        "alive": run.alive,
        "folder": str(run.folder),
        "status": asdict(run.status) if run.status else None,
    }
