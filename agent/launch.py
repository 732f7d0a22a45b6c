"""Checks a request against the machine and starts its forkserver as early as it can be started.

While the forkserver imports torch on one core, the agent imports the rest of itself (``agent.run``)
on another; so this file imports little.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent import ranks, records
from agent.folder import open_run_folder
from agent.forkserver import Forkserver
from agent.listener import listen
from agent.preload import Choice, choose
from agent.spec import JobSpec, UsageError
from agent.worker import become_subreaper
from worker_hooks.env import CUDA_VISIBLE_DEVICES
from worker_hooks.layout import RunLayout


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


@dataclass(frozen=True, slots=True)
class Ignited:
    """The forkserver at work, and why it is warm or cold."""

    forkserver: Forkserver
    choice: Choice


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


def ignite(prepared: Prepared, environ: Mapping[str, str]) -> Ignited:
    """Start the forkserver: from here on time is not lost.

    Raises:
        UsageError: no process can be started.
    """
    spec = prepared.spec
    told = ranks.job_env(spec, prepared.port).environ(environ, spec.record_id)
    log = None if spec.logs.disabled else prepared.layout.scheduler_log
    if log is not None:
        with contextlib.suppress(OSError):  # a full disk: said when the journal meets it
            log.touch()
    become_subreaper()
    order = ranks.plan(spec, prepared.layout, 0, environ, prepared.bindings)[0]
    choice = choose(spec, order.argv, environ)
    forkserver = Forkserver(choice.warmth, {**environ, **told}, spec.record_id, log)
    try:
        forkserver.start()
    except OSError as error:
        raise UsageError(
            f"no process can be started ({error.strerror}): raise the limits (ulimit -u, ulimit -n)"
        ) from error
    return Ignited(forkserver, choice)
