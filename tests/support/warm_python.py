"""A Python that has imported torch: processes of tests begin in it within milliseconds.

For programs and jobs whose start is not what a test looks at. The test starts a client
(`WarmPython.words`) as it would start Python. The client hands its arguments, environment, folder
and standard streams to a host, which imported torch once; the host forks, the fork runs the
program, and the client ends as the fork has ended. If the client is killed, so is the fork. If the
program is msrun, its forkserver begins warm, too (`support.warm_job`). Not a test itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import NoReturn

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0  # for what takes a few seconds on an idle machine
ALONE_S = 400.0  # for a training without msrun, which may take ten
LONGEST = 1 << 18  # a message, in bytes
PID_TO = "MSRUN_TEST_PID_TO"  # the descriptor to which a client writes the program's process id
ENVIRON = "MSRUN_TEST_ENVIRON"  # the program's environment as JSON, where it is not the client's
NODE = "MSRUN_TEST_NODE"  # a process in whose namespaces the program runs
ROOM = "MSRUN_TEST_ROOM"  # a variable of the host's that makes room for a program's environment
ROOM_BYTES = 64 << 10


class WarmPython:
    """A host, and the words that start a program in it."""

    def __init__(self, *modules: str) -> None:
        """Import torch, and these modules."""
        self.name = f"msrun-test-python-{os.getpid()}-{time.monotonic_ns()}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "host", self.name, *modules],
            # no thread of a host is in its forks
            env={**os.environ, "OMP_NUM_THREADS": "1", ROOM: "." * ROOM_BYTES},
            stdin=subprocess.PIPE,  # its end is the host's end
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    @property
    def words(self) -> tuple[str, ...]:
        """In place of ``sys.executable``; ``-c CODE`` or a file follow, and arguments."""
        return (sys.executable, "-S", "-E", __file__, self.name)

    def train(self, folder: Path, ranks: int, script: Path, *words: object) -> list[str]:
        """What the ranks of a training that nobody guards print, each to its end with 0."""
        return train(self.words, folder, ranks, script, *words)

    def end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()


def train(
    python: tuple[str, ...], folder: Path, ranks: int, script: Path, *words: object
) -> list[str]:
    """What the ranks of a training that nobody guards print, each to its end with 0."""
    from support.free_ports import free_port  # neither host nor client find it

    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",  # as torchrun and msrun do: sums depend on it
        "PYTHONPATH": paths,
    }
    processes = [
        subprocess.Popen(
            [*python, script, *map(str, words)],
            env={
                **os.environ,
                **told,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
            },
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [each.communicate(timeout=ALONE_S)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.communicate()
    assert [each.returncode for each in processes] == [0] * ranks, said
    return said


# --- the client -------------------------------------------------------------------------------------


def client_environ(environ: dict[str, str], pid_to: int, node: int = 0) -> dict[str, str]:
    """For a client that is no part of what it starts, but says its process id.

    Args:
        environ: the program's.
        pid_to: a descriptor; the client closes it.
        node: a process in whose namespaces the program runs; 0: in those of the host.
    """
    return {ENVIRON: json.dumps(environ), PID_TO: str(pid_to), NODE: str(node)}


def ask(name: str, words: list[str]) -> None:
    """Have the host run a program with what is this process's own; end as it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(f"\0{name}")
        pid_to, environ = os.environ.get(PID_TO), os.environ.get(ENVIRON)
        told = {
            "words": words,
            "environ": json.loads(environ) if environ else dict(os.environ),
            "cwd": os.getcwd(),
            "node": int(os.environ.get(NODE, "0")),
        }
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        socket.send_fds(link, [json.dumps(told).encode()], [0, 1, 2])
        pid = link.recv(LONGEST)
        if pid_to:
            os.write(int(pid_to), pid)
            os.close(int(pid_to))
        for fd in (0, 1, 2):  # only the program's streams count
            os.close(fd)
        code = int(link.recv(LONGEST) or 1)
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# --- the host ---------------------------------------------------------------------------------------


def serve(name: str) -> list[str]:
    """Fork for each client; returns the program's words, and only in a fork."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"\0{name}")
        door.listen()
        print("ready", flush=True)
        clients: dict[int, tuple[int, socket.socket]] = {}  # pidfd of a fork -> its pid, its client
        while True:
            links = [link for _, link in clients.values()]
            ready, _, _ = select.select([0, door, *clients, *links], [], [])
            if 0 in ready:
                os._exit(0)
            for pidfd in [*clients]:
                look_after(pidfd, clients, ready)
            if door not in ready:
                continue
            link, _ = door.accept()
            message, fds, _, _ = socket.recv_fds(link, LONGEST, 3)
            told = json.loads(message)
            pid = os.fork()
            if pid == 0:
                if told["node"]:
                    enter(told["node"], link, fds)
                link.close()
                for pidfd, (_, other) in clients.items():
                    os.close(pidfd)
                    other.close()
                return become(told, fds)
            for fd in fds:
                os.close(fd)
            if not told["node"]:
                link.send(str(pid).encode())
            clients[os.pidfd_open(pid)] = pid, link


def look_after(
    pidfd: int, clients: dict[int, tuple[int, socket.socket]], ready: list[object]
) -> None:
    """Tell a client that its fork has ended; end the fork of a client that is gone."""
    pid, link = clients[pidfd]
    if pidfd in ready:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError), link:
            link.send(str(code).encode())
        os.close(pidfd)
        del clients[pidfd]
    elif link in ready:  # it says nothing more
        os.kill(pid, signal.SIGKILL)


def enter(node: int, link: socket.socket, fds: list[int]) -> None:
    """Returns in a child, in the namespaces of a process; its parent tells of it and ends alike."""
    enters = runpy.run_path(str(ROOT / "msrun" / "cluster" / "enter.py"))  # without msrun's modules
    enters["enter"](node)
    pid = os.fork()
    if pid == 0:
        return
    link.send(str(pid).encode())
    for fd in fds:
        os.close(fd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        enters["end_alike"](code)
    os._exit(code)


def become(told: dict, fds: list[int]) -> list[str]:
    """Take over what the client handed on."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(told["cwd"])
    set_environ(told["environ"])
    return told["words"]


def set_environ(environ: dict[str, str]) -> None:
    """Have this environment, also for who reads it in ``/proc``.

    The kernel shows the memory in which the process found its environment when it began.
    """
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # another TMPDIR
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(each) for each in fields[47:49])  # env_start and env_end
    shown = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
    if len(shown) <= end - start:
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def put_in_front(folder: str) -> None:
    """Search modules as a Python of this environment does for a program of this folder."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder, *filter(None, paths)]


def program(words: list[str]) -> tuple[ModuleType, str, str]:
    """The module, the source and the file of ``-c CODE`` or of a script."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        put_in_front("")
        return main, words[1], "<string>"
    main.__file__ = os.path.abspath(words[0])
    sys.argv = words
    put_in_front(str(Path(words[0]).resolve().parent))
    return main, Path(words[0]).read_text(), main.__file__


def run(words: list[str]) -> NoReturn:
    """Run a program to its end; nothing is torn down, which would take half a second."""
    code: object = 0
    try:
        main, source, file = program(words)
        exec(compile(source, file, "exec", dont_inherit=True), vars(main))
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  as Python does
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    if sys.argv[1] != "host":
        ask(sys.argv[1], sys.argv[2:])
    import torch._dynamo  # noqa: F401  what programs find

    sys.path[0] = str(ROOT)
    for module in sys.argv[3:]:
        importlib.import_module(module)
    del sys.path[0]
    gc.freeze()
    asked = serve(sys.argv[2])
    if asked[:2] != ["-m", "msrun"]:
        run(asked)
    sys.path.insert(0, str(ROOT / "tests"))
    from support import warm_job

    del sys.path[0]
    warm_job.run_msrun(asked[2:])
