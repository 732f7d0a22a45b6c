"""Nodes of a cluster on one machine, made of namespaces; no root is needed.

A node has its own host name, processes, network card, /dev/shm and /run; the rest of the file
system is shared. The cards end in a bridge, the switch, in one more network namespace. A process of
the cluster waits for its standard input to end: all is gone when the test process is, by whatever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from support.jobs import DEADLINE_S, Launcher, marked, poll

ENTER = Path(__file__).with_name("enter.py")
NEEDED = ("unshare", "nsenter", "mount", "umount", "hostname", "ip")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
ROOTS_WORLD = ("unshare", "-nm", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
NEW_WORLD = (ROOTS_WORLD[0], "-Ur", *ROOTS_WORLD[1:])

# The cluster's own namespaces. Words: a hosts file, the nodes' names.
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
# A node's network, unless it is there, and its namespaces. Words: name, port, address, MAC, INIT.
BOOT = """
set -e
net=/run/netns/$1
if ! [ -e "$net" ]; then
  touch "$net"
  unshare --net="$net" true
  ip link add "$2" type veth peer name eth0 address "$4" netns "$1"
  ip -n "$1" -batch - <<END
link set lo up
address add $3/24 dev eth0
link set eth0 addrgenmode none up
END
  ip link set "$2" addrgenmode none master br0 up
fi
exec nsenter --net="$net" unshare --uts --mount --pid --fork --kill-child --mount-proc \
  sh -c "$5" init "$1"
"""
# A node's first process; who is left behind by a parent becomes its child and is reaped unseen.
INIT = """
set -e
hostname "$1"
umount -l /run
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys || true
echo up
exec env --ignore-signal=CHLD cat
"""
LOSS = """
table inet fault {{
  chain input {{
    type filter hook input priority 0;
    iifname "eth0" {share} drop;
  }}
}}
"""


class RefusedError(Exception):
    """A tool was missing or said no."""


@functools.cache
def refusal() -> str:
    """Why no cluster can be made here, in a sentence, or nothing."""
    missing = [name for name in NEEDED if not shutil.which(name, path=PATH)]
    if missing:
        return f"to make nodes of namespaces {' and '.join(missing)} would have to be installed"
    tried = "mount -t tmpfs tmpfs /run && ip link add try0 type veth peer name try1 && hostname try"
    said = subprocess.run(
        [*NEW_WORLD, "sh", "-c", tried],
        env={"PATH": PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode:
        return f"nodes of namespaces are refused to this user: {said.stderr.strip()}"
    return ""


@dataclass
class Handle:
    """A program on a node."""

    process: subprocess.Popen  # ends as the program ends
    pid: int  # the program's, as the test process sees it
    out: Path
    err: Path

    def wait(self, within_s: float = DEADLINE_S) -> int:
        """Its exit code, or minus the signal that it died of."""
        return self.process.wait(within_s)

    def signal(self, signum: int) -> None:
        """Send it a signal from outside; nothing if it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def say(self, line: str) -> None:
        """A line on its standard input, of a program that was run with a pipe there."""
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def output(self) -> str:
        return self.out.read_text(errors="replace")

    def errors(self) -> str:
        return self.err.read_text(errors="replace")

    def await_output(self, text: str, within_s: float = DEADLINE_S) -> None:
        """Wait until it has written ``text``; fails when it has ended without."""

        def written() -> bool:
            ended = self.process.poll() is not None
            found = text in self.output()
            assert found or not ended, f"{self.output()}\n{self.errors()}"
            return found

        poll(written, within_s)

    def close(self) -> None:
        self.process.wait(DEADLINE_S)
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):  # words that nobody has read
                self.process.stdin.close()


@dataclass
class Node:
    """A machine of the cluster: on after the cluster's start."""

    cluster: Cluster
    index: int
    init: Handle | None = None  # what makes it live
    pid: int = 0  # of its first process

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.index + 1}"

    @property
    def folder(self) -> Path:
        """Its temporary and state folders are here; other nodes can read them, too."""
        return self.cluster.folder / self.name

    @property
    def _port(self) -> str:
        """The other end of its cable, in the switch."""
        return f"port{self.index}"

    def run(
        self,
        argv: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> Handle:
        """Start a program; ``env`` is added to `environ`, its words go to files of its own."""
        assert self.init, f"{self.name} is off"
        return self.cluster.enter(
            self.pid,
            argv,
            {**self.environ(), **(env or {})},
            cwd or self.folder,
            stdout,
            stderr,
            stdin,
        )

    def environ(self) -> dict[str, str]:
        """What its programs find in their environment."""
        return self.cluster.launcher.env(
            TMPDIR=str(self.folder / "tmp"), XDG_STATE_HOME=str(self.folder / "state")
        )

    def boot(self) -> None:
        """Turn it on, which it must not be; a cable that was cut is still cut, unless by poweroff."""
        self.start()
        self.await_up()

    def start(self) -> None:
        """Begin to boot."""
        assert not self.init, f"{self.name} is on"
        mac = f"02:00:00:00:00:{self.index + 1:02x}"  # a card keeps it: peers remember it
        words = (self.name, self._port, self.address, mac, INIT)
        for name in ("tmp", "state"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.init = self.cluster.enter(
            self.cluster.pid, ["sh", "-c", BOOT, "boot", *words], stdin=subprocess.PIPE
        )

    def await_up(self) -> None:
        self.init.await_output("up\n")
        self.pid = child(self.init.pid)

    def kill(self) -> None:
        """Kill its processes; its kernel lives on and tells their peers. All are dead on return."""
        init, self.init = self.init, None
        assert init, f"{self.name} is off"
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(self.pid, signal.SIGKILL)
        init.close()

    def cut(self) -> None:
        """Pull its cable out of the switch: silence, also between it and the others' kernels."""
        self.cluster.tool("ip", "link", "set", self._port, "down")

    def mend(self) -> None:
        self.cluster.tool("ip", "link", "set", self._port, "up")

    def poweroff(self) -> None:
        """Nobody is told, and its kernel forgets all."""
        self.cut()
        self.kill()
        self.cluster.tool("ip", "link", "delete", self._port)
        self.cluster.tool("ip", "netns", "delete", self.name)

    def loss(self, percent: float) -> None:
        """Drop so much of what comes in over its cable, at random."""
        self._nft("table inet fault\ndelete table inet fault\n")
        share = f"numgen random mod 1000 < {round(percent * 10)}" if percent < 100 else ""
        self._nft(LOSS.format(share=share))

    def rate(self, limit: str) -> None:
        """Limit what it sends, to ``100mbit`` for example."""
        words = ("replace", "dev", "eth0", "root", "tbf", "rate", limit)
        self._tc(*words, "burst", "64kb", "latency", "50ms")

    def calm(self) -> None:
        """No loss and no limit."""
        if shutil.which("nft", path=PATH):
            self._nft("table inet fault\ndelete table inet fault\n")
        self._tc("replace", "dev", "eth0", "root", "noqueue")

    def _tc(self, *words: str) -> None:
        self.cluster.tool("tc", "-n", self.name, "qdisc", *words)

    def _nft(self, rules: str) -> None:
        self.cluster.tool("nsenter", f"--net=/run/netns/{self.name}", "nft", "-f", "-", said=rules)


@dataclass
class Cluster:
    """So many nodes, from ``with`` on: node0, node1 ... at 10.77.0.1 and so on."""

    count: int
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)  # in all environments
    as_root: bool = False  # with this machine's users, for daemons that change theirs
    nodes: list[Node] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.launcher = Launcher(self.folder, self.mark)
        self.nodes = [Node(self, index) for index in range(self.count)]

    def __enter__(self) -> Self:
        hosts = self.folder / "hosts"
        lines = [f"{node.address} {node.name}\n" for node in self.nodes]
        hosts.write_text("".join(["127.0.0.1 localhost\n", "::1 localhost\n", *lines]))
        self.process = subprocess.Popen(
            [
                *(ROOTS_WORLD if self.as_root else NEW_WORLD),
                "sh",
                "-c",
                SWITCH,
                "switch",
                str(hosts),
            ],
            env=self.launcher.env(PATH=PATH),
            stdin=subprocess.PIPE,  # it ends when this ends: with the test process
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self._begin()
            failed.pop_all()
        return self

    def _begin(self) -> None:
        if self.process.stdout.readline() != b"up\n":
            raise RefusedError(f"no switch: {self.process.stderr.read().decode().strip()}")
        self.pid = child(self.process.pid)
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.await_up()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes of all nodes; none is left on return."""
        with self.process:
            self.process.stdin.close()
        for handle in self.handles:
            handle.close()
        left = marked(self.mark)
        assert not left, f"processes outlived their cluster: {left}"

    def enter(
        self,
        pid: int,
        argv: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> Handle:
        """Start a program in the namespaces of ``pid``."""
        number = len(self.handles)
        out, err = stdout or self.folder / f"{number}.out", stderr or self.folder / f"{number}.err"
        reads, writes = os.pipe()
        with open(reads) as told, open(out, "wb") as to_out, open(err, "wb") as to_err:
            head = (sys.executable, "-I", "-S", ENTER, pid, cwd or self.folder, writes)
            process = subprocess.Popen(
                [str(word) for word in (*head, *argv)],
                env=env or self.launcher.env(PATH=PATH),
                stdin=stdin,
                stdout=to_out,
                stderr=to_err,
                pass_fds=(writes,),
                start_new_session=True,
            )
            os.close(writes)
            handle = Handle(process, int(told.read() or 0), out, err)
        self.handles.append(handle)
        if not handle.pid:
            process.wait()
            raise RefusedError(handle.errors())
        return handle

    def tool(self, *words: str, said: str = "") -> None:
        """Run a short command beside the switch, as its administrator."""
        users = () if self.as_root else ("-U", "--preserve-credentials")
        inside = ("nsenter", "-t", str(self.pid), *users, "-m", "-n")
        done = subprocess.run(
            [*inside, *words],
            env=self.launcher.env(PATH=PATH),
            input=said,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RefusedError(f"{' '.join(words)}: {done.stderr.strip()}")


def child(pid: int) -> int:
    """The only child of a process."""
    (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found)
