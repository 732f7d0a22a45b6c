"""msrun in a fork of a Python that has imported torch, with a forkserver that is one, too.

Everything is as it is after a start by ``exec``, but for what importing torch takes: two of the
three seconds of processor time of a short job. Before msrun begins, the fork makes spare processes
by further forks, and each waits until msrun starts a Python. The spare one becomes it then: the
forkserver of a job, which runs the same ``sitecustomize``, or a job's msrun in a drill. Any other
start is a real one, and so is one too many. Not a test itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from support.warm_python import LONGEST, put_in_front, set_environ

DRILL_STARTS = 16  # msrun, in one drill
OPTIONS = ("-u",)  # of an interpreter whose start is imitated here
ABOVE = 512  # descriptors, where nothing was opened yet
KEPT: dict[str, ModuleType] = {}


def run_msrun(words: list[str]) -> None:
    """``python -m msrun WORDS``; returns only in a worker of the job, at its end.

    Raises:
        SystemExit: of a worker.
    """
    os.setsid()
    is_drill = words[:1] == ["drill"]
    spares: dict[int, socket.socket] = {}
    for _ in range(DRILL_STARTS if is_drill else 1):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for link in (ours, *spares.values()):
                link.close()
            become_what_is_asked(theirs)
            return
        theirs.close()
        spares[pid] = ours
    put_in_front(os.getcwd())
    sys.argv = ["-m", *words]
    starts = "msrun.trials.process" if is_drill else "agent.workers.forkserver_client"
    vars(importlib.import_module(starts))["subprocess"] = Starter(spares)
    if is_drill:
        hide(spares)
    runpy._run_module_as_main("msrun")


def hide(spares: dict[int, socket.socket]) -> None:
    """A drill ends whatever else it finds below it."""
    processes = importlib.import_module("agent.workers.processes")
    adopted = processes.adopted
    vars(processes)["adopted"] = lambda spared: adopted(spared | spares.keys())


class Starter:
    """In place of the module ``subprocess``."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, spares: dict[int, socket.socket]) -> None:
        """Use each of the spare processes once.

        Args:
            spares: the link to each, by its process id; those that were used are removed.
        """
        self._spares = spares

    def Popen(  # noqa: N802  as there
        self,
        argv: list[str],
        *,
        env: dict[str, str],
        stdout: Any,
        stderr: Any,
        start_new_session: bool,
        stdin: int | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> subprocess.Popen:
        """Start a Python in a spare process, if there is one, and if it is such a Python."""
        assert start_new_session
        own = [word for word in argv[1:3] if word in OPTIONS]
        first = argv[1 + len(own) :][:2]
        is_known = first == ["-m", "msrun"] or not first[0].startswith("-")
        if not (self._spares and is_known and argv[0] == sys.executable):
            return subprocess.Popen(
                argv,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=start_new_session,
            )
        pid = next(iter(self._spares))
        told = {"argv": argv, "options": own, "env": dict(env), "pass_fds": pass_fds}
        with self._spares.pop(pid) as link, open(os.devnull) as nothing:
            fds = [nothing if stdin == subprocess.DEVNULL else sys.stdin, stdout or 1, stderr or 2]
            numbers = [fd if isinstance(fd, int) else fd.fileno() for fd in fds]
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
            socket.send_fds(link, [json.dumps(told).encode()], [*numbers, *pass_fds])
            link.recv(1)  # a signal to its group reaches it from now on
        return Started(argv, pid)


class Started(subprocess.Popen):
    """A child that was not made by ``exec``."""

    def __init__(self, argv: list[str], pid: int) -> None:
        self.args, self.pid, self.returncode = argv, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock, self._child_created = threading.Lock(), True


def become_what_is_asked(link: socket.socket) -> None:
    """In a spare process: wait to become a Python; returns at the end of a worker's script.

    Raises:
        SystemExit: the script ended with it.
    """
    message, fds, _, _ = socket.recv_fds(link, LONGEST, 8)
    if not message:
        os._exit(0)  # nobody needs it
    told = json.loads(message)
    words = told["argv"][1 + len(told["options"]) :]
    is_msrun = words[:2] == ["-m", "msrun"]
    set_environ(told["env"])
    if not is_msrun:  # else it does so itself
        os.setsid()
    take_over(fds, (0, 1, 2, *told["pass_fds"]), link)
    if is_msrun:
        run_msrun(words[2:])
        return
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.orig_argv[:], sys.argv = told["argv"], words
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    keep_libraries()
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")  # serves; what follows is in a worker
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":  # the user has none
            raise
    run_script()


def take_over(fds: list[int], numbers: tuple[int, ...], link: socket.socket) -> None:
    """Have the descriptors under the numbers they had in msrun, and tell it."""
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, ABOVE) for fd in fds]
    told = fcntl.fcntl(link.fileno(), fcntl.F_DUPFD, ABOVE)
    link.detach()
    os.closerange(3, ABOVE)
    for fd, number in zip(fds, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    with contextlib.suppress(BrokenPipeError):  # it is dead already
        os.write(told, b".")
    os.close(told)


def keep_libraries() -> None:
    """As after a real start: a worker does not tear down what its forkserver has imported."""
    KEPT.update(
        (name, module)
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "__main__"}
        and not name.startswith("torch.distributed")
    )

    def forget() -> None:
        for name, module in KEPT.items():
            if sys.modules.get(name) is module:
                sys.modules[name] = None  # type: ignore[assignment]  # as the interpreter does

    atexit.register(forget)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(KEPT))


def run_script() -> None:
    """As Python runs ``script.py``."""
    script = os.path.abspath(sys.argv[0])
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    sys.path.insert(0, str(Path(script).resolve().parent))
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    try:
        exec(code, vars(main))
    except Exception as error:  # noqa: BLE001  Python says what it was, without this frame
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(inner), inner)
        sys.exit(1)
