"""The switch that the nodes' cards end in: a bridge in a network namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msrun.cluster.namespaces import NEW_WORLD, PATH, ROOTS_WORLD, ClusterError
from msrun.cluster.program import CLOSE_S, LOOK_S, NodeProgram, only_child

ENTER = Path(__file__).with_name("enter.py")
# The cluster's own namespaces. Word: a hosts file.
SWITCH = """
set -e
mount -t tmpfs tmpfs /run
mount --bind "$1" /etc/hosts
mkdir /run/netns
ip link add br0 type bridge
ip link set br0 up
echo up
exec cat
"""


class Switch:
    """The namespaces that all nodes are in, and the programs that were started in them."""

    def __init__(
        self, folder: Path, environ: Mapping[str, str], hosts: Path, *, as_root: bool = False
    ) -> None:
        """Turn it on. ``as_root``: with this machine's users, for daemons that change theirs.

        Raises:
            ClusterError: the kernel refuses.
        """
        self.folder, self.environ, self._as_root = folder, {**environ, "PATH": PATH}, as_root
        self.programs: list[NodeProgram] = []
        self.process = subprocess.Popen(
            [*(ROOTS_WORLD if as_root else NEW_WORLD), "sh", "-c", SWITCH, "switch", str(hosts)],
            env=self.environ,
            stdin=subprocess.PIPE,  # it ends when this ends: with the process that has made it
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if self.process.stdout.readline() != b"up\n":
            said = self.process.stderr.read().decode().strip()
            self.close()
            raise ClusterError(f"no switch: {said}")
        self.pid = only_child(self.process.pid)

    def close(self) -> None:
        """Kill all processes of all nodes; none is left on return."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.await_end(self.process)
        with self.process:
            pass  # closes the rest
        for program in self.programs:
            program.close()

    def await_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of what was killed with all in its namespace.

        Raises:
            subprocess.TimeoutExpired: it does not end.
        """
        deadline = time.monotonic() + CLOSE_S
        while process.poll() is None and time.monotonic() < deadline:
            for program in self.programs:
                program.reap()
            time.sleep(LOOK_S)
        process.wait(0)

    def enter(
        self,
        pid: int,
        argv: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> NodeProgram:
        """Start a program in the namespaces of ``pid``.

        Raises:
            ClusterError: it cannot be started there.
        """
        head = (sys.executable, "-I", "-S", ENTER, pid, cwd or self.folder)

        def words(told: int) -> tuple[Sequence[object], Mapping[str, str]]:
            return (*head, told, *argv), env or self.environ

        return self.start(words, None, stdout, stderr, stdin)

    def start(
        self,
        words: Callable[[int], tuple[Sequence[object], Mapping[str, str]]],
        cwd: Path | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> NodeProgram:
        """Start what starts a program on a node, and ends alike.

        Args:
            words: its words and its environment, by the descriptor that takes the program's pid.
            stdout: gets what the program writes; by default a file of its own.

        Raises:
            ClusterError: there is no program.
        """
        number = len(self.programs)
        out, err = stdout or self.folder / f"{number}.out", stderr or self.folder / f"{number}.err"
        reads, writes = os.pipe()
        argv, env = words(writes)
        with open(reads) as told, open(out, "ab") as to_out, open(err, "ab") as to_err:
            try:
                process = subprocess.Popen(
                    [str(word) for word in argv],
                    env=dict(env),
                    cwd=cwd,
                    stdin=stdin,
                    stdout=to_out,
                    stderr=to_err,
                    pass_fds=(writes,),
                    start_new_session=True,
                )
            finally:
                os.close(writes)
            program = NodeProgram(process, int(told.read() or 0), out, err)
        self.programs.append(program)
        if not program.pid:
            process.wait()
            raise ClusterError(program.errors())
        return program

    def tool(self, *words: str, said: str = "") -> None:
        """Run a short command beside the switch, as its administrator.

        Raises:
            ClusterError: it failed.
        """
        users = () if self._as_root else ("-U", "--preserve-credentials")
        inside = ("nsenter", "-t", str(self.pid), *users, "-m", "-n")
        done = subprocess.run(
            [*inside, *words],
            env=self.environ,
            input=said,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"{' '.join(words)}: {done.stderr.strip()}")
