"""Puts the parts of a run together in the order that starts it fastest, and takes them apart again.

The forkserver is started as soon as it is known that the run may start; while it imports torch on
one core, the agent imports what it needs on another.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent import ranks, records
from agent.controller import Job
from agent.folder import open_run_folder
from agent.forkserver import Forkserver
from agent.journal import Journal
from agent.listener import listen
from agent.output import Output
from agent.preload import choose
from agent.spec import JobSpec, UsageError
from agent.worker import Worker, become_subreaper
from worker_hooks.env import CUDA_VISIBLE_DEVICES
from worker_hooks.layout import RunLayout
from worker_hooks.protocol import WorkerOrder

CONSOLE_PATIENCE_S = 10.0  # for a console that takes nothing: the lines are in the files


@dataclass(frozen=True, slots=True)
class Console:
    """How the command line shows things to people."""

    say: Callable[[str], None]  # one sentence on stderr
    report: Callable[[str], None]  # the failure report
    progress: Callable[[str], None]  # a passing word, on a terminal only


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may start: everything that can be wrong with the request was found right."""

    spec: JobSpec
    layout: RunLayout
    listener: socket.socket
    lock: int
    records_folder: Path
    bindings: tuple[ranks.Binding, ...]

    @property
    def port(self) -> int:
        """The port workers find the store at."""
        return int(self.listener.getsockname()[1])


def prepare(spec: JobSpec, environ: Mapping[str, str]) -> Prepared:
    """Check the request against the machine, take the port and the folder.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    bindings = _bindings(spec, environ)
    listener = listen(spec.master_addr, spec.master_port)
    records_folder = records.writable_folder(environ)
    folder = spec.logs.log_dir or records_folder / spec.record_id
    layout = RunLayout(
        folder=Path(os.path.abspath(folder)),
        record_id=spec.record_id,
        run_id=spec.run_id,
        stem=spec.logs.worker_log_name,
        torchrun_tree=spec.logs.torchrun_tree,
    )
    try:
        ranks.plan(spec, layout, 0, environ, bindings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    lock = open_run_folder(layout)
    return Prepared(spec, layout, listener, lock, records_folder, bindings)


def _bindings(spec: JobSpec, environ: Mapping[str, str]) -> tuple[ranks.Binding, ...]:
    if not spec.bind.wanted:
        return ()
    from agent import affinity, topology

    machine = topology.read_topology(visible_devices=environ.get(CUDA_VISIBLE_DEVICES))
    return affinity.bindings(machine, spec.bind, spec.nproc)


def run(prepared: Prepared, environ: Mapping[str, str], console: Console) -> int:
    """Run a prepared job to its end; the exit code."""
    spec, layout = prepared.spec, prepared.layout
    started = time.time()
    told = ranks.job_env(spec, prepared.port).environ(environ, spec.record_id)
    worker_environ = {**environ, **told}

    def plan(attempt: int) -> tuple[WorkerOrder, ...]:
        return ranks.plan(spec, layout, attempt, environ, prepared.bindings)

    become_subreaper()
    kept = None if spec.logs.disabled else layout
    journal = Journal(kept, console.say, echo=spec.event_log_handler == "console")
    choice = choose(spec, plan(0)[0].argv, environ)
    journal.log(f"msrun {spec.record_id}: {sys.argv}")
    journal.log(f"workers start {'warm' if choice.warmth else 'cold'}: {choice.reason}")
    log = None if spec.logs.disabled else layout.scheduler_log
    forkserver = Forkserver(choice.warmth, worker_environ, spec.record_id, log)
    _start(forkserver)
    _write_record(prepared, started, journal)

    # Imported only now: the forkserver is at work meanwhile.
    from agent.failure import Coroner, Facts
    from agent.starter import Starter
    from agent.state import JobState
    from agent.status import status
    from agent.supervisor import Supervisor

    facts = Facts(spec, layout, socket.gethostname(), plan)
    coroner = Coroner(facts)
    output = Output(spec, layout, journal, console.progress)

    def changed(job: Job, workers: tuple[Worker, ...]) -> None:
        journal.replace(layout.status, status(facts, started, job, workers))

    def attempt_ended(state: JobState, workers: tuple[Worker, ...]) -> None:
        failed = None if state is JobState.SUCCEEDED else coroner.examine(workers)
        if failed is not None:
            journal.log(failed)

    def cold() -> Forkserver:
        return Forkserver(None, worker_environ, spec.record_id, log)

    starter = Starter(forkserver, cold, prepared.listener, journal, console.say)
    supervisor = Supervisor(
        spec, plan, starter, output, journal, console.say, changed, attempt_ended
    )
    ending = supervisor.run()
    if not output.close(CONSOLE_PATIENCE_S):
        console.say(f"the console takes no more output; all of it is in {layout.folder}")
    if ending.state is JobState.FAILED:
        console.report(coroner.tell(ending.reason, environ, journal))
    elif ending.state is JobState.STOPPED:
        console.say(ending.reason)
    journal.log(f"exit {ending.exit_code}: {ending.reason}")
    journal.close()
    prepared.listener.close()
    os.close(prepared.lock)
    return ending.exit_code


def _start(forkserver: Forkserver) -> None:
    try:
        forkserver.start()
    except OSError as error:
        raise UsageError(
            f"no process can be started ({error.strerror}): raise the limits (ulimit -u, ulimit -n)"
        ) from error


def _write_record(prepared: Prepared, started: float, journal: Journal) -> None:
    spec = prepared.spec
    record = records.Record(
        record_id=spec.record_id,
        run_id=spec.run_id,
        pid=os.getpid(),
        born=records.birth(os.getpid()) or 0,
        log_dir=str(prepared.layout.folder),
        argv=tuple(sys.argv),
        cwd=os.getcwd(),
        started=started,
    )
    try:
        records.write(prepared.records_folder, record)
    except OSError as error:
        journal.trouble(prepared.records_folder, error)
