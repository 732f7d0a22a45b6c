"""Puts a run together, runs it to its end, tells how it ended, and takes it apart again."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent import ranks, records
from agent.controller import Job
from agent.facts import Facts
from agent.journal import Journal
from agent.launch import Ignited, Prepared
from agent.oom import read_counters
from agent.output import Output
from agent.spec import JobSpec
from agent.starter import Starter
from agent.state import JobState
from agent.status import status
from agent.supervisor import Supervisor
from agent.worker import Worker
from worker_hooks.protocol import WorkerOrder

if TYPE_CHECKING:
    from agent.failure import Coroner  # what a failure needs is imported when there is one

CONSOLE_PATIENCE_S = 10.0  # for a console that takes nothing: the lines are in the files


@dataclass(frozen=True, slots=True)
class Console:
    """How the command line shows things to people."""

    say: Callable[[str], None]  # one sentence on stderr
    report: Callable[[str], None]  # the failure report
    progress: Callable[[str], None]  # a passing word, on a terminal only


def run(prepared: Prepared, ignited: Ignited, environ: Mapping[str, str], console: Console) -> int:
    """Run a job whose forkserver is at work to its end; the exit code."""
    spec, layout, forkserver = prepared.spec, prepared.layout, ignited.forkserver

    def plan(attempt: int) -> tuple[WorkerOrder, ...]:
        return ranks.plan(spec, layout, attempt, environ, prepared.bindings)

    facts = Facts(spec, layout, socket.gethostname(), time.time(), plan)
    kept = None if spec.logs.disabled else layout
    journal = Journal(kept, console.say, _echo(spec, console))
    warm = "warm" if forkserver.warmth else "cold"
    journal.log(f"msrun {spec.record_id}: {sys.argv}")
    journal.log(f"workers start {warm}: {ignited.choice.reason}")
    _write_record(prepared, facts, journal)
    verdict = Verdict(facts)
    output = Output(spec, layout, journal, console.progress)
    starter = Starter(forkserver, prepared.listener, journal, console.say, ignited.ordered)

    def changed(job: Job, workers: tuple[Worker, ...]) -> None:
        journal.replace(layout.status, status(facts, job, workers))

    def attempt_ended(state: JobState, workers: tuple[Worker, ...]) -> None:
        if state is not JobState.SUCCEEDED:
            journal.log(verdict.examine(workers))

    supervisor = Supervisor(
        spec, plan, starter, output, journal, console.say, changed, attempt_ended
    )
    ending = supervisor.run()
    if not output.close(CONSOLE_PATIENCE_S):
        console.say(f"the console takes no more output; all of it is in {layout.folder}")
    if ending.state is JobState.FAILED or verdict.found_failure:
        console.report(verdict.tell(ending.reason, environ, journal))
    if ending.state is JobState.STOPPED:
        console.say(ending.reason)
    journal.log(f"exit {ending.exit_code}: {ending.reason}")
    journal.close()
    prepared.listener.close()
    os.close(prepared.lock)
    return ending.exit_code


def _echo(spec: JobSpec, console: Console) -> Callable[[str], None] | None:
    return console.report if spec.event_log_handler == "console" else None


class Verdict:
    """The coroner, fetched only when somebody died: most runs never need one."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._counters = read_counters()
        self._coroner: Coroner | None = None

    def examine(self, workers: tuple[Worker, ...]) -> str:
        """One sentence on an attempt that did not succeed."""
        if self._coroner is None:
            from agent.failure import Coroner

            self._coroner = Coroner(self._facts, self._counters)
        return self._coroner.examine(workers) or "no process failed by itself"

    @property
    def found_failure(self) -> bool:
        """Whether a process of the last attempt failed by itself."""
        return self._coroner is not None and self._coroner.found

    def tell(self, reason: str, environ: Mapping[str, str], journal: Journal) -> str:
        """Write the last attempt's failure down; the text for people."""
        assert self._coroner is not None
        return self._coroner.tell(reason, environ, journal)


def _write_record(prepared: Prepared, facts: Facts, journal: Journal) -> None:
    spec = prepared.spec
    record = records.Record(
        record_id=spec.record_id,
        run_id=spec.run_id,
        pid=os.getpid(),
        born=records.birth(os.getpid()) or 0,
        log_dir=str(prepared.layout.folder),
        argv=tuple(sys.argv),
        cwd=os.getcwd(),
        started=facts.started,
    )
    try:
        records.write(prepared.records_folder, record)
    except OSError as error:
        journal.trouble(prepared.records_folder, error)
