"""One job under one launcher: started, watched, killed if necessary, and always cleaned up."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from processes import kill_marked

WORKERS = Path(__file__).resolve().parent / "workers"
MARK = "MSRUN_BENCH_TRIAL"
TAIL_LINES = 40  # torchrun's report alone takes 20


class TrialError(Exception):
    """A trial did not reach a point in time; the message says how far it was."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the launchers that are compared."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stamp:
    """A rank reached a point. ``at_s`` is CLOCK_MONOTONIC."""

    what: str
    rank: int
    attempt: int
    pid: int
    at_s: float

    @classmethod
    def parse(cls, line: str) -> Stamp:
        """Read what ``workers/stamp.py`` writes."""
        what, rank, attempt, pid, at_s = line.split()
        return cls(what, int(rank), int(attempt), int(pid), float(at_s))


@dataclass(slots=True)
class Trial:
    """A running job."""

    process: subprocess.Popen[bytes]
    started_s: float
    mark: str
    output: Path
    fifo: int
    exited: int  # pidfd, readable once the launcher has ended, so nothing polls
    stamps: list[Stamp] = field(default_factory=list)
    torn: bytes = b""

    def wait_for(self, what: str, count: int, *, attempt: int = 0, limit_s: float) -> list[Stamp]:
        """Wait until ``count`` ranks of ``attempt`` have reached ``what``.

        Raises:
            TrialError: the launcher ended before, or ``limit_s`` passed.
        """
        deadline = time.monotonic() + limit_s
        while len(reached := self._reached(what, attempt)) < count:
            ready = self._select((self.fifo, self.exited), deadline)
            self._read()
            if len(self._reached(what, attempt)) >= count:
                continue
            if not ready:
                raise TrialError(self._state(f"it took more than {limit_s:g} s", what, attempt))
            if ready == [self.exited]:
                raise TrialError(self._state("the launcher ended", what, attempt))
        return reached

    def wait_exit(self, *, limit_s: float, code: int | None = 0) -> float:
        """Wait until the launcher has ended; the time, in CLOCK_MONOTONIC seconds.

        Raises:
            TrialError: it ended with another ``code``, or ``limit_s`` passed.
        """
        if not self._select((self.exited,), time.monotonic() + limit_s):
            raise TrialError(f"no exit within {limit_s:g} s; {self.output_tail()}")
        at_s = time.monotonic()
        if self.process.wait() != code and code is not None:
            raise TrialError(f"exit code {self.process.returncode}; {self.output_tail()}")
        self._read()
        return at_s

    def ends_within(self, seconds: float) -> bool:
        """Wait so long at most; whether the launcher has ended."""
        return bool(select.select((self.exited,), (), (), seconds)[0])

    def _reached(self, what: str, attempt: int) -> list[Stamp]:
        return [stamp for stamp in self.stamps if (stamp.what, stamp.attempt) == (what, attempt)]

    def _select(self, handles: tuple[int, ...], deadline: float) -> list[int]:
        return select.select(handles, (), (), max(0.0, deadline - time.monotonic()))[0]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while got := os.read(self.fifo, 65536):
                *lines, self.torn = (self.torn + got).split(b"\n")
                self.stamps += (Stamp.parse(line.decode()) for line in lines)

    def _state(self, why: str, what: str, attempt: int) -> str:
        ranks = sorted(stamp.rank for stamp in self._reached(what, attempt))
        return f"{why}; only ranks {ranks} were {what} in attempt {attempt}; {self.output_tail()}"

    def output_tail(self) -> str:
        """The end of the job's output."""
        lines = self.output.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "its output:\n  " + "\n  ".join(lines or ["nothing"])


@contextlib.contextmanager
def started(
    side: Side,
    worker: str,
    *args: str,
    nproc: int,
    options: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[Trial]:
    """Start ``worker`` with ``nproc`` ranks; afterwards none of its processes is left."""
    mark = f"{MARK}={uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="msrun-bench-", ignore_cleanup_errors=True)
            )
        )
        stack.callback(kill_marked, mark)
        os.mkfifo(folder / "stamps")
        # also opened for writing, so that it is never closed between two ranks
        fifo = os.open(folder / "stamps", os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, fifo)
        output = stack.enter_context((folder / "output").open("wb"))
        script = (str(WORKERS / worker), str(folder / "stamps"), *args)
        command = (*side.command, f"--nproc-per-node={nproc}", *options, *script)
        env = environment(folder, mark) | dict(environ or {})
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(reap, process)
        exited = os.pidfd_open(process.pid)
        stack.callback(os.close, exited)
        yield Trial(process, started_s, mark, folder / "output", fifo, exited)


def environment(folder: Path, mark: str) -> dict[str, str]:
    """The environment without launcher settings; temporary files go to ``folder``."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "TORCHELASTIC_", "MSRUN_", "OMP_", "MASTER_"))
    }
    name, _, value = mark.partition("=")
    return ours | {name: value, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}


def reap(process: subprocess.Popen[bytes]) -> None:
    """Reap the launcher."""
    process.kill()
    process.wait()
