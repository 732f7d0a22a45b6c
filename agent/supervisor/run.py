"""Puts a run together, runs it to its end, reports how it ended, and takes it apart again."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from signal import SIGKILL
from typing import TYPE_CHECKING

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.controller.protection import Level, Protection
from agent.controller.states import JobState
from agent.failure.own_end import own_end_in
from agent.launch import rank_plan
from agent.launch.prepare import Prepared, StartedForkserver
from agent.launch.unprotected import unprotected
from agent.machine import open_files
from agent.machine.oom_kills import OomCounters, read_counters
from agent.notify.notifier import Notifier
from agent.records import run_record
from agent.records.journal import Journal
from agent.records.run_record import remembered, unrecorded
from agent.records.worker_output import WorkerOutput
from agent.spec import timeouts
from agent.spec.console import Console
from agent.spec.job_spec import JobSpec
from agent.spec.run_facts import RunFacts
from agent.supervisor.ending import RunEnding
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.job_controller import JobController
from agent.supervisor.requests import Requests
from agent.supervisor.status import status
from agent.supervisor.supervisor import Supervisor
from agent.text.tone import Tone
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract.layout import FALLBACK
from worker_hooks.contract.protocol import WorkerOrder

if TYPE_CHECKING:
    from agent.failure.post_mortem import (
        PostMortem,  # what a failure needs is imported when there is one
    )
    from agent.failure.resume_advice import ResumeAdvice

FILES_PER_RANK = 5  # its link and its status page; its share of a checkpoint in memory, twice
SWITCH_S = 0.0005  # how long the loop waits at most for the thread that shows workers' output
CONSOLE_PATIENCE_S = 10.0  # for a console that takes nothing: the lines are in the files


def run(
    prepared: Prepared, ignited: StartedForkserver, environ: Mapping[str, str], console: Console
) -> int:
    """Run a job whose forkserver is at work to its end; the exit code."""
    spec, layout, forkserver = prepared.spec, prepared.layout, ignited.forkserver

    def plan(
        attempt: int, resumes: bool = False, devices: tuple[str, ...] = ()
    ) -> tuple[WorkerOrder, ...]:
        bound = prepared.bindings
        return rank_plan.plan_ranks(
            spec, layout, attempt, environ, bound, resumes=resumes, devices=devices
        )

    host, began_s = socket.gethostname(), time.monotonic()
    facts = RunFacts(spec, layout, host, time.time(), unprotected(spec), plan)
    kept = None if spec.logs.disabled else layout
    journal = Journal(kept, console.say, _echo(spec, console))
    warm = "warm" if forkserver.warmth else "cold"
    journal.log(f"msrun {spec.record_id}: {sys.argv}")
    journal.log(f"workers start {warm}: {ignited.choice.reason}")
    journal.log(timeouts.describe(spec))
    record = _record(prepared, facts, environ)
    kept_record = _write_record(prepared, record, journal)
    _say_unprotected(facts, console)
    counters = read_counters()

    @cache
    def post_mortem() -> PostMortem:
        return _post_mortem(facts, counters, began_s)

    output = WorkerOutput(spec, layout, journal, console.progress)
    starter = Starter(forkserver, prepared.listener, journal, console.say, ignited.ordered)
    fallback = spec.dump.fallback or layout.folder / FALLBACK
    hooks = HooksBridge(
        spec,
        fallback=fallback,
        listener=ignited.hooks_listener,
        journal=journal,
        say=console.say,
        kept=kept_record,
    )
    notes = prepared.records_folder / spec.record_id
    requests = Requests(spec, notes, facts.started, console.say)
    sys.setswitchinterval(SWITCH_S)
    open_files.allow_files(FILES_PER_RANK * spec.nproc)

    notifier = Notifier(facts, console.say)

    def changed(job: Job, workers: tuple[Worker, ...], account: Account) -> None:
        notifier.changed(job, workers, account)
        journal.replace(layout.status, status(facts, job, workers, account))

    def attempt_ended(state: JobState, workers: tuple[Worker, ...]) -> None:
        if state is not JobState.SUCCEEDED:
            journal.log(post_mortem().examine(workers) or "no process failed by itself")
            _say_of_failure(state, post_mortem(), console)

    supervisor = Supervisor(
        spec,
        plan=plan,
        starter=starter,
        hooks=hooks,
        requests=requests,
        output=output,
        journal=journal,
        say=console.say,
        last_words=lambda worker: _last_words(worker, plan, post_mortem),
        device_fault=lambda worker: post_mortem().device_fault(worker),
        spared=lambda: notifier.pids,
    )
    controller = JobController(
        spec,
        journal=journal,
        notifier=notifier,
        say=console.say,
        tell=console.tell,
        changed=changed,
        attempt_ended=attempt_ended,
        give_up_devices=kept_record.give_up,
    )
    controller.attach(supervisor.loop, supervisor)
    supervisor.run(controller)
    ending = controller.ending
    if not output.close(CONSOLE_PATIENCE_S):
        console.say(f"the console takes no more output; all of it is in {layout.folder}")
    advice = _advice(ending, prepared, record, environ)
    has_failed = ending.state is JobState.FAILED
    if has_failed or (ending.state is JobState.STOPPED and post_mortem().found):
        console.report(post_mortem().tell(ending.reason, environ, journal, advice))
    _say_what_remains(ending, advice, console, journal)
    notifier.close()
    journal.log(f"exit {ending.exit_code}: {ending.reason}")
    journal.close()
    _close(prepared, ignited)
    return ending.exit_code


def _post_mortem(facts: RunFacts, counters: OomCounters, began_s: float) -> PostMortem:
    """What examines failures: 25 ms of imports that a job which succeeds does not need."""
    from agent.failure.post_mortem import PostMortem
    from agent.machine.xid_log import XidLog

    return PostMortem(facts, counters, XidLog(began_s))


def _last_words(
    worker: Worker,
    plan: Callable[[int], tuple[WorkerOrder, ...]],
    post_mortem: Callable[[], PostMortem],
) -> str:
    """What an ended rank wrote about its failure; of a killed one, why it did that itself."""
    if worker.exit_code == -SIGKILL:
        return own_end_in(plan(worker.began)[worker.local_rank].stderr)
    return post_mortem().last_words(worker)


def _say_of_failure(state: JobState, found: PostMortem, console: Console) -> None:
    """What only a report would tell, if the job goes on without one."""
    said = [found.memory_hint] if state is JobState.REPLACING else []
    said += [found.driver_report] if state in {JobState.REPLACING, JobState.STARTING} else []
    for sentence in filter(None, said):
        console.say(sentence)


def _close(prepared: Prepared, ignited: StartedForkserver) -> None:
    prepared.listener.close()
    ignited.hooks_listener.close()
    os.close(prepared.lock)
    if prepared.claim is not None:
        os.close(prepared.claim)


def _say_unprotected(facts: RunFacts, console: Console) -> None:
    if facts.unprotected:
        console.tell(str(Protection(Level.NOT_PROTECTED, facts.unprotected)), Tone.BAD)


def _echo(spec: JobSpec, console: Console) -> Callable[[str], None] | None:
    return console.report if spec.event_log_handler == "console" else None


def _say_what_remains(
    ending: RunEnding, advice: ResumeAdvice | None, console: Console, journal: Journal
) -> None:
    if ending.state is JobState.STOPPED:
        kept = None if advice is None else advice.kept
        saved = "" if kept is None else f"; step {kept.step} is saved in {kept.path}"
        console.say(ending.reason.removesuffix(saved))  # the advice says it
    if ending.cost:
        console.say(ending.cost)
        journal.log(ending.cost)
    if advice is not None and (advice.kept or ending.state is JobState.FAILED):
        console.report(advice.text)
        journal.log(advice.text)


def _advice(
    ending: RunEnding, prepared: Prepared, record: run_record.Record, environ: Mapping[str, str]
) -> ResumeAdvice | None:
    """What is saved of a job that did not succeed; ``None`` if nothing was ever to be."""
    spec = prepared.spec
    guarded = ending.has_hooks or ending.saved is not None
    if ending.state is JobState.SUCCEEDED or not guarded:
        return None
    from agent.failure.resume_advice import resume_advice

    known = run_record.read(prepared.records_folder / spec.record_id) or record
    return resume_advice(
        ending.saved,
        ending.lost,
        known,
        environ,
        is_away=spec.is_away,
        gave_up=ending.gave_up,
        not_replaced=ending.not_replaced,
    )


def _record(prepared: Prepared, facts: RunFacts, environ: Mapping[str, str]) -> run_record.Record:
    """What other msrun processes can read about this one."""
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
        resumed_step=spec.dump.resume_step if spec.dump.resume else None,
        unrecorded=unrecorded(environ),
        failed_devices=spec.devices.given_up,
    )


def _write_record(
    prepared: Prepared, record: run_record.Record, journal: Journal
) -> run_record.KeptRecord:
    try:
        run_record.write(prepared.records_folder, record)
    except OSError as error:
        journal.trouble(prepared.records_folder, error)
    return run_record.KeptRecord(prepared.records_folder, record)
