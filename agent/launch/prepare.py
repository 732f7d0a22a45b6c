"""Checks a request against the machine and starts its forkserver as early as it can be started.

While the forkserver imports torch on one core, the agent imports the rest of itself
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
from agent.records.run_folder import abandon_run_folder, open_run_folder
from agent.spec.job_spec import JobSpec, UsageError
from agent.workers.forkserver_client import ForkserverClient
from agent.workers.master_port import listen
from agent.workers.processes import become_subreaper
from worker_hooks.contract.env import CUDA_VISIBLE_DEVICES
from worker_hooks.contract.layout import RunLayout
from worker_hooks.contract.protocol import WorkerOrder

REPLACEMENTS = 1_000_000  # more than there can be in a job, for the length of their number
FILES_NEEDED = 30  # 12 for long, 10 more for moments, some to spare; views of logs on top


class Prepared(NamedTuple):
    """A run that may start: everything that can be wrong with the request was found right."""

    spec: JobSpec
    layout: RunLayout
    listener: socket.socket
    lock: int
    records_folder: Path
    bindings: tuple[rank_plan.Binding, ...]
    claim: int | None = None  # held while this run goes on from another

    @property
    def port(self) -> int:
        """The port workers find the store at."""
        return int(self.listener.getsockname()[1])


class StartedForkserver(NamedTuple):
    """The forkserver at work, and why it is warm or cold."""

    forkserver: ForkserverClient
    choice: Choice
    door: socket.socket  # where hooks connect to
    ordered: tuple[WorkerOrder, ...] = ()  # workers of attempt 0 that are on their way already


def prepare(spec: JobSpec, environ: Mapping[str, str]) -> Prepared:
    """Check the request against the machine, take the port and the folder.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    _check_limits()
    bound = bindings(spec, environ)
    listener = listen(spec.master_addr, spec.master_port)
    records_folder = run_record.writable_folder(environ)
    layout = rank_plan.run_layout(spec, records_folder)
    many = spec.max_restarts + REPLACEMENTS
    last = rank_plan.plan_ranks(
        spec, layout, many, environ, bound, resumes=True
    )  # no other is longer
    rank_plan.check_orders(last)  # what is wrong with it is said now
    claim = run_record.claim(records_folder, spec.dump.lineage[0]) if spec.dump.lineage else None
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


def abandon(prepared: Prepared) -> None:
    """Give back what was taken for a run that did not start."""
    prepared.listener.close()
    abandon_run_folder(prepared.layout, prepared.lock)
    if prepared.claim is not None:
        os.close(prepared.claim)


def _check_limits() -> None:
    """Refuse at once what would fail somewhere in the middle."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = limit - len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and free < FILES_NEEDED:
        raise UsageError(
            f"too few files can be opened ({limit} in all, {free} left, {FILES_NEEDED} needed): "
            "raise ulimit -n"
        )


def bindings(spec: JobSpec, environ: Mapping[str, str]) -> tuple[rank_plan.Binding, ...]:
    """The processors of each local rank on this machine; empty when none were asked for.

    Raises:
        UsageError: this machine cannot give them.
    """
    if not spec.bind.wanted:
        return ()
    from agent.launch import cpu_binding
    from agent.machine import cpu_topology

    machine = cpu_topology.read_topology(visible_devices=environ.get(CUDA_VISIBLE_DEVICES))
    return cpu_binding.bindings(machine, spec.bind, spec.nproc)


def _later(path: Path, error: OSError) -> None:
    """The journal, which is not there yet, meets the same trouble and says it."""


def start_forkserver(prepared: Prepared, environ: Mapping[str, str]) -> StartedForkserver:
    """Start the forkserver: from here on time is not lost.

    Raises:
        UsageError: no process can be started.
    """
    spec = prepared.spec
    try:
        door = open_listener(spec.record_id)
    except OSError as error:
        raise UsageError(f"no socket can be opened ({error.strerror}): raise ulimit -n") from error
    job = rank_plan.job_env(spec, prepared.port, name_of(door))
    told = job.environ(environ, spec.record_id)
    log = None if spec.logs.disabled else prepared.layout.scheduler_log
    if log is not None:
        with contextlib.suppress(OSError):  # a full disk: said when the journal meets it
            log.touch()
    become_subreaper()
    signals.take_from_shell(spec)
    resumes = spec.dump.resume is not None
    orders = rank_plan.plan_ranks(
        spec, prepared.layout, 0, environ, prepared.bindings, resumes=resumes
    )
    choice = choose(spec, orders[0].argv, environ)
    forkserver = ForkserverClient(
        choice.warmth,
        {**environ, **told},
        spec.record_id,
        log,
        is_ours=is_python_of_ours(spec),
    )
    try:
        forkserver.start()
    except OSError as error:
        door.close()
        raise UsageError(
            f"no process can be started ({error.strerror}): raise the limits (ulimit -u, ulimit -n)"
        ) from error
    signals.hold(spec)  # only now: the forkserver and its children must not inherit the mask
    if choice.warmth is not None:  # whether it may fork is only known when it is ready
        return StartedForkserver(forkserver, choice, door)
    if log is not None:
        worker_files.make(orders, _later)
    with contextlib.suppress(OSError):  # it is gone: its link says so, and they stay owed
        forkserver.order(0, orders)
    return StartedForkserver(forkserver, choice, door, orders)
