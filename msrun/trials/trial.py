"""One trial of a job: a child msrun in folders of its own, with a time limit.

The drill is a subreaper and adopts every orphan below it, so it finds and ends every process that
outlives a run, even if msrun itself was killed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent.controller.states import JobState
from msrun.options.argv import CommandLine, command_words
from msrun.runs.fields import read_object
from msrun.trials import process as drill_process
from msrun.trials.history import DrillExit
from msrun.trials.process import DrillProcess
from worker_hooks.contract.env import DRILL
from worker_hooks.contract.layout import STATUS
from worker_hooks.drill.plan import Deed, DrillPlan, Fault

STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
FOLDERS = ("logs", "state", "ckpt", "traces")
REFUSED_EXIT = 2  # there is nothing to resume from
LOOK_S = 0.02  # between two looks for the mark of a preemption's first signal


class Command(NamedTuple):
    """The user's msrun command line, split where options may be added."""

    options: tuple[str, ...]
    program: tuple[str, ...]  # script and arguments; empty: a YAML file names them

    @staticmethod
    def of(line: CommandLine) -> Command:
        """The command as typed."""
        program = (line.script, *line.script_args) if line.script is not None else ()
        return Command(command_words(line._replace(script=None)), program)

    def argv(self, added: Sequence[str]) -> list[str]:
        """The child's command line; added options override."""
        return [sys.executable, "-m", "msrun", *self.words(added)]

    def words(self, added: Sequence[str]) -> list[str]:
        """The words after ``msrun``."""
        words = [*self.options, *added]
        return [*words, "--", *self.program] if self.program else words


class TrialEnd(NamedTuple):
    """How a trial ended. ``exit_code`` of its last msrun; ``None``: it was cancelled."""

    exit_code: int | None
    departures: tuple[DrillExit, ...]  # more than one if it had to be resumed
    left: int  # processes that outlived the last one
    took_s: float


class DrillJob:
    """A job in a folder of its own, and the msrun that trains it at present."""

    def __init__(self, folder: Path, command: Command, plan: DrillPlan) -> None:
        """Make the folders.

        Raises:
            OSError: they cannot be made.
        """
        self.folder, self.layout = folder, plan.layout
        for name in FOLDERS:
            (folder / name).mkdir(parents=True)
        self._own = {DRILL: plan.encode(), "XDG_STATE_HOME": str(folder / "state")}
        self._first = command.argv(["--join=True", f"--log-dir={folder / 'logs'}"])
        self.process: DrillProcess | None = None

    def launch(self, environ: Mapping[str, str], argv: Sequence[str] = ()) -> DrillProcess:
        """Start an msrun: the first one, or with these words.

        Raises:
            OSError: it cannot be started.
        """
        console = self.folder / "console.log"
        self.process = DrillProcess(argv or self._first, {**environ, **self._own}, console)
        self.layout.launcher.write_text(str(self.process.pid))
        return self.process

    def status(self) -> dict[str, Any]:
        """The last ``status.json``; empty: it cannot be read."""
        return read_object(self.folder / "logs" / STATUS)

    def close(self) -> int:
        """End what is left of the job; how many processes outlived their msrun."""
        with _uninterrupted():
            if self.process is not None:
                self.process.cancel()
            return drill_process.sweep()


class Trial(DrillJob):
    """A job that trains with faults or without; see :class:`DrillJob`."""

    def __init__(self, folder: Path, command: Command, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)
        plan = DrillPlan(str(folder / "traces"), str(folder / "ckpt"), self._faults)
        super().__init__(folder, command, plan)

    def run(self, environ: Mapping[str, str], within_s: float | None) -> TrialEnd:
        """Run the job to its end; resume it if it stopped, spent its restarts, or lost its msrun.

        Whatever happens, no process of it is left.
        """
        began = time.monotonic()
        deadline = None if within_s is None else began + within_s
        departures: list[DrillExit] = []
        try:
            went = self._train((), environ, deadline)
            while went is not None:
                departures.append(went)
                if len(departures) > len(self._faults) or not (resume := self._resume(went)):
                    break
                went = self._train(resume, environ, deadline)
                if went is not None and went.exit_code == REFUSED_EXIT:
                    went = self._train((), environ, deadline)  # as a user would
        finally:
            left = self.close()
        code = None if went is None else went.exit_code
        return TrialEnd(code, tuple(departures), left, time.monotonic() - began)

    def _train(
        self, argv: Sequence[str], environ: Mapping[str, str], deadline: float | None
    ) -> DrillExit | None:
        """Run one msrun to its end; ``None``: the time is over."""
        process = self.launch(environ, argv)
        is_killed = False
        while not process.await_end(self._next_look(process.pid, deadline)):
            if time.monotonic() >= self._kill_at(process.pid):
                process.kill_all()
                is_killed = True
            elif deadline is not None and time.monotonic() >= deadline:
                return None
        at, code = time.monotonic(), process.reap()
        was_killed_alone = code < 0 and not is_killed
        if was_killed_alone and not drill_process.await_orphans(deadline):
            return None
        return DrillExit(code, at, is_killed)

    def _next_look(self, pid: int, deadline: float | None) -> float | None:
        """Until when only its end matters; monotonic."""
        moments = [self._kill_at(pid), float("inf") if deadline is None else deadline]
        marks = [self.layout.struck(index) for index, _ in self._preemptions()]
        if any(not mark.exists() for mark in marks):
            moments.append(time.monotonic() + LOOK_S)
        return min(moments) if min(moments) < float("inf") else None

    def _kill_at(self, pid: int) -> float:
        """When to kill this msrun, monotonic; infinite: not yet known, or never."""
        found = float("inf")
        for index, fault in self._preemptions():
            mark = read_object(self.layout.struck(index))  # empty: it is not written yet
            if mark.get("pid") == pid:
                found = min(found, float(mark["at"]) + fault.grace_s)
        return found

    def _preemptions(self) -> Iterator[tuple[int, Fault]]:
        return (
            (index, fault) for index, fault in enumerate(self._faults) if fault.deed is Deed.PREEMPT
        )

    def _resume(self, went: DrillExit) -> list[str] | None:
        """The command line that resumes the job, if a user would have to type it."""
        status = self.status()
        if not status:
            return None
        is_spent = status["restarts"] >= status["max_restarts"]
        is_stopped = status["state"] == JobState.STOPPED.value
        is_failed = went.exit_code != 0 and (is_spent or went.exit_code < 0)
        return resume_argv(str(status["record_id"])) if is_failed or is_stopped else None


def resume_argv(record: str) -> list[str]:
    """The command line that resumes the run with this record."""
    return [sys.executable, "-m", "msrun", "--resume", record]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep a second Ctrl-C from interrupting the cleanup."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
