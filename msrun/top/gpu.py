"""GPU memory and utilisation by process, from ``nvidia-smi`` in a thread."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

PERIOD_S = 2.0
TIMEOUT_S = 10.0  # a stuck driver never answers
MIB = 1 << 20
PROCESSES = "--query-compute-apps=pid,gpu_uuid,used_memory"
GPUS = "--query-gpu=uuid,utilization.gpu"


class GpuUse(NamedTuple):
    """A process's use of its GPUs; ``None``: the driver does not say."""

    nbytes: int | None
    percent: float | None  # of its busiest GPU, all processes together


class Gpus:
    """The newest figures; empty without ``nvidia-smi`` and before its first answer."""

    def __init__(self) -> None:
        self._program = shutil.which("nvidia-smi")
        self._found: Mapping[int, GpuUse] = {}
        self._answered = threading.Event()
        self._closed = threading.Event()
        if self._program is not None:
            threading.Thread(target=self._run, name="msrun-top-gpu", daemon=True).start()

    def use(self, wait_s: float = 0.0) -> Mapping[int, GpuUse]:
        """The figures by process id; ``wait_s``: how long to wait for the first answer."""
        if self._program is not None:
            self._answered.wait(wait_s)
        return self._found

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._found = parsed(self._ask(PROCESSES), self._ask(GPUS))
            self._answered.set()
            self._closed.wait(PERIOD_S)

    def _ask(self, query: str) -> str:
        try:
            return subprocess.run(
                [str(self._program), query, "--format=csv,noheader,nounits"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
                text=True,
                errors="replace",
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return ""


def parsed(processes: str, gpus: str) -> Mapping[int, GpuUse]:
    """Both answers together, by process id; an unreadable line is left out."""
    busy = {uuid: _number(percent) for uuid, percent in _rows(gpus, 2)}
    found: dict[int, GpuUse] = {}
    for pid, uuid, used in _rows(processes, 3):
        if pid.isdecimal():
            mib, percent = _number(used), busy.get(uuid)
            here = GpuUse(None if mib is None else int(mib * MIB), percent)
            found[int(pid)] = _both(found[int(pid)], here) if int(pid) in found else here
    return found


def _both(one: GpuUse, other: GpuUse) -> GpuUse:
    nbytes = [use.nbytes for use in (one, other) if use.nbytes is not None]
    percent = [use.percent for use in (one, other) if use.percent is not None]
    return GpuUse(sum(nbytes) if nbytes else None, max(percent, default=None))


def _rows(text: str, count: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == count:
            yield cells


def _number(text: str) -> float | None:
    """A number; ``None`` for ``[N/A]``."""
    try:
        return float(text)
    except ValueError:
        return None
