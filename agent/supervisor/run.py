"""Puts a run together, runs it to its end, tells how it ended, and takes it apart again."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from agent.controller.job import Job
from agent.controller.states import JobState
from agent.launch import rank_plan
from agent.launch.prepare import Prepared, StartedForkserver
from agent.machine import open_files
from agent.machine.oom_kills import read_counters
from agent.records import run_record
from agent.records.journal import Journal
from agent.records.run_record import remembered
from agent.records.worker_output import WorkerOutput
from agent.spec import timeouts
from agent.spec.console import Console
from agent.spec.job_spec import JobSpec
from agent.spec.run_facts import RunFacts
from agent.supervisor.ending import RunEnding
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.requests import Requests
from agent.supervisor.status import status
from agent.supervisor.supervisor import Supervisor
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract.layout import FALLBACK
from worker_hooks.contract.protocol import WorkerOrder

if TYPE_CHECKING:
    from agent.failure.post_mortem import (
        PostMortem,  # what a failure needs is imported when there is one
    )
    from agent.failure.resume_advice import ResumeAdvice

FILES_PER_RANK = 5  # its line and its status page; its share of a checkpoint in memory, twice
SWITCH_S = 0.0005  # that the loop waits at most for the thread that shows what workers write
CONSOLE_PATIENCE_S = 10.0  # for a console that takes nothing: the lines are in the files


def run(
    prepared: Prepared, ignited: StartedForkserver, environ: Mapping[str, str], console: Console
) -> int:
    """Run a job whose forkserver is at work to its end; the exit code."""
    spec, layout, forkserver = prepared.spec, prepared.layout, ignited.forkserver

    def plan(attempt: int, resumes: bool = False) -> tuple[WorkerOrder, ...]:
        return rank_plan.plan_ranks(
            spec, layout, attempt, environ, prepared.bindings, resumes=resumes
        )

    facts = RunFacts(spec, layout, socket.gethostname(), time.time(), plan)
    kept = None if spec.logs.disabled else layout
    journal = Journal(kept, console.say, _echo(spec, console))
    warm = "warm" if forkserver.warmth else "cold"
    journal.log(f"msrun {spec.record_id}: {sys.argv}")
    journal.log(f"workers start {warm}: {ignited.choice.reason}")
    journal.log(timeouts.describe(spec))
    record = _record(prepared, facts, environ)
    keep_place = _write_record(prepared, record, journal)
    verdict = Verdict(facts)
    output = WorkerOutput(spec, layout, journal, console.progress)
    starter = Starter(forkserver, prepared.listener, journal, console.say, ignited.ordered)
    fallback = spec.dump.fallback or layout.folder / FALLBACK
    safeguard = HooksBridge(
        spec, fallback, ignited.hooks_listener, journal, console.say, keep_place
    )
    notes = prepared.records_folder / spec.record_id
    requests = Requests(spec, notes, facts.started, console.say)
    sys.setswitchinterval(SWITCH_S)
    open_files.allow_files(FILES_PER_RANK * spec.nproc)

    def changed(job: Job, workers: tuple[Worker, ...]) -> None:
        journal.replace(layout.status, status(facts, job, workers))

    def attempt_ended(state: JobState, workers: tuple[Worker, ...]) -> None:
        if state is not JobState.SUCCEEDED:
            journal.log(verdict.examine(workers))

    parts = starter, safeguard, requests, output, journal
    supervisor = Supervisor(spec, plan, *parts, console.say, changed, attempt_ended)
    ending = supervisor.run()
    if not output.close(CONSOLE_PATIENCE_S):
        console.say(f"the console takes no more output; all of it is in {layout.folder}")
    closing = _closing(ending, prepared, record, environ)
    is_told = ending.state is JobState.STOPPED and verdict.found_failure
    if ending.state is JobState.FAILED or is_told:
        console.report(verdict.tell(ending.reason, environ, journal, closing))
    if ending.state is JobState.STOPPED:
        console.say(ending.reason)
    if closing is not None and (closing.kept or ending.state is JobState.FAILED):
        console.report(closing.text)
        journal.log(closing.text)
    journal.log(f"exit {ending.exit_code}: {ending.reason}")
    journal.close()
    prepared.listener.close()
    ignited.hooks_listener.close()
    os.close(prepared.lock)
    if prepared.claim is not None:
        os.close(prepared.claim)
    return ending.exit_code


def _echo(spec: JobSpec, console: Console) -> Callable[[str], None] | None:
    return console.report if spec.event_log_handler == "console" else None


class Verdict:
    """The coroner, fetched only when somebody died: most runs never need one."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._counters = read_counters()
        self._coroner: PostMortem | None = None

    def examine(self, workers: tuple[Worker, ...]) -> str:
        """One sentence on an attempt that did not succeed."""
        if self._coroner is None:
            from agent.failure.post_mortem import PostMortem

            self._coroner = PostMortem(self._facts, self._counters)
        return self._coroner.examine(workers) or "no process failed by itself"

    @property
    def found_failure(self) -> bool:
        """Whether a process of the last attempt failed by itself."""
        return self._coroner is not None and self._coroner.found

    def tell(
        self,
        reason: str,
        environ: Mapping[str, str],
        journal: Journal,
        closing: ResumeAdvice | None,
    ) -> str:
        """Write the last attempt's failure down; the text for people."""
        assert self._coroner is not None
        return self._coroner.tell(reason, environ, journal, closing)


def _closing(
    ending: RunEnding, prepared: Prepared, record: run_record.Record, environ: Mapping[str, str]
) -> ResumeAdvice | None:
    """What is saved of a job that did not succeed; ``None`` if nothing was ever to be."""
    spec = prepared.spec
    guarded = ending.has_hooks or ending.saved is not None
    if ending.state is JobState.SUCCEEDED or not guarded:
        return None
    from agent.failure.resume_advice import resume_advice

    known = run_record.read(prepared.records_folder / spec.record_id) or record
    told = ending.saved, ending.lost, known, environ
    return resume_advice(
        *told, is_away=spec.is_away, gave_up=ending.gave_up, not_replaced=ending.not_replaced
    )


def _record(prepared: Prepared, facts: RunFacts, environ: Mapping[str, str]) -> run_record.Record:
    """What other msruns are told of this one."""
    spec = prepared.spec
    resume = spec.dump.resume
    return run_record.Record(
        record_id=spec.record_id,
        run_id=spec.run_id,
        pid=os.getpid(),
        born=run_record.birth(os.getpid()) or 0,
        log_dir=str(prepared.layout.folder),
        argv=(sys.argv[0], *spec.argv),
        cwd=os.getcwd(),
        started=facts.started,
        checkpoints=() if resume is None else (str(resume.parent),),
        environ=remembered(environ),
        lineage=spec.dump.lineage,
    )


def _write_record(
    prepared: Prepared, record: run_record.Record, journal: Journal
) -> Callable[[str], None]:
    """Tell other msruns of this one; the answer adds a folder that the run saves into."""
    try:
        run_record.write(prepared.records_folder, record)
    except OSError as error:
        journal.trouble(prepared.records_folder, error)
    kept = [record]

    def keep_place(path: str) -> None:
        kept[0] = run_record.add_checkpoints(prepared.records_folder, kept[0], path)

    return keep_place
