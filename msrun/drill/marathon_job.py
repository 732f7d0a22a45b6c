"""The job of a marathon: its msruns one after the other, and what is seen of its processes.

The drill reads what the ranks write as they train (their steps) and what msrun writes (their pids).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.controller.states import JobState
from agent.workers.processes import is_stopped
from msrun.drill.marathon_verdict import MarathonExit, ProcessGrowth, ProcessUse
from msrun.runs.json_lines import JsonLines
from msrun.trials import process as drill_process
from msrun.trials.trial import Command, DrillJob, resume_argv
from worker_hooks.contract.layout import EVENTS
from worker_hooks.contract.process_stat import children, read_stat
from worker_hooks.drill.plan import DrillPlan

SETTLED_LOOKS = 5  # what a process needs until then is no leak
FORKSERVER = "msrun-fork"
TEMPORARY = "tmp"  # the job's folder for temporary files
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


class StuckError(Exception):
    """The marathon cannot go on: why, as text."""


class _Life(NamedTuple):
    """A rank in one attempt of one run."""

    run: str
    attempt: int


class MarathonJob(DrillJob):
    """The job of a marathon: its msruns one after the other, and what is seen of its ranks."""

    def __init__(
        self,
        folder: Path,
        command: Command,
        environ: Mapping[str, str],
        world_size: int,
        *,
        keeps_ckpt: bool,
    ) -> None:
        """Make the folders. ``keeps_ckpt``: the script saves into the folder by itself.

        Raises:
            OSError: they cannot be made.
        """
        ckpt = "" if keeps_ckpt else str(folder / "ckpt")
        plan = DrillPlan(str(folder / "traces"), ckpt, takes_orders=True)
        super().__init__(folder, command, plan)
        (folder / TEMPORARY).mkdir()
        self._environ = {**environ, "TMPDIR": str(folder / TEMPORARY)}
        self._ranks = range(world_size)
        self._traces = {rank: JsonLines(self.layout.lines(rank)) for rank in self._ranks}
        self._events = JsonLines(folder / "logs" / EVENTS)
        self._lives: dict[int, _Life] = {}
        self._commits: dict[int, list[float]] = {rank: [] for rank in self._ranks}  # of its life
        self._pids: dict[int, int] = {}
        self._store = 0
        self._reason = ""  # of the last end, as msrun recorded it
        self.exits: list[MarathonExit] = []
        self.last_exit: int | None = None
        self.newest = 0  # the newest step that some rank has committed
        self.steps = dict.fromkeys(self._ranks, 0)  # rank -> the newest that it has committed

    @property
    def pid(self) -> int:
        """Of the present msrun."""
        return self.process.pid if self.process is not None else 0

    def start(self, argv: Sequence[str] = ()) -> None:
        """Start an msrun: the first one, or with these words.

        Raises:
            OSError: it cannot be started.
        """
        self._events = JsonLines(self.folder / "logs" / EVENTS, than=self._events.close())
        self._pids, self._store, self._reason = {}, 0, ""
        self.launch(self._environ, argv)

    def has_ended(self) -> bool:
        """Whether the present msrun is gone."""
        return self.process is None or self.process.await_end(time.monotonic())

    def cancel(self) -> None:
        """End an msrun whose job does not train any more, as a person would."""
        if self.process is not None:
            self.process.cancel()

    def look(self) -> None:
        """Read what was written since the last look."""
        for rank, trace in self._traces.items():
            for line in trace.new():
                match line:
                    case {"life": attempt, "run": run}:
                        self._lives[rank] = _Life(run, attempt)
                        self._commits[rank] = []
                    case {"commit": step, "at": at}:
                        self._commits[rank].append(at)
                        self.newest = max(self.newest, step)
                        self.steps[rank] = step
        for event in self._events.new():
            match event:
                case {"event": "WorkerStarted", "rank": rank, "pid": pid}:
                    self._pids[rank] = pid
                case {"event": "StoreForked", "pid": pid} if pid:
                    self._store = pid
                case {"event": "Finish", "reason": reason}:
                    self._reason = str(reason or "")

    def trained(self, steps: int, since: float) -> bool:
        """Whether all ranks made so many steps since a moment, together and in one attempt."""
        return len(set(self._lives.values())) == 1 and all(
            len(commits) >= steps and commits[-steps] > since for commits in self._commits.values()
        )

    def rank(self, rank: int) -> int | None:
        """The pid of a rank that is alive."""
        return self._alive(self._pids.get(rank, 0))

    def newcomer(self, rank: int, than: int) -> int | None:
        """The pid of a rank that is alive and is not that process."""
        found = self.rank(rank)
        return found if found != than else None

    def store(self) -> int | None:
        """The pid of the store host."""
        return self._alive(self._store)

    def forkserver(self) -> int | None:
        """The pid of the oldest forkserver; a worker that it just forked still has its name."""
        for pid in sorted(children(self.pid)):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name == FORKSERVER and pid not in self._pids.values() and self._alive(pid):
                    return pid
        return None

    def _alive(self, pid: int) -> int | None:
        """The pid if it is msrun's child and alive: then the number is nobody else's."""
        found = read_stat(pid) if pid else None
        is_ours = found is not None and found.parent == self.pid and not found.is_dead
        return pid if is_ours else None

    def end_run(self, within_s: float) -> MarathonExit:
        """Reap the msrun that has ended, and wait for ranks that save without it.

        Raises:
            StuckError: they do not end.
        """
        assert self.process is not None
        self.look()
        code = self.process.reap()
        now = time.time()
        for pid in children(os.getpid()):  # a forkserver that a fault has stopped cannot end
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
        if not drill_process.await_orphans(time.monotonic() + within_s):
            raise StuckError(f"{within_s:.0f} s after the end of msrun its ranks are alive")
        self.look()
        self.last_exit = code
        return MarathonExit(now, code, self._reason)

    def resume(self) -> None:
        """Resume the job as a person would.

        Raises:
            StuckError: there is nothing that could be resumed.
        """
        if (record := self.status().get("record_id")) is None:
            raise StuckError("the status of the run cannot be read")
        self.start(resume_argv(str(record)))

    def has_succeeded(self) -> bool:
        """Whether the last msrun has trained the job to its end."""
        return self.last_exit == 0 and self.status().get("state") == JobState.SUCCEEDED.value


class Census:
    """What msrun's processes hold, looked at after each fault."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], ProcessUse] = {}
        self._last: dict[tuple[str, int], ProcessUse] = {}
        self._looks: Counter[tuple[str, int]] = Counter()
        self._dead: set[int] = set()  # zombies at the last look
        self.zombies = 0

    def look(self, job: MarathonJob, world_size: int) -> None:
        """Look at all processes of a job that trains."""
        found = [("msrun", job.pid), ("forkserver", job.forkserver())]
        found += [("rank", job.rank(rank)) for rank in range(world_size)]
        for name, pid in found:
            if pid is not None and (use := _use(pid)) is not None:
                key = name, pid
                self._looks[key] += 1
                if self._looks[key] <= SETTLED_LOOKS:  # what it needs at the beginning is no leak
                    self._first[key] = use
                self._last[key] = use
        dead = {pid for pid in children(job.pid) if (stat := read_stat(pid)) and stat.is_dead}
        self.zombies += len(dead & self._dead)
        self._dead = dead

    def growths(self) -> tuple[ProcessGrowth, ...]:
        """Of each process that was seen often enough."""
        return tuple(
            ProcessGrowth(key[0], looks, self._first[key], self._last[key])
            for key, looks in self._looks.items()
            if looks > SETTLED_LOOKS
        )


def _use(pid: int) -> ProcessUse | None:
    stat = read_stat(pid)
    try:
        files, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    return None if stat is None else ProcessUse(files, threads, stat.rss_pages * _PAGE_MB)
