"""One msrun of a trial with all processes below it: started, awaited, called off, killed.

The drill is a subreaper: what an msrun leaves behind becomes a child of the drill.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent.workers import processes

GRACE_S = 5.0  # from the second SIGTERM to SIGKILL, when a run is called off
SWEEP_S = 2.0


class DrillProcess:
    """A child msrun."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], console: Path) -> None:
        """Start it; what it says is added to the file ``console``.

        Raises:
            OSError: it cannot be started.
        """
        with open(console, "ab") as said:
            self._process = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl-C is the drill's to pass on
            )
        self.pid = self._process.pid

    def await_end(self, until: float | None) -> bool:
        """Wait for its end until this moment (monotonic); false: the time is over."""
        return self._process.returncode is not None or _await_exit(self.pid, until)

    def reap(self) -> int:
        """The exit code, negative for a signal, of one that has ended."""
        return self._process.wait()

    def kill_all(self) -> None:
        """SIGKILL it and all below it at the same moment, as the end of a container is.

        Nobody outlives the others long enough to save anything; nothing is left.
        """
        for pid in (self.pid, *_below(self.pid)):
            processes.signal_one(pid, signal.SIGKILL)
        self.reap()
        processes.end_adopted(frozenset(), SWEEP_S)

    def call_off(self) -> None:
        """End it if it still runs: politely, at once, by force."""
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        for _ in range(3):  # the second one saves at once, the third one kills the workers
            self._process.terminate()
            if _await_exit(self.pid, time.monotonic() + GRACE_S / 10):
                break
        if not _await_exit(self.pid, time.monotonic() + GRACE_S):
            self._process.kill()
        self._process.wait()


def await_orphans(until: float | None) -> bool:
    """Ranks that outlive their msrun save, and leave; false: the time is over before."""
    while orphans := processes.adopted(frozenset()):
        for pid in orphans:
            if not _await_exit(pid, until):
                return False
            os.waitid(os.P_PID, pid, os.WEXITED)
    return True


def sweep() -> int:
    """End what outlived its msrun; how many there were."""
    return len(processes.end_adopted(frozenset(), SWEEP_S))


def _await_exit(pid: int, until: float | None) -> bool:
    """Wait for an unreaped child's end; false: the time is over."""
    process = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        return bool(waiting.poll(left))
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
