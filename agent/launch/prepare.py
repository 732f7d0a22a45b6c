"""Checks a request against the machine and starts the forkserver as early as possible.

While the forkserver imports torch on one core, the agent imports the rest of its own code
(``agent.supervisor``) on another; so this file imports little.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agent.hooks.listener import name_of, open_listener
from agent.launch import rank_plan, signals
from agent.launch.warm_imports import Choice, choose, is_python_of_ours
from agent.records import run_record, worker_files
from agent.records.run_folder import abandon_run_folder, check_writable, open_run_folder
from agent.spec.job_spec import JobSpec, UsageError
from agent.workers.forkserver_client import ForkserverClient
from agent.workers.master_port import listen
from agent.workers.processes import become_subreaper, signal_group_or_process
from worker_hooks.contract.env import CUDA_VISIBLE_DEVICES, JOB, RUNS, without_keys
from worker_hooks.contract.layout import RunLayout
from worker_hooks.contract.protocol import WorkerOrder

REPLACEMENTS = 1_000_000  # more than a job can have; only the length of the number counts
FILES_NEEDED = 30  # 12 always, 10 more for a moment, some in reserve; log views come on top


class Prepared(NamedTuple):
    """A run that may start: everything that can be wrong with the request has been checked."""

    spec: JobSpec
    layout: RunLayout
    listener: socket.socket
    lock: int
    records_folder: Path
    bindings: tuple[rank_plan.Binding, ...]
    claim: int | None = None  # held while this run resumes another
    store_port: int = 0  # of the workers' store, if that is on another node
    is_late: bool = False  # this node has the place of a lost one of a job that runs

    @property
    def port(self) -> int:
        """The port of the workers' store."""
        return self.store_port or int(self.listener.getsockname()[1])


class StartedForkserver(NamedTuple):
    """The running forkserver, and why it is warm or cold."""

    forkserver: ForkserverClient
    choice: Choice
    hooks_listener: socket.socket
    ordered: tuple[WorkerOrder, ...] = ()  # workers of attempt 0 that have been ordered
    environ: Mapping[str, str] = {}  # of all workers, where the forkserver was started without
    is_used: bool = False  # it has started ranks of another run, which is over

    def call_off(self) -> None:
        """No run follows that it would start ranks of."""
        if (pid := self.forkserver.pid) > 0:  # while it imports it would outlive msrun
            signal_group_or_process(pid)
        self.forkserver.forget()
        self.hooks_listener.close()


def prepare(
    spec: JobSpec, environ: Mapping[str, str], listener: socket.socket | None = None
) -> Prepared:
    """Check the request against the machine, take the port and the folder.

    Args:
        listener: where the workers meet; ``None``: at MASTER_ADDR and MASTER_PORT, on this node.

    Raises:
        UsageError: one sentence that says what is wrong.
    """
    _check_limits()
    bound = bindings(spec, environ)
    listener = listener or listen(spec.master_addr, spec.master_port)
    records_folder = run_record.writable_folder(environ)
    layout = rank_plan.run_layout(spec, records_folder)
    _check_plan(spec, layout, environ, bound)
    resumed = spec.dump.lineage[0] if spec.dump.lineage and not spec.is_controlled else None
    claim = None if resumed is None else run_record.claim(records_folder, resumed)
    lock = open_run_folder(layout)
    return Prepared(
        spec=spec,
        layout=layout,
        listener=listener,
        lock=lock,
        records_folder=records_folder,
        bindings=bound,
        claim=claim,
    )


def check_before_others(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check what other nodes have no part in: nobody is to begin with a node that cannot.

    Raises:
        UsageError: one sentence that says what is wrong.
    """
    _check_limits()
    # which worker of its machine it is, one that was started by itself does not know yet
    is_by_hand = spec.cluster is not None and spec.cluster.by_hand is not None
    bound = () if is_by_hand else bindings(spec, environ)
    layout = rank_plan.run_layout(spec, run_record.writable_folder(environ))
    check_writable(layout.folder)
    if not is_by_hand:
        _check_plan(spec, layout, environ, bound)


def _check_plan(
    spec: JobSpec,
    layout: RunLayout,
    environ: Mapping[str, str],
    bound: tuple[rank_plan.Binding, ...],
) -> None:
    many = spec.max_restarts + REPLACEMENTS
    # the longest plan that this job can have: if it is too long, that is reported now
    last = rank_plan.plan_ranks(spec, layout, many, environ, bound, resumes=True)
    rank_plan.check_orders(last)


def abandon(prepared: Prepared) -> None:
    """Release what was taken for a run that did not start."""
    prepared.listener.close()
    abandon_run_folder(prepared.layout, prepared.lock)
    if prepared.claim is not None:
        os.close(prepared.claim)


def _check_limits() -> None:
    """Refuse at once what would fail later."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = limit - len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and free < FILES_NEEDED:
        raise UsageError(
            f"too few files can be opened ({limit} in all, {free} left, {FILES_NEEDED} needed): "
            "raise ulimit -n"
        )


def bindings(spec: JobSpec, environ: Mapping[str, str]) -> tuple[rank_plan.Binding, ...]:
    """The CPUs of each local rank on this machine; empty when no binding is requested.

    Raises:
        UsageError: this machine does not have them.
    """
    if not (spec.bind.wanted and spec.nproc):
        return ()
    from agent.launch import cpu_binding
    from agent.machine import cpu_topology

    devices = ",".join(spec.devices.visible) or environ.get(CUDA_VISIBLE_DEVICES)
    machine = cpu_topology.read_topology(visible_devices=devices)
    of_all = cpu_binding.bindings(machine, spec.bind, spec.local_world_size)
    return of_all[spec.local_first :][: spec.nproc]


def _ignore(path: Path, error: OSError) -> None:
    """The journal does not exist yet; it will have the same problem and report it."""


def start_early(spec: JobSpec, environ: Mapping[str, str]) -> StartedForkserver:
    """Start the forkserver of a run that is to come: imports are most of what a start costs.

    Which ranks the node has is not known yet; that reaches them with the orders to start them.

    Raises:
        UsageError: no process can be started.
    """
    hooks_listener = _hooks_listener(spec)
    known = rank_plan.job_env(spec, 0, name_of(hooks_listener)).environ(environ, spec.record_id)
    argv = rank_plan.command(spec, 0)
    workers_environ = {**without_keys(environ), **known}
    return _started(spec, argv, environ, workers_environ, None, hooks_listener)


def hand_on(
    spec: JobSpec, used: StartedForkserver, forkserver: ForkserverClient
) -> StartedForkserver:
    """Have the forkserver of a run that is over start the ranks of the next one.

    ``forkserver``: by now; none of its ranks is left.

    Raises:
        UsageError: no socket can be opened.
    """
    return StartedForkserver(forkserver, used.choice, _hooks_listener(spec), is_used=True)


def _hooks_listener(spec: JobSpec) -> socket.socket:
    try:
        return open_listener(spec.record_id)
    except OSError as error:
        raise UsageError(f"no socket can be opened ({error.strerror}): raise ulimit -n") from error


def _started(
    spec: JobSpec,
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    workers_environ: Mapping[str, str],
    log: Path | None,
    hooks_listener: socket.socket,
) -> StartedForkserver:
    """Start the forkserver; ``argv``: a worker's command line."""
    become_subreaper()
    signals.take_from_shell(spec)
    choice = choose(spec, argv, environ)
    forkserver = ForkserverClient(
        choice.warmth, workers_environ, spec.record_id, log, is_ours=is_python_of_ours(spec)
    )
    try:
        forkserver.start()
    except OSError as error:
        hooks_listener.close()
        raise UsageError(
            f"no process can be started ({error.strerror}): raise the limits (ulimit -u, ulimit -n)"
        ) from error
    return StartedForkserver(forkserver, choice, hooks_listener)


def _with_ranks(
    early: StartedForkserver, prepared: Prepared, environ: Mapping[str, str], interface: str
) -> StartedForkserver | None:
    """A forkserver that was there before it was known which ranks the node has."""
    spec = prepared.spec
    job = rank_plan.job_env(spec, prepared.port, name_of(early.hooks_listener), interface)
    known = early.forkserver.environ if early.is_used else {}
    # its ranks are known by either run; and perhaps no other node decides for them any more
    of_past = {RUNS: known[RUNS], JOB: ""} if early.is_used else {}
    job_environ = job.environ({**environ, **of_past}, spec.record_id)
    if known.keys() - environ.keys() - job_environ.keys():  # its ranks would have these as well
        return None
    early.forkserver.know(job_environ)
    signals.hold(spec)
    return early._replace(environ=job_environ)


def start_forkserver(
    prepared: Prepared,
    environ: Mapping[str, str],
    interface: str = "",
    early: StartedForkserver | None = None,
) -> StartedForkserver:
    """Start the forkserver; from here on it works beside the agent.

    ``interface``: the network's, at which other nodes are reached; empty: there are none.

    Raises:
        UsageError: no process can be started.
    """
    if early is not None:
        if started := _with_ranks(early, prepared, environ, interface):
            return started
        early.forkserver.forget()
        early.hooks_listener.close()
    spec = prepared.spec
    hooks_listener = _hooks_listener(spec)
    job = rank_plan.job_env(spec, prepared.port, name_of(hooks_listener), interface)
    job_environ = job.environ(environ, spec.record_id)
    log = None if spec.logs.disabled else prepared.layout.scheduler_log
    if log is not None:
        with contextlib.suppress(OSError):  # a full disk: the journal will report it
            log.touch(0o644)
    resumes = spec.dump.resume is not None
    orders = rank_plan.plan_ranks(
        spec, prepared.layout, 0, environ, prepared.bindings, resumes=resumes
    )
    workers_environ = {**without_keys(environ), **job_environ}
    argv = rank_plan.command(spec, 0)
    started = _started(spec, argv, environ, workers_environ, log, hooks_listener)
    signals.hold(spec)  # only now: the forkserver and its children must not inherit the mask
    # only when it is ready is it known whether it may fork; and a node that another one controls
    # starts nothing before it hears that an attempt has begun
    if started.choice.warmth is not None or spec.is_controlled or not orders:
        return started
    if log is not None:
        worker_files.make(orders, _ignore)
    with contextlib.suppress(OSError):  # it is gone: its link reports that; they stay owed
        started.forkserver.order(0, orders)
    return started._replace(ordered=orders)
