"""Real msrun processes for tests: started, watched, signalled, and proven gone."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from support.warm_python import client_environ

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
WORKERS = ROOT / "tests/workers"
MARK = "MSRUN_TEST_MARK"
PYTHON = (sys.executable,)
DEADLINE_S = 150.0  # for what takes a few seconds on an idle machine


def poll(condition: Callable[[], T], within_s: float = DEADLINE_S) -> T:
    """The first true value of ``condition``; fails after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within_s} s: {condition}")
        time.sleep(0.005)


def marked(mark: str) -> dict[int, str]:
    """Processes with ``mark`` in their environment: pid -> command line."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(name)] = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


@dataclass
class Ended:
    """A job that ended."""

    code: int
    out: str
    err: str


@dataclass
class Job:
    """One running msrun."""

    process: subprocess.Popen  # or, of a warm job, a client that ends as msrun ends
    folder: Path
    mark: str
    pid: int = 0  # of msrun

    def __post_init__(self) -> None:
        self.pid = self.pid or self.process.pid

    def wait(self, within_s: float = DEADLINE_S) -> Ended:
        out, err = self.process.communicate(timeout=within_s)
        return Ended(
            self.process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
        )

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def status(self) -> dict:
        try:
            return json.loads((self.folder / "status.json").read_bytes())
        except FileNotFoundError:
            return {"state": "none", "attempt": -1, "workers": []}

    def await_state(self, state: str, within_s: float = DEADLINE_S) -> dict:
        return poll(lambda: (now := self.status())["state"] == state and now, within_s)

    def pids(self) -> dict[int, int]:
        """rank -> pid of the present attempt: what events.jsonl knows before status.json does."""
        found: dict[int, int] = {}
        for one in self.events():
            match one["event"]:
                case "StartAttempt":
                    found = {}
                case "ReplaceRanks":
                    found = {rank: found[rank] for rank in one["survivors"]}
                case "WorkerStarted":
                    found[one["rank"]] = one["pid"]
        return found

    def forkservers(self) -> list[int]:
        """The pids of msrun's children that are forkservers; helpers come and go meanwhile."""
        found = []
        for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/comm").read_text() == "msrun-fork\n":
                    found.append(int(pid))
        return found

    def forkserver(self) -> int:
        """The pid of the only forkserver; a worker that it has just forked still bears its name."""
        poll(lambda: len(self.forkservers()) == 1)
        (pid,) = self.forkservers()
        return pid

    def await_lines(self, text: str, count: int = 1, within_s: float = DEADLINE_S) -> None:
        """Wait until ``text`` stands ``count`` times in the workers' present logs."""
        poll(lambda: sum(log.count(text) for log in self.logs().values()) >= count, within_s)

    def logs(self) -> dict[str, str]:
        found = {}
        for path in self.folder.glob("*_*.log"):
            with contextlib.suppress(FileNotFoundError):  # moved away, as a new attempt begins
                found[path.name] = path.read_text(errors="replace")
        return found

    def seen(self, event: str) -> list[dict]:
        """The events of this name, so far."""
        return [one for one in self.events() if one["event"] == event]

    def await_seen(self, event: str, count: int = 1) -> None:
        poll(lambda: len(self.seen(event)) >= count)

    def events(self) -> list[dict]:
        """All that happened; of a line that is being written nothing."""
        try:
            lines = (self.folder / "events.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]


@dataclass
class Launcher:
    """Starts msrun as a user would, in a folder of the test's own."""

    tmp: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    jobs: list[Job] = field(default_factory=list)
    helpers: list[subprocess.Popen] = field(default_factory=list)  # end with their job
    environ: dict[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = PYTHON  # what starts Python; see `support.warm_python`

    def env(self, **extra: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        for name in ("OMP_NUM_THREADS", "MSRUN_RUNS", "MSRUN_HOOKS", "MASTER_ADDR", "MASTER_PORT"):
            kept.pop(name, None)
        paths = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", ""))))
        return {
            **kept,
            "PYTHONPATH": paths,
            "XDG_STATE_HOME": str(self.tmp / "state"),
            MARK: self.mark,
            **self.environ,
            **extra,
        }

    def start(
        self,
        *args: object,
        log_dir: Path | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        **environ: str,
    ) -> Job:
        """`msrun ARGS`; a log folder is added in front unless ``args`` name one."""
        words = [str(arg) for arg in args]
        folder = log_dir or self.tmp / "logs"
        if not any(word.startswith(("--log-dir", "--log_dir")) for word in words):
            words.insert(0, f"--log_dir={folder}")
        env = self.env(**environ)
        reads, writes = os.pipe()
        with open(reads) as told:
            process = subprocess.Popen(
                [*self.python, "-m", "msrun", *words],
                env=env if self.python == PYTHON else client_environ(env, writes),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd or self.tmp,
                pass_fds=() if self.python == PYTHON else (writes,),
                start_new_session=True,
            )
            os.close(writes)
            job = Job(process, folder, self.mark, int(told.read() or 0))
        self.jobs.append(job)
        return job

    def run(self, *args: object, within_s: float = DEADLINE_S, **kwargs: object) -> Ended:
        return self.start(*args, **kwargs).wait(within_s)

    def command(self, *words: object, cwd: Path | None = None, **environ: str) -> Ended:
        """`msrun WORDS` to its end, without a log folder: status, logs, stop, drill ..."""
        done = subprocess.run(
            [sys.executable, "-m", "msrun", *map(str, words)],
            env=self.env(**environ),
            cwd=cwd or self.tmp,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return Ended(
            done.returncode,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
        )

    def drill(self, *words: object, within_s: float = 280) -> Ended:
        """`msrun drill WORDS`, whose own files are in the launcher's folder."""
        done = subprocess.run(
            [*self.python, "-m", "msrun", "drill", *map(str, words)],
            env=self.env(TMPDIR=str(self.tmp)),
            cwd=self.tmp,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    def run_with_descriptors(self, count: int, *program: object) -> subprocess.CompletedProcess:
        """Two ranks of a program, by an msrun that inherited ``count`` open descriptors."""
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < count + 200:
            pytest.skip("this user may not open that many files")
        args = ("--nproc-per-node=2", "--log_dir=logs", *program)
        return subprocess.run(
            [
                *(sys.executable, WORKERS / "many_files.py", str(count)),
                *(sys.executable, "-m", "msrun", *args),
            ],
            env=self.env(),
            cwd=self.tmp,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def marked(self) -> dict[int, str]:
        return marked(self.mark)

    def end(self) -> dict[int, str]:
        """End all jobs; what is left after a moment is a leak: it is returned, then killed."""
        for job in self.jobs:
            if job.process.poll() is None:
                job.process.kill()
            for stream in (job.process.stdout, job.process.stderr, job.process.stdin):
                if stream:
                    stream.close()
            job.process.wait()
        for helper in self.helpers:
            helper.kill()
            helper.wait()
        try:
            poll(lambda: not self.marked(), within_s=20)
        except AssertionError:
            left = self.marked()
            for pid in left:
                os.kill(pid, 9)
            return left
        return {}


def last_events(folders: Iterable[Path], lines: int = 40) -> list[tuple[str, str]]:
    """The end of each job's ``scheduler.log`` below these folders, with its path as the title."""
    paths = {path for folder in folders for path in folder.rglob("scheduler.log")}
    tails = {path: path.read_text(errors="replace").splitlines()[-lines:] for path in sorted(paths)}
    return [(f"end of {path}", "\n".join(tail)) for path, tail in tails.items()]


def files(folder: Path) -> set[str]:
    """Everything in ``folder`` but empty folders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def refused(ended: Ended) -> str:
    """Exit code 2 and one sentence; the sentence."""
    assert ended.code == 2, ended
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("msrun: error: ")
    return lines[0].removeprefix("msrun: error: ")


def shell(
    msrun: Launcher, prelude: str, *args: object, before: Sequence[str] = (), **environ: str
) -> Ended:
    """`msrun ARGS` by a shell that first does ``prelude``."""
    command = [*before, "sh", "-c", f'{prelude}\nexec "$@"', "sh"]
    return finished(msrun, *command, sys.executable, "-m", "msrun", *args, **environ)


def finished(msrun: Launcher, *words: object, **environ: str) -> Ended:
    """What a command ends with, run where `msrun` runs."""
    done = subprocess.run(
        list(map(str, words)),
        env=msrun.env(**environ),
        cwd=msrun.tmp,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def side_by_side(words: Sequence[object], count: int) -> list[str]:
    """What so many processes print; each gets its number and their count as its last words."""
    ranks = [
        subprocess.Popen(
            [*map(str, words), str(rank), str(count)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(not rank.returncode for rank in ranks), said
    return [out for out, _ in said]
