"""What NVIDIA's driver reported to the kernel log: its "Xid" lines. The only reader of that log.

It is read only after a rank's death, never waits, and needs no right that msrun lacks: in most
containers, and where the kernel keeps its log for root, there is nothing to read, and no claim.
"""

from __future__ import annotations

import os
import re
import weakref
from pathlib import Path
from typing import NamedTuple

KMSG = Path("/dev/kmsg")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_INITIAL_NAMESPACE = 0xEFFFFFFC  # its inode (PROC_PID_INIT_INO in the kernel's proc_ns.h)

RECORD_BYTES = 8192  # the kernel's limit of one record (CONSOLE_EXT_LOG_MAX)
MOST_RECORDS = 200_000  # takes 0.4 s; a log of the usual size has a few thousand
SLACK_S = 2.0  # the log's clock and the monotonic one are not quite the same
KERNEL_LEVELS = 8  # a record of a higher number was written by a program, not by the kernel

_RECORD = re.compile(r"(?P<level>\d+),(?P<number>\d+),(?P<at_us>\d+),[^;]*;(?P<text>.*)")
# NVRM: Xid (PCI:0000:17:00): 79, pid=1234, name=python, GPU has fallen off the bus.
# Older drivers leave out "PCI:", name or pid; MIG adds the instance; nobody's pid is '<unknown>'.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?"
    r"(?P<pci>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?)[^)]*\): "
    r"(?P<xid>\d+)(?:, pid=(?:(?P<pid>\d+)|[^,]*))?(?:, name=[^,]*)?(?:, (?P<text>.*))?",
    re.IGNORECASE,
)


class Xid(NamedTuple):
    """One report of the driver."""

    number: int
    pci: str
    pid: int | None  # as the machine counts; None: of no process
    text: str
    at_s: float  # since the machine's boot
    record: int  # grows in the order of the log

    def __str__(self) -> str:
        """``Xid 79 on PCI 0000:17:00: "GPU has fallen off the bus"``."""
        return f"Xid {self.number} on PCI {self.pci}" + (f': "{self.text}"' if self.text else "")


def parse(line: str) -> Xid | None:
    """The report in one line of ``/dev/kmsg``; ``None``: it is another line."""
    record = _RECORD.match(line)
    if record is None or int(record["level"]) >= KERNEL_LEVELS:
        return None
    found = _XID.search(record["text"])
    if found is None:
        return None
    return Xid(
        number=int(found["xid"]),
        pci=found["pci"],
        pid=None if found["pid"] is None else int(found["pid"]),
        text=(found["text"] or "").strip().rstrip("."),
        at_s=int(record["at_us"]) / 1e6,
        record=int(record["number"]),
    )


def read_present(log: int) -> bytes:
    """What a log holds behind what was read of it before; nothing is waited for."""
    parts: list[bytes] = []
    for _ in range(MOST_RECORDS):
        try:
            part = os.read(log, RECORD_BYTES)  # of /dev/kmsg exactly one record
        except BrokenPipeError:  # the next record was overwritten: reading goes on behind it
            continue
        except OSError:  # BlockingIOError: that was all
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def sees_host_pids() -> bool:
    """Whether a pid in the kernel's log means the same here: not in a container of its own."""
    try:
        return _PID_NAMESPACE.stat().st_ino == _INITIAL_NAMESPACE
    except OSError:
        return False


class XidLog:
    """What the driver reported since a run began."""

    def __init__(
        self, began_s: float, path: Path = KMSG, *, knows_pids: bool | None = None
    ) -> None:
        """Nothing is read yet.

        Args:
            began_s: the run's start on the monotonic clock.
            knows_pids: whether pids in it are those of this process's namespace; ``None``: look.
        """
        self._began_s = began_s
        self._path = path
        self._knows_pids = sees_host_pids() if knows_pids is None else knows_pids
        self._log: int | None = None  # open from the first look on: many ranks may die at once
        self._rest = b""  # the beginning of a line
        self._found: list[Xid] = []
        self._told = -1  # the newest record that was examined

    def of_process(self, pid: int) -> tuple[Xid, ...]:
        """The reports about a process, the first one first; none where pids mean something else."""
        return tuple(xid for xid in self._read() if self._knows_pids and xid.pid == pid)

    def news_of_host(self) -> tuple[Xid, ...]:
        """Reports since the last call that may be about any rank."""
        news = tuple(xid for xid in self._read() if xid.record > self._told)
        if news:
            self._told = news[-1].record
        return tuple(xid for xid in news if xid.pid is None or not self._knows_pids)

    def _read(self) -> list[Xid]:
        """All reports of the run so far; only what is new is read."""
        if self._log is None:
            try:
                self._log = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # no such file, or not for this user
                return []
            weakref.finalize(self, os.close, self._log)
        *lines, self._rest = (self._rest + read_present(self._log)).split(b"\n")
        found = filter(None, (parse(line.decode(errors="replace")) for line in lines))
        self._found += (xid for xid in found if xid.at_s >= self._began_s - SLACK_S)
        return self._found
