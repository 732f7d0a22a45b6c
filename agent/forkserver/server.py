"""The forkserver: waits for orders and forks workers that become children of the agent.

There are two kinds: *warm* (inside ``sitecustomize`` of an interpreter started as the user's
script, with everything heavy imported) and *cold* (a bare interpreter that forks and execs).
When the agent dies the link closes, and this process ends the remaining processes of the job.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.forkserver import (
    adoption,
    after_import,
    child,
    fast_exit,
    preload_imports,
    shadow_start,
    sockets,
    store_host,
    tolerant_streams,
    unload,
)
from agent.forkserver.orphans import end_orphans, live_sessions
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.env import FORKSERVER_PID, SHADOWS
from worker_hooks.distributed import ddp_release, rehearsal

# Ignored: a batch system may signal every process of a job, but ranks need the store to save.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Orders(NamedTuple):
    """What the agent tells the forkserver at its start."""

    fd: int  # the link to the agent
    agent_pid: int
    record_id: str
    preload: tuple[str, ...] = ()
    search_path: str | None = None  # what will be sys.path[0] for the script
    pythonpath: str | None = None  # PYTHONPATH as the user had it
    site: str | None = None  # this folder, if cold workers run this interpreter, too


def read_orders(text: str) -> Orders:
    """Parse the orders that the agent wrote (JSON)."""
    fields = json.loads(text)
    fields["preload"] = tuple(fields["preload"])
    return Orders(**fields)


def serve_warm(text: str, root: str) -> None:
    """Run the forkserver; return only in a forked worker that is ready to run the user's script.

    ``root``: the folder of our packages, at the front of ``sys.path``; it is removed again.
    """
    orders = read_orders(text)
    if orders.pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = orders.pythonpath
    sys.path.remove(root)
    comm = child.rename("msrun-fork")
    link = _link(orders)
    fast_exit.prepare()
    started = time.monotonic()
    before = set(sys.modules)
    problem = preload_imports.hidden(orders.search_path, _before_us()) or preload_imports.load(
        orders.preload, orders.search_path
    )
    fast_exit.keep_registrations()
    ddp_release.install()
    gc.freeze()
    threads = preload_imports.threads()
    problem = problem or preload_imports.why_not_fork()
    _tell(link, protocol.Ready(time.monotonic() - started, problem))
    order, _ = _serve(link, orders)
    child.rename(comm)
    link.close()
    if threads > 1:
        child.revive_blas_threads()
    if not os.environ.get("LD_PRELOAD"):  # a profiler there reports when it is unloaded
        fast_exit.arm(set(sys.modules) - before)
    child.adopt(order)
    if rehearsal.is_wanted(os.environ):
        _rehearse()
    sockets.begin()
    shadow_start.begin(root)
    if order.stdout or order.stderr:
        tolerant_streams.make_tolerant()
    unload.unload_ours(root, orders.preload)


def _rehearse() -> None:
    """A new rank's groups only pretend; torch may be imported by now, or later by the script."""
    if rehearsal.C10D in sys.modules:
        rehearsal.install()
    else:
        after_import.call_after_import(rehearsal.C10D, rehearsal.install)


def _before_us() -> set[str]:
    """Modules that were loaded before the first of ours."""
    loaded = list(sys.modules)
    return set(loaded[: loaded.index("agent")])


def serve_cold(text: str) -> None:
    """Run a forkserver that execs; never returns."""
    orders = read_orders(text)
    child.rename("msrun-fork")
    link = _link(orders)
    _tell(link, protocol.Ready(0.0))
    order, attempt = _serve(link, orders)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)  # Python ignores them, and exec would pass that on
    environ = {**os.environ, **order.environ}
    if orders.site is not None and (order.stdout or order.stderr or SHADOWS in environ):
        pythonpath = environ.get("PYTHONPATH")
        environ["MSRUN_STREAMS"] = "" if pythonpath is None else f"={pythonpath}"
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (orders.site, pythonpath)))
    try:
        os.execvpe(order.argv[0], order.argv, environ)
    except OSError as error:
        why = f"cannot run {order.argv[0]}: {error.strerror}"
        _tell(link, protocol.ForkFailed(order.rank, attempt, why))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _link(orders: Orders) -> socket.socket:
    child.continue_without_parent()
    os.set_inheritable(orders.fd, False)  # it came through an exec; no worker may inherit it
    return socket.socket(fileno=orders.fd)


def _serve(link: socket.socket, orders: Orders) -> tuple[protocol.WorkerOrder, int]:
    """Execute orders until the agent is gone; return only in a worker, with its attempt."""
    meant = {signum: signal.signal(signum, signal.SIG_IGN) for signum in STOPS}
    sessions: set[int] = set()  # of the workers that may be alive
    attempt, keeps = -1, False
    spared: set[int] = set()  # those of them that save if the agent dies
    own = {FORKSERVER_PID: str(os.getpid())}
    while True:
        message, fds = wire.receive(link)
        match message:
            case protocol.StartWorkers():
                forked = _fork_workers(link, message, orders.agent_pid, meant)
                if isinstance(forked, int):
                    order = message.workers[forked]
                    return order._replace(environ=order.environ | own), message.attempt
                # replacements may be called off, and all ranks started instead
                is_anew = keeps and not message.keeps
                if attempt not in {-1, message.attempt} or is_anew:
                    kept = live_sessions() if message.keeps else frozenset()
                    sessions &= kept
                    spared &= kept
                attempt, keeps = message.attempt, message.keeps
                sessions.update(outcome.pid for outcome in forked)
            case protocol.StartStore():
                _fork_store(link, message, fds[0], orders.agent_pid)
                os.close(fds[0])
            case protocol.Preload():
                _warm_up(link, message.modules, orders.search_path)
            case protocol.ProtectWorker():
                spared.add(message.pid)
            case None:
                end_orphans(orders.record_id, frozenset(sessions - {0}), frozenset(spared))
                sockets.remove(orders.record_id)
                os._exit(0)
            case _:
                raise wire.ProtocolError(f"not for a forkserver: {message}")


def _tell(link: socket.socket, message: protocol.Message) -> None:
    """Send; if the agent is gone, the next receive says so, and what is left is ended then."""
    with contextlib.suppress(OSError):
        wire.send(link, message)


def _introduce(link: socket.socket, message: protocol.Message) -> None:
    """In a child: be known, or exit. The agent is gone or has given this forkserver up."""
    try:
        wire.send(link, message)
    except OSError:
        os._exit(1)


def _fork_workers(
    link: socket.socket,
    message: protocol.StartWorkers,
    agent_pid: int,
    meant: Mapping[signal.Signals, Any],
) -> int | tuple[adoption.AdoptionResult, ...]:
    attempt = message.attempt

    def introduce(index: int) -> None:
        child.detach(agent_pid)
        for signum, disposition in meant.items():
            signal.signal(signum, disposition)
        _introduce(link, protocol.Forked(message.workers[index].rank, attempt, os.getpid()))

    forked = adoption.fork_adopted(len(message.workers), introduce)
    if isinstance(forked, int):
        order = message.workers[forked]
        try:
            child.become(order)
        except OSError as error:
            _tell(link, protocol.ForkFailed(order.rank, attempt, describe_os_error(error)))
            os._exit(126)
        return forked
    for order, (pid, why) in zip(message.workers, forked, strict=True):
        if not pid:
            _tell(link, protocol.ForkFailed(order.rank, attempt, why))
    return forked


def _fork_store(link: socket.socket, message: protocol.StartStore, fd: int, agent_pid: int) -> None:
    def introduce(_index: int) -> None:
        child.detach(agent_pid)
        _introduce(link, protocol.StoreForked(message.attempt, os.getpid()))

    forked = adoption.fork_adopted(1, introduce)
    if not isinstance(forked, int):
        (store,) = forked
        if not store.pid:
            _tell(link, protocol.StoreForked(message.attempt, pid=0, why=store.why))
        return
    try:
        link.close()
        child.rename("msrun-store")
        store_host.become(fd, message.host, message.port)
    finally:
        os._exit(1)


def _warm_up(link: socket.socket, modules: tuple[str, ...], search_path: str | None) -> None:
    """Import for a restart, without the script's folder: its code must not run here."""
    before = set(sys.modules)
    problem = preload_imports.load(modules, None)
    fast_exit.keep_registrations()
    problem = (
        problem or preload_imports.hidden(search_path, before) or preload_imports.why_not_fork()
    )
    gc.freeze()
    if problem:
        _tell(link, protocol.Ready(0.0, problem))
