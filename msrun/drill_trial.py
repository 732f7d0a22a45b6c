"""One run of the job under a drill: a child msrun in folders of its own, bounded, leaving nothing.

The drill adopts every orphan below it (it is a subreaper), so what a run leaves behind is found and
ended, even when msrun itself was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent import worker as processes
from msrun.options import BY_DEST
from msrun.scan import CommandLine
from worker_hooks.env import DRILL
from worker_hooks.fault import LAUNCHER, Fault, Plan
from worker_hooks.layout import STATUS

GRACE_S = 5.0  # from the second SIGTERM to SIGKILL, when a run is called off
SWEEP_S = 2.0
STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
FOLDERS = ("logs", "state", "ckpt", "witness")


class Command(NamedTuple):
    """The user's msrun line, taken apart where options may be added."""

    options: tuple[str, ...]
    program: tuple[str, ...]  # script and arguments; empty: a YAML file names them

    @staticmethod
    def of(line: CommandLine) -> Command:
        """What was typed, as it was meant."""
        options = (
            setting.name if setting.flag else f"{BY_DEST[dest].long}={setting.text}"
            for dest, setting in line.given.items()
        )
        program = (line.script, *line.script_args) if line.script is not None else ()
        return Command(tuple(options), program)

    def argv(self, added: Sequence[str]) -> list[str]:
        """The child's line; what is added wins."""
        argv = [sys.executable, "-m", "msrun", *self.options, *added]
        return [*argv, "--", *self.program] if self.program else argv


class Ended(NamedTuple):
    """How a trial ended. ``exit_code`` as a shell's parent sees it; ``None``: it was called off."""

    exit_code: int | None
    runs: int  # of msrun: more than one when it had to be resumed
    left: int  # processes that outlived the last one
    took_s: float


class Trial:
    """A job in a folder of its own, with faults or without."""

    def __init__(self, folder: Path, command: Command, faults: Sequence[Fault] = ()) -> None:
        """Make the folders.

        Raises:
            OSError: they cannot be made.
        """
        self.folder = folder
        self._command, self._faults = command, tuple(faults)
        for name in FOLDERS:
            (folder / name).mkdir(parents=True)
        self._plan = Plan(str(folder / "witness"), str(folder / "ckpt"), self._faults)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, environ: Mapping[str, str], within_s: float | None) -> Ended:
        """Run the job to its end; where its budget or its msrun is gone, resume it.

        Whatever happens, no process of it is left.
        """
        began = time.monotonic()
        deadline = None if within_s is None else began + within_s
        told = {
            **environ,
            DRILL: self._plan.encode(),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        added = ["--join=True", f"--log_dir={self.folder / 'logs'}"]
        runs = 0
        try:
            code = self._launch(self._command.argv(added), told, deadline)
            runs += 1
            while code and runs <= len(self._faults) and (resume := self._resume()):
                code = self._launch(resume, told, deadline)
                runs += 1
        finally:
            with _undisturbed():
                self._call_off()
                left = processes.end_adopted(frozenset(), SWEEP_S)
        return Ended(code, runs, len(left), time.monotonic() - began)

    def _launch(
        self, argv: Sequence[str], environ: Mapping[str, str], deadline: float | None
    ) -> int | None:
        with open(self.folder / "console.log", "ab") as console:
            self._process = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # Ctrl-C is the drill's to pass on
            )
        self._plan.layout.launcher.write_text(str(self._process.pid))
        if not _await_exit(self._process.pid, deadline):
            return None
        code = self._process.wait()
        if self._was_launcher_struck() and not _await_orphans(deadline):
            return None
        return code

    def _resume(self) -> list[str] | None:
        """The line that goes on, if a person would have to type it, too."""
        try:
            word = json.loads((self.folder / "logs" / STATUS).read_bytes())
            record, is_spent = str(word["record_id"]), word["attempt"] >= word["max_restarts"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not (is_spent or self._was_launcher_struck()):
            return None
        return [sys.executable, "-m", "msrun", "--resume", record]

    def _was_launcher_struck(self) -> bool:
        return any(
            fault.rank == LAUNCHER and self._plan.layout.struck(index).exists()
            for index, fault in enumerate(self._faults)
        )

    def _call_off(self) -> None:
        """End an msrun that still runs: politely, at once, by force."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGCONT)
        for _ in range(2):  # the second one kills the workers
            process.terminate()
            if _await_exit(process.pid, time.monotonic() + GRACE_S / 10):
                break
        if not _await_exit(process.pid, time.monotonic() + GRACE_S):
            process.kill()
        process.wait()


def _await_exit(pid: int, deadline: float | None) -> bool:
    """Wait for an unreaped child's end; false: the time is over."""
    process = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        return bool(waiting.poll(left))
    finally:
        os.close(process)


def _await_orphans(deadline: float | None) -> bool:
    """Ranks that outlive their msrun save, and leave; false: the time is over before."""
    while orphans := processes.adopted(frozenset()):
        for pid in orphans:
            if not _await_exit(pid, deadline):
                return False
            os.waitid(os.P_PID, pid, os.WEXITED)
    return True


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep a second Ctrl-C from cutting the cleaning short."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
