"""GPU memory and utilisation by process, where ``nvidia-smi`` is; a thread asks it now and then."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

PERIOD_S = 2.0
PATIENCE_S = 10.0  # a driver that is stuck answers nobody
MIB = 1 << 20
PROCESSES = "--query-compute-apps=pid,gpu_uuid,used_memory"
GPUS = "--query-gpu=uuid,utilization.gpu"


class GpuUse(NamedTuple):
    """What a process has of its GPUs; ``None``: the driver does not say."""

    nbytes: int | None
    percent: float | None  # of the busiest GPU that it is on, whoever keeps it busy


class Gpus:
    """The newest answer; none without ``nvidia-smi``, and none before its first answer."""

    def __init__(self) -> None:
        self._program = shutil.which("nvidia-smi")
        self._found: Mapping[int, GpuUse] = {}
        self._answered = threading.Event()
        self._closed = threading.Event()
        if self._program is not None:
            threading.Thread(target=self._run, name="msrun-top-gpu", daemon=True).start()

    def use(self, wait_s: float = 0.0) -> Mapping[int, GpuUse]:
        """By process id; ``wait_s``: for the first answer, if one can come."""
        if self._program is not None:
            self._answered.wait(wait_s)
        return self._found

    def close(self) -> None:
        """Ask no more."""
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
                timeout=PATIENCE_S,
                check=False,
                text=True,
                errors="replace",
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return ""


def parsed(processes: str, gpus: str) -> Mapping[int, GpuUse]:
    """The two answers as one, by process id; a line that cannot be read is left out."""
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
    """``[N/A]`` is what a driver says that does not know."""
    try:
        return float(text)
    except ValueError:
        return None
