"""A node: its host name, processes, network card, /dev/shm and /run are its own.

The rest of the file system is shared, as by a file server.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msrun.cluster.program import NodeProgram, kill, only_child
from msrun.cluster.switch import Switch

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
exec nsenter --net="$net" unshare --uts --mount --pid --fork --kill-child --mount-proc \\
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


class ClusterNode:
    """A machine of the cluster: on after the cluster's start."""

    def __init__(self, index: int, folder: Path, environ: Mapping[str, str]) -> None:
        """Off.

        Args:
            index: of the node, from 0 on.
            folder: of the cluster; the node's own is in it, and other nodes see it, too.
        """
        self.index, self.shared = index, folder
        self._environ = environ
        self._switch: Switch | None = None
        self.init: NodeProgram | None = None  # what makes it live
        self.pid = 0  # of its first process

    @property
    def name(self) -> str:
        """Its host name."""
        return f"node{self.index}"

    @property
    def address(self) -> str:
        """Of its card."""
        return f"10.77.0.{self.index + 1}"

    @property
    def folder(self) -> Path:
        """Its temporary and state folders are here."""
        return self.shared / self.name

    @property
    def _port(self) -> str:
        """The other end of its cable, in the switch."""
        return f"port{self.index}"

    def connect(self, switch: Switch) -> None:
        """Put its cable into the switch."""
        self._switch = switch

    def run(
        self,
        argv: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> NodeProgram:
        """Start a program; ``env`` is added to `environ`, its words go to files of its own.

        Raises:
            ClusterError: it cannot be started.
        """
        assert self.init, f"{self.name} is off"
        environ = {**self.environ(), **(env or {})}
        return self._wired.enter(self.pid, argv, environ, cwd or self.folder, stdout, stderr, stdin)

    def environ(self) -> dict[str, str]:
        """What its programs find in their environment."""
        own = {
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        return {**self._environ, **own}

    def boot(self) -> None:
        """Turn it on, which it must not be; a cable that was cut is still cut, unless by poweroff.

        Raises:
            ClusterError: the kernel refuses.
            RuntimeError: it does not come up.
        """
        self.start()
        self.await_up()

    def start(self) -> None:
        """Begin to boot.

        Raises:
            ClusterError: the kernel refuses.
        """
        assert not self.init, f"{self.name} is on"
        mac = f"02:00:00:00:00:{self.index + 1:02x}"  # a card keeps it: peers remember it
        words = (self.name, self._port, self.address, mac, INIT)
        for name in ("tmp", "state"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.init = self._wired.enter(
            self._wired.pid, ["sh", "-c", BOOT, "boot", *words], stdin=subprocess.PIPE
        )

    def await_up(self) -> None:
        """Wait until it is on.

        Raises:
            RuntimeError: it does not come up.
        """
        assert self.init
        self.init.await_output("up\n")
        self.pid = only_child(self.init.pid)

    def kill(self) -> None:
        """Kill its processes; its kernel lives on and tells their peers. All are dead on return."""
        init, self.init = self.init, None
        assert init, f"{self.name} is off"
        kill(self.pid)
        self._wired.await_end(init.process)
        init.close()

    def cut(self) -> None:
        """Pull its cable out of the switch: silence, also between it and the others' kernels."""
        self._wired.tool("ip", "link", "set", self._port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        self._wired.tool("ip", "link", "set", self._port, "up")

    def poweroff(self) -> None:
        """Nobody is told, and its kernel forgets all."""
        self.cut()
        self.kill()
        self._wired.tool("ip", "link", "delete", self._port)
        self._wired.tool("ip", "netns", "delete", self.name)

    def processes(self) -> dict[int, int]:
        """Pid as seen from outside -> pid on the node; without the node's first, and zombies."""
        if not self.init:
            return {}
        found = {}
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, AttributeError, TypeError):
                if os.readlink(f"/proc/{name}/ns/pid") == own and int(name) != self.pid:
                    status = Path(f"/proc/{name}/status").read_text()
                    if not re.search(r"^State:\s+[ZX]", status, re.MULTILINE):
                        pids = re.search(r"^NSpid:(.*)$", status, re.MULTILINE)[1]  # type: ignore[index]
                        found[int(name)] = int(pids.split()[-1])
        return found

    @property
    def _wired(self) -> Switch:
        assert self._switch is not None, f"{self.name} is in no switch"
        return self._switch
