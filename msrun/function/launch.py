"""``msrun.launch``: run a function in N ranks of this machine and get what they return."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agent.text.wording import ranged
from msrun.function.failure import LaunchError
from msrun.function.processes import Processes
from worker_hooks.contract.env import AGENT_STORE, HOOKS, JobEnv, WorkerEnv

GRACE_S = 5.0
HOST = "127.0.0.1"


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nprocs: int = 4,
    start: Literal["fork", "spawn"] = "fork",
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> dict[int, Any]:
    """Run ``fn(*args, **kwargs)`` in each of ``nprocs`` ranks; for notebooks and tests.

    A rank has the environment that a worker of torchrun has, so ``init_process_group("gloo")``
    works as it is. What it prints is shown with ``[rank N]:`` in front. There is no protection
    here: no rank is replaced, nothing is saved, and the first failure ends all ranks. For a
    training that must survive, put it into a script and run that with the command ``msrun``.

    Between this process and its own children functions, arguments and results are pickled; nothing
    is read from anywhere else. A tensor is copied.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by name.
        nprocs: how many ranks.
        start: ``"fork"``: copies of this process, which may run any function, also of a notebook;
            other threads of this process, and locks that they hold, are not copied well.
            ``"spawn"``: fresh interpreters, for a function that can be imported.
        timeout_s: so long all ranks may take together; ``None``: any time.
        grace_s: how long a rank that is ended has between SIGTERM and SIGKILL.

    Returns:
        What each rank returned.

    Raises:
        LaunchError: a rank failed; it names the first cause, and what followed.
        TimeoutError: they took longer than ``timeout_s``.
        RuntimeError: this process uses CUDA already, and a forked rank could not.
        TypeError: the function or its arguments cannot be pickled, for ``"spawn"``.
        ValueError: a wrong argument.
    """
    if not callable(fn):
        raise TypeError(f"launch() runs a function, not {fn!r}")
    if nprocs < 1 or start not in {"fork", "spawn"}:
        raise ValueError(f"launch() takes nprocs above 0, and fork or spawn: {nprocs}, {start!r}")
    given = dict(kwargs or {})
    pickled = _pickled(fn, args, given) if start == "spawn" else b""
    if start == "fork":
        _check_cuda()
    with _reserved_port() as reserved:
        environs = [_environ(rank, nprocs, reserved.getsockname()[1]) for rank in range(nprocs)]
        with Processes(environs, grace_s) as processes:
            if start == "fork":
                processes.fork(lambda: fn(*args, **given))
            else:
                processes.spawn(pickled)
            alive, failures = processes.wait(timeout_s)
        if failures:
            raise LaunchError(failures)
        if alive:
            ranks = ranged(process.rank for process in alive)
            raise TimeoutError(f"{ranks} did not return within {timeout_s:g} s")
        return processes.values()


def _pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, tuple(args), kwargs))
    except Exception as error:
        raise TypeError(
            f"a fresh interpreter cannot get {fn!r} and its arguments ({error}): "
            'use a function of a module, or start="fork"'
        ) from error


def _check_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "this process has initialized CUDA, which a forked rank cannot use: "
            'launch(..., start="spawn"), or use CUDA in the function only'
        )


def _reserved_port() -> socket.socket:
    """A free port that no other program gets.

    Linux lets rank 0 listen there all the same: both reuse the address, and this one never listens.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, 0))
    return reserved


def _environ(rank: int, nprocs: int, port: int) -> dict[str, str]:
    """A worker's variables; nobody guards it, and rank 0 hosts the store."""
    job = JobEnv(
        run_id="none",
        world_size=nprocs,
        local_world_size=nprocs,
        group_rank=0,
        group_world_size=1,
        role="default",
        master_addr=HOST,
        master_port=port,
        max_restarts=0,
        signals=(),
    )
    worker = WorkerEnv(rank=rank, local_rank=rank, restart_count=0, error_file="")
    environ = job.environ(os.environ, "") | worker.environ()
    return environ | {AGENT_STORE: str(False), HOOKS: ""}
