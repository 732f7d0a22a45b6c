"""What every node of a run needs, wherever its controller is."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from signal import SIGKILL
from typing import TYPE_CHECKING, NamedTuple

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.controller.states import JobState
from agent.failure.ending import RunEnding
from agent.failure.own_end import own_end_in
from agent.hooks.listener import name_of
from agent.launch import rank_plan
from agent.launch.prepare import Prepared, StartedForkserver
from agent.launch.unprotected import unprotected
from agent.machine import open_files
from agent.machine.oom_kills import OomCounters, read_counters
from agent.notify.notifier import Notifier
from agent.records import run_record
from agent.records.journal import Journal
from agent.records.worker_output import WorkerOutput
from agent.spec import timeouts
from agent.spec.console import Console
from agent.spec.job_spec import JobSpec
from agent.spec.run_facts import RunFacts
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.job_controller import JobController
from agent.supervisor.requests import Requests
from agent.supervisor.supervisor import Supervisor
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract.layout import FALLBACK, sockets_folder
from worker_hooks.contract.protocol import WorkerOrder

if TYPE_CHECKING:
    from agent.failure.evidence import Evidence
    from agent.failure.post_mortem import (
        PostMortem,  # what a failure needs is imported when there is one
    )
    from agent.failure.resume_advice import ResumeAdvice
    from agent.rank_logs.reading import LogReader
    from agent.shadows.shadows import Shadows
    from agent.supervisor.hooks_relay import HooksRelay

CONSOLE_PATIENCE_S = 10.0  # for a console that takes nothing: the lines are in the files
# its link, its status page, its share of a checkpoint in memory, twice, and two files of each copy
FILES_PER_RANK = 11
SWITCH_S = 0.0005  # how long the loop waits at most for the thread that shows workers' output


class RunParts(NamedTuple):
    """The parts of a run on one node."""

    facts: RunFacts
    plan: Callable[[int, bool, tuple[str, ...]], tuple[WorkerOrder, ...]]
    journal: Journal
    record: run_record.Record
    kept: run_record.KeptRecord
    output: WorkerOutput
    starter: Starter
    requests: Requests
    post_mortem: Callable[[], PostMortem]
    shadows: Shadows | None = None

    def last_words(self, worker: Worker) -> str:
        """What an ended rank wrote about its failure; of a killed one, why it did that itself."""
        if worker.exit_code == -SIGKILL:
            orders = self.facts.plan(worker.began)
            return own_end_in(orders[worker.local_rank].stderr)
        return self.post_mortem().last_words(worker)

    def examine(
        self,
        state: JobState,
        workers: tuple[Worker, ...],
        others: Sequence[Evidence],
        say: Callable[[str], None],
    ) -> None:
        """An attempt is over: log why it failed, and say what only a report would, if none follows.

        Args:
            state: the job's.
            workers: of this node.
            others: what other nodes found of theirs.
            say: prints one sentence for people.
        """
        if state is JobState.SUCCEEDED:
            return
        found = self.post_mortem()
        self.journal.log(found.examine(workers, others) or "no process failed by itself")
        said = [found.memory_hint] if state is JobState.REPLACING else []
        said += [found.driver_report] if state in {JobState.REPLACING, JobState.STARTING} else []
        for sentence in filter(None, said):
            say(sentence)

    def supervisor(
        self,
        hooks: HooksBridge | HooksRelay,
        say: Callable[[str], None],
        spared: Callable[[], frozenset[int]],
    ) -> Supervisor:
        """What runs the ranks of this node; ``spared``: children that are no ranks."""
        return Supervisor(
            self.facts.spec,
            plan=self.plan,
            starter=self.starter,
            hooks=hooks,
            requests=self.requests,
            output=self.output,
            journal=self.journal,
            say=say,
            last_words=self.last_words,
            device_fault=lambda worker: self.post_mortem().device_fault(worker),
            spared=spared,
            shadows=self.shadows,
        )

    def log_reader(self, here: Supervisor) -> LogReader:
        """What reads logs of this node's ranks for other nodes; ``here``: runs them."""
        from agent.rank_logs.reading import LogReader  # a job on one node starts without it

        is_off = self.facts.spec.logs.disabled
        return LogReader(self.facts.layout, here.workers, is_off=is_off)

    def bridge(self, spec: JobSpec, listener: socket.socket, console: Console) -> HooksBridge:
        """The hooks of all ranks, where they are controlled; ``listener``: theirs."""
        return HooksBridge(
            spec,
            fallback=spec.dump.fallback or self.facts.layout.folder / FALLBACK,
            listener=listener,
            journal=self.journal,
            say=console.say,
            kept=self.kept,
        )

    def controller(
        self,
        spec: JobSpec,
        notifier: Notifier,
        console: Console,
        changed: Callable[[Job, tuple[Worker, ...] | None, Account], None],
        others: Callable[[], Sequence[Evidence]],
    ) -> JobController:
        """Who decides. ``others``: what other nodes found of their ranks."""
        return JobController(
            spec,
            journal=self.journal,
            notifier=notifier,
            say=console.say,
            tell=console.tell,
            changed=changed,
            attempt_ended=lambda state, gone: self.examine(state, gone, others(), console.say),
            give_up_devices=self.kept.give_up,
        )

    def finish_output(self, say: Callable[[str], None]) -> None:
        """The workers have ended: show what is left of their output."""
        if not self.output.close(CONSOLE_PATIENCE_S):
            say(f"the console takes no more output; all of it is in {self.facts.layout.folder}")


def make_parts(
    prepared: Prepared, ignited: StartedForkserver, environ: Mapping[str, str], console: Console
) -> RunParts:
    """Make them; nothing is at work yet but the forkserver."""
    spec, layout, forkserver = prepared.spec, prepared.layout, ignited.forkserver

    def plan(
        attempt: int, resumes: bool = False, devices: tuple[str, ...] = ()
    ) -> tuple[WorkerOrder, ...]:
        bound = prepared.bindings
        orders = rank_plan.plan_ranks(
            spec, layout, attempt, environ, bound, resumes=resumes, devices=devices
        )
        if not (ignited.environ or starter.moved):
            return orders
        return tuple(
            order._replace(environ={**ignited.environ, **order.environ, **starter.moved})
            for order in orders
        )

    host, began_s = socket.gethostname(), time.monotonic()
    facts = RunFacts(spec, layout, host, time.time(), unprotected(spec), plan)
    echo = console.report if spec.event_log_handler == "console" else None
    journal = Journal(None if spec.logs.disabled else layout, console.say, echo)
    warm = "warm" if forkserver.warmth else "cold"
    journal.log(f"msrun {spec.record_id}: {sys.argv}")
    journal.log(f"workers start {warm}: {ignited.choice.reason}")
    journal.log(timeouts.describe(spec))
    record = run_record.record_of(spec, layout, environ, facts.started, facts.host)
    kept = _write_record(prepared, record, journal)
    counters = read_counters()
    sys.setswitchinterval(SWITCH_S)
    # to each other node a line, and of each rank what it alone has, in a checkpoint in memory
    elsewhere = 0 if spec.is_controlled else spec.nnodes + spec.world_size - spec.nproc
    open_files.allow_files(FILES_PER_RANK * spec.nproc + elsewhere)
    notes = prepared.records_folder / spec.record_id
    starter = Starter(forkserver, prepared.listener, journal, console.say, ignited.ordered)

    @cache
    def post_mortem() -> PostMortem:
        return _post_mortem(facts, counters, began_s)

    return RunParts(
        facts=facts,
        plan=plan,
        journal=journal,
        record=record,
        kept=kept,
        output=WorkerOutput(spec, layout, journal, console.progress),
        starter=starter,
        requests=Requests(spec, notes, facts.started, console.say),
        post_mortem=post_mortem,
        shadows=_shadows(spec, ignited, journal),
    )


def _shadows(spec: JobSpec, ignited: StartedForkserver, journal: Journal) -> Shadows | None:
    """Who talks to the ranks' shadows, if there are to be any."""
    if not spec.shadows:
        return None
    from agent.shadows.shadows import Shadows  # other jobs start without it

    return Shadows(name_of(ignited.hooks_listener), spec.ranks_here, journal)


def take_apart(prepared: Prepared, ignited: StartedForkserver) -> None:
    """The run is over: close what it had open, and remove what its processes have left."""
    shutil.rmtree(sockets_folder(os.environ, prepared.spec.record_id), ignore_errors=True)
    prepared.listener.close()
    ignited.hooks_listener.close()
    os.close(prepared.lock)
    if prepared.claim is not None:
        os.close(prepared.claim)


def _post_mortem(facts: RunFacts, counters: OomCounters, began_s: float) -> PostMortem:
    """What examines failures: 25 ms of imports that a job which succeeds does not need."""
    from agent.failure.post_mortem import PostMortem
    from agent.machine.xid_log import XidLog

    return PostMortem(facts, counters, XidLog(began_s))


def _write_record(
    prepared: Prepared, record: run_record.Record, journal: Journal
) -> run_record.KeptRecord:
    try:
        run_record.write(prepared.records_folder, record)
    except OSError as error:
        journal.trouble(prepared.records_folder, error)
    return run_record.KeptRecord(prepared.records_folder, record)


def report(
    ending: RunEnding,
    prepared: Prepared,
    parts: RunParts,
    environ: Mapping[str, str],
    console: Console,
    address: str = "",
) -> None:
    """Say how the job ended, and what remains of it.

    ``address``: of this node, which has taken the part of node 0; empty: it has not, or did so as
    the nodes met again.
    """
    if ending.lost_node:
        parts.post_mortem().blame_reason()
    advice = _advice(ending, prepared, parts.record, environ, address)
    has_failed, journal = ending.state is JobState.FAILED, parts.journal
    if has_failed or (ending.state is JobState.STOPPED and parts.post_mortem().found):
        console.report(parts.post_mortem().tell(ending.reason, environ, journal, advice))
    _say_what_remains(ending, advice, console, journal)


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
    ending: RunEnding,
    prepared: Prepared,
    record: run_record.Record,
    environ: Mapping[str, str],
    address: str,
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
        has_other_nodes=spec.nnodes > 1,
        meets_at=_meets_at(spec, address),
    )


def _meets_at(spec: JobSpec, address: str) -> tuple[str, int] | None:
    """Where all nodes are to meet if they resume; ``None``: where their lines say."""
    if spec.cluster is None or spec.cluster.by_hand is not None:
        return None
    host, port = spec.home
    here = address or spec.master_addr
    return None if here == host else (here, port)
