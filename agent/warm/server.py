"""The forkserver: waits for orders and forks workers that become children of the agent.

A worker is forked twice: a short-lived middle process forks it and leaves, so the kernel hands the
worker to the nearest subreaper, the agent, which then reaps it itself and knows its true exit
status. One middle process serves a whole order, so eight workers cost nine forks.

Two ways of life: *warm* (inside ``sitecustomize`` of an interpreter started as the user's script,
everything heavy imported) and *cold* (a bare interpreter that forks and execs).
When the agent dies the link closes, and this process ends what is left of the job.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass

from agent.warm import child, leave, store
from worker_hooks import protocol
from worker_hooks.env import RUNS

OURS = {"agent", "worker_hooks"}
SWEEPS = 50  # rounds of looking for processes left over, 20 ms apart: one second


@dataclass(frozen=True, slots=True)
class Orders:
    """What the agent tells the forkserver at its birth."""

    fd: int  # the link to the agent
    agent_pid: int
    record_id: str
    preload: tuple[str, ...] = ()
    search_path: str | None = None  # what will be sys.path[0] for the script
    pythonpath: str | None = None  # PYTHONPATH as the user had it


def read_orders(text: str) -> Orders:
    """Orders as the agent wrote them (JSON)."""
    fields = json.loads(text)
    fields["preload"] = tuple(fields["preload"])
    return Orders(**fields)


def serve_warm(text: str, root: str) -> None:
    """Be the forkserver; return only in a forked worker, ready to run the user's script.

    Args:
        text: orders as JSON.
        root: the folder of our packages, at the front of ``sys.path``; it is taken out again.
    """
    orders = read_orders(text)
    if orders.pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = orders.pythonpath
    sys.path.remove(root)
    comm = child.rename("msrun-fork")
    link = _link(orders)
    leave.prepare()
    started = time.monotonic()
    before = set(sys.modules)
    problem = _hidden(orders.search_path) or _import(orders.preload, orders.search_path)
    gc.freeze()
    threads = _threads()
    problem = problem or _why_not_fork()
    protocol.send(link, protocol.Ready(time.monotonic() - started, problem))
    order, _ = _serve(link, orders)
    child.rename(comm)
    link.close()
    if threads > 1:
        child.revive_blas_threads()
    if not os.environ.get("LD_PRELOAD"):  # a profiler or allocator there reports as it is unloaded
        leave.arm(set(sys.modules) - before)
    child.adopt(order)
    _vanish(root)


def _hidden(search_path: str | None) -> str:
    """Why our imports hide the user's: a file beside the script may shadow a module of Python.

    A fresh interpreter finds that file first; here Python's own is loaded already.
    """
    loaded = list(sys.modules)
    for name in loaded[loaded.index("agent") :]:
        place = os.path.join(search_path or "", name)
        if name.split(".")[0] in OURS or "." in name:
            continue
        if os.path.isfile(f"{place}.py") or os.path.isfile(f"{place}/__init__.py"):
            return f"{place} hides Python's own {name}"
    return ""


def _vanish(root: str) -> None:
    """Leave no trace of our packages: the user may have an ``agent`` of their own."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    for place in list(sys.path_importer_cache):
        if place.startswith(root) and place not in sys.path:
            del sys.path_importer_cache[place]


def serve_cold(text: str) -> None:
    """Be a forkserver that execs; never returns."""
    orders = read_orders(text)
    child.rename("msrun-fork")
    link = _link(orders)
    protocol.send(link, protocol.Ready(0.0))
    order, attempt = _serve(link, orders)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)  # ignored by Python, and exec would pass that on
    try:
        os.execvpe(order.argv[0], order.argv, {**os.environ, **order.environ})
    except OSError as error:
        why = f"cannot run {order.argv[0]}: {error.strerror}"
        protocol.send(link, protocol.ForkFailed(order.rank, attempt, why))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _link(orders: Orders) -> socket.socket:
    os.set_inheritable(orders.fd, False)  # it came through an exec; no worker's exec may have it
    return socket.socket(fileno=orders.fd)


def _serve(link: socket.socket, orders: Orders) -> tuple[protocol.WorkerOrder, int]:
    """Follow orders until the agent is gone; return only in a worker, with its attempt."""
    while True:
        message, fds = protocol.receive(link)
        match message:
            case protocol.StartWorkers():
                order = _fork_workers(link, message, orders.agent_pid)
                if order is not None:
                    return order, message.attempt
            case protocol.StartStore():
                _fork_store(link, message, fds[0], orders.agent_pid)
                os.close(fds[0])
            case protocol.Preload():
                problem = _import(message.modules, orders.search_path) or _why_not_fork()
                gc.freeze()
                if problem:
                    protocol.send(link, protocol.Ready(0.0, problem))
            case None:
                end_leftovers(orders.record_id)
                os._exit(0)
            case _:
                raise protocol.ProtocolError(f"not for a forkserver: {message}")


def _fork_workers(
    link: socket.socket, message: protocol.StartWorkers, agent_pid: int
) -> protocol.WorkerOrder | None:
    try:
        middle = os.fork()
    except OSError as error:
        for order in message.workers:
            why = f"fork: {error.strerror}"
            protocol.send(link, protocol.ForkFailed(order.rank, message.attempt, why))
        return None
    if middle:
        os.waitpid(middle, 0)
        return None
    for order in message.workers:
        try:
            pid = os.fork()
        except OSError as error:
            why = f"fork: {error.strerror}"
            protocol.send(link, protocol.ForkFailed(order.rank, message.attempt, why))
            continue
        if pid == 0:
            try:
                child.become(order, agent_pid)
            except OSError as error:
                why = f"{error.strerror}: {error.filename}" if error.filename else str(error)
                protocol.send(link, protocol.ForkFailed(order.rank, message.attempt, why))
                os._exit(126)
            return order
        protocol.send(link, protocol.Forked(order.rank, message.attempt, pid))
    os._exit(0)


def _fork_store(link: socket.socket, message: protocol.StartStore, fd: int, agent_pid: int) -> None:
    try:
        middle = os.fork()
    except OSError as error:
        why = f"fork: {error.strerror}"
        protocol.send(link, protocol.StoreForked(message.attempt, 0, why))
        return
    if middle:
        os.waitpid(middle, 0)
        return
    try:
        pid = os.fork()
    except OSError as error:
        protocol.send(link, protocol.StoreForked(message.attempt, 0, f"fork: {error.strerror}"))
        os._exit(1)
    if pid == 0:
        try:
            child.detach(agent_pid)
            link.close()
            child.rename("msrun-store")
            store.become(fd, message.host, message.port)
        finally:
            os._exit(1)
    protocol.send(link, protocol.StoreForked(message.attempt, pid))
    os._exit(0)


def _import(modules: tuple[str, ...], search_path: str | None) -> str:
    """Import what the script will import, found as the script would find it.

    Returns why this process must not be forked, else nothing: a module that fails half-way leaves
    others behind, and would fail differently when the script imports it again.
    """
    if search_path is not None:
        sys.path.insert(0, search_path)
    gc.disable()  # nothing is garbage yet; collecting would only walk what grows
    try:
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001  the user's modules may raise anything
                # `from torch import no_grad` looks like a module to a parser
                absent = error.name if isinstance(error, ModuleNotFoundError) else None
                if absent is None or not f"{module}.".startswith(f"{absent}."):
                    return f"importing {module} failed: {error!r}"
        return ""
    finally:
        gc.enable()
        if search_path is not None and sys.path and sys.path[0] == search_path:
            del sys.path[0]


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _why_not_fork() -> str:
    """Why a fork of this process would not be like a fresh one; empty if it would be.

    OpenBLAS (numpy) keeps idle threads, ends them before a fork and makes them anew, so a fork
    that does nothing comes first. Any other thread may hold a lock that no fork would release.
    """
    if _threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if _threads() > 1:
            return f"a preloaded module started {_threads() - 1} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    return ""


def end_leftovers(record_id: str) -> None:
    """Kill every process of this run, wherever it went: known by the id in its environment."""
    for _ in range(SWEEPS):
        left = [pid for pid in _pids() if pid != os.getpid() and _belongs(pid, record_id)]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself meanwhile
        time.sleep(0.02)  # a killed process that is nobody's child here gives no event


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _belongs(pid: int, record_id: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
        mark = f"{RUNS}=".encode()
        runs = [entry[len(mark) :].split(b":") for entry in entries if entry.startswith(mark)]
        return any(record_id.encode() in run for run in runs)
    except OSError:
        return False  # gone, or somebody else's


if __name__ == "__main__":
    serve_cold(sys.argv[1])
