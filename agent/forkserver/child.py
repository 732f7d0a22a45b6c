"""What a forked process does to become a worker: it sets up what a fresh one would find."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from types import ModuleType
from typing import Any

from worker_hooks.contract.protocol import WorkerOrder

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


def rename(name: str) -> str:
    """Set this thread's short name (``ps -o comm``) and return the old one."""
    with open("/proc/self/comm") as file:
        old = file.read().rstrip("\n")
    _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    return old


def continue_without_parent() -> None:
    """Be sent SIGCONT when the parent dies: if this process is stopped then, it must end, too."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def detach(agent_pid: int) -> None:
    """Lead an own session, as a child of the agent, and die with the agent.

    Raises nothing: without an agent this process exits here.
    """
    _await_adoption(agent_pid)
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:  # it died before the kernel was told
        os._exit(1)


def _await_adoption(agent_pid: int) -> None:
    """Wait until the middle process is gone and the kernel has made the agent our parent.

    Or until the agent is gone. Then the parent may be a process that never ends, such as init.
    """
    middle = os.getppid()
    if middle == agent_pid:
        return
    waiting = select.poll()  # not select(): a descriptor may be above 1023
    opened: list[int] = []
    try:
        for pid in (middle, agent_pid):
            opened.append(os.pidfd_open(pid))
            waiting.register(opened[-1], select.POLLIN)
        waiting.poll(60_000)
    except ProcessLookupError:
        return
    finally:
        for fd in opened:
            os.close(fd)


def become(order: WorkerOrder) -> None:
    """Set up what the order says: CPUs, streams.

    Raises:
        OSError: the CPUs are not available.
    """
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    _open_streams(order)


def _open_streams(order: WorkerOrder) -> None:
    if order.stdout:
        _append_to(order.stdout, 1)
    if order.stderr == order.stdout:
        if order.stdout:
            os.dup2(1, 2)  # one open file: the two streams keep their order
    elif order.stderr:
        _append_to(order.stderr, 2)


def _append_to(path: str, stream: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:  # a full disk or a missing folder: the agent reports it, the job continues
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(fd, stream)
    os.close(fd)


def adopt(order: WorkerOrder) -> None:
    """In a warm worker: set what a fresh interpreter would have read by itself."""
    os.environ.update(order.environ)
    own = len(sys.orig_argv) - len(sys.argv) + 1  # the interpreter's arguments, up to the script
    sys.argv[1:] = order.argv[own:]
    sys.orig_argv[own:] = order.argv[own:]
    _renew_main()
    _diverge()


def _renew_main() -> None:
    """Replace ``__main__``, which was frozen with everything else, by one that is collected.

    Otherwise a cycle through the script's globals, as every function makes one, is never freed.
    """
    old, new = sys.modules["__main__"], ModuleType("__main__")
    vars(new).update(vars(old))
    sys.modules["__main__"] = new


def _diverge() -> None:
    """Seed again what the fork copied and each process must have for itself, except ``random``."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # not torch.seed(): that would queue a call for CUDA, too
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()  # noqa: SLF001  Python keeps the parent's


def revive_blas_threads() -> None:
    """Start OpenBLAS's idle threads again, which OpenBLAS ended before the fork."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                count = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                if count is not None:
                    getattr(library, f"{prefix}_set_num_threads{suffix}")(count())
