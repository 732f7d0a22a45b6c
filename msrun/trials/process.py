"""One msrun of a trial with all processes below it: started, awaited, cancelled, killed.

The drill is a subreaper: processes that outlive their msrun become its children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent.workers import processes
from msrun.runs.run_state import has_ended

GRACE_S = 5.0  # from the second SIGTERM to SIGKILL, when a run is cancelled
SWEEP_S = 2.0


class DrillProcess:
    """A child msrun."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], console: Path) -> None:
        """Start it; its output is appended to the file ``console``.

        Raises:
            OSError: it cannot be started.
        """
        with open(console, "ab") as output:
            self._process = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the drill passes Ctrl-C on
            )
        self.pid = self._process.pid

    def await_end(self, until: float | None) -> bool:
        """Wait for its end until this moment (monotonic); false: it is still running."""
        return self._process.returncode is not None or _await_exit(self.pid, until)

    def reap(self) -> int:
        """The exit code of the ended process, negative for a signal."""
        return self._process.wait()

    def kill_all(self) -> None:
        """SIGKILL it and all processes below it at once, as the end of a container does.

        No process outlives the others long enough to save anything.
        """
        for pid in (self.pid, *_below(self.pid)):
            processes.signal_one(pid, signal.SIGKILL)
        self.reap()
        processes.end_adopted(frozenset(), SWEEP_S)

    def cancel(self) -> None:
        """End it if it is still running: three requests, then SIGKILL."""
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        for _ in range(3):  # the second request saves at once, the third kills the workers
            self._process.terminate()
            if _await_exit(self.pid, time.monotonic() + GRACE_S / 10):
                break
        if not _await_exit(self.pid, time.monotonic() + GRACE_S):
            self._process.kill()
        self._process.wait()


def await_orphans(until: float | None) -> bool:
    """Wait until ranks that outlive their msrun have saved and exited; false: the time is over."""
    while orphans := processes.adopted(frozenset()):
        for pid in orphans:
            if not _await_exit(pid, until):
                return False
            os.waitid(os.P_PID, pid, os.WEXITED)
    return True


def sweep() -> int:
    """End processes that outlived their msrun; how many there were."""
    return len(processes.end_adopted(frozenset(), SWEEP_S))


def _await_exit(pid: int, until: float | None) -> bool:
    """Wait for an unreaped child's end; false: the time is over."""
    process = os.pidfd_open(pid)
    try:
        return has_ended(process, None if until is None else max(0.0, until - time.monotonic()))
    finally:
        os.close(process)


def _below(pid: int) -> Iterator[int]:
    """Every process below this one, parents first."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    for child in children:
        yield child
        yield from _below(child)
