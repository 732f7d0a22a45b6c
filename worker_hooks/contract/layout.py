"""Where things are written: the only place that builds a path.

A run's folder (``--log-dir``) holds::

    worker_0.log ...            stdout and stderr of each rank, written by the rank itself
    worker_0.attempt_0.log ...  the same of attempts before the last
    scheduler.log               what msrun did and why
    events.jsonl                every event and decision, one JSON object a line
    status.json                 the present state, replaced at each change
    failure.json                the failure report for programs; only after a failure
    errors/attempt_0/0.json     error files the workers write (TORCHELASTIC_ERROR_FILE)
    earlier/<record id>/        files of an earlier run in the same folder

With ``-r``/``-t`` the workers' streams are in torchrun's tree beside these:
``<run id>_<record id>/attempt_0/0/{stdout.log,stderr.log,error.json}``.

If the job runs on several nodes, the names are those of the controller's node. The others write
``node_1.log``, ``node_1.events.jsonl`` and so on, so that all nodes may share the folder.

Run records live in ``$XDG_STATE_HOME/msrun/runs/<record id>/``: ``record.json``, and the run's
folder itself when no ``--log-dir`` was given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

SCHEDULER_LOG = "scheduler.log"
EVENTS = "events.jsonl"
STATUS = "status.json"
FAILURE = "failure.json"
RECORD = "record.json"
LOCK = ".msrun.lock"
EARLIER = "earlier"
FALLBACK = "dumps"
"""Below a run's folder: where dumps go when the script's own folder cannot be written."""


class RunLayout(NamedTuple):
    """Every path of one run. ``folder`` is ``None`` when files are switched off (/dev/null)."""

    folder: Path
    record_id: str
    run_id: str
    stem: str = "worker"
    torchrun_tree: bool = False
    node: int = 0

    @property
    def scheduler_log(self) -> Path:
        """What msrun itself says."""
        return self.folder / (f"node_{self.node}.log" if self.node else SCHEDULER_LOG)

    @property
    def events(self) -> Path:
        """One JSON object a line."""
        return self._own(EVENTS)

    @property
    def status(self) -> Path:
        """The present state."""
        return self._own(STATUS)

    @property
    def failure(self) -> Path:
        """The failure report for programs."""
        return self._own(FAILURE)

    @property
    def lock(self) -> Path:
        """Locked by the msrun that writes into this folder."""
        return self.folder / (f"{LOCK}.node_{self.node}" if self.node else LOCK)

    def _own(self, name: str) -> Path:
        """The file of this node's msrun."""
        return self.folder / (f"node_{self.node}.{name}" if self.node else name)

    def worker_log(self, rank: int) -> Path:
        """Both streams of a rank's present attempt."""
        return self.folder / self.worker_log_name(rank)

    def worker_log_name(self, rank: int) -> str:
        """The same within the run's folder."""
        return f"{self.stem}_{rank}.log"

    def next_worker_log(self, rank: int) -> Path:
        """The same of a replacement, while the dead rank's log has the name."""
        return self.folder / f"{self.stem}_{rank}.log.next"

    def earlier_worker_log(self, rank: int, attempt: int) -> Path:
        """Both streams of a rank's past attempt."""
        return self.folder / f"{self.stem}_{rank}.attempt_{attempt}.log"

    def attempt(self, attempt: int) -> Path:
        """Torchrun's folder of an attempt."""
        tree = f"{self.run_id}_{self.record_id}"  # each node has a record of its own
        return self.folder / tree / f"attempt_{attempt}"

    def stream(self, attempt: int, local_rank: int, name: str) -> Path:
        """A redirected stream in torchrun's tree; ``name`` is stdout or stderr."""
        return self.attempt(attempt) / str(local_rank) / f"{name}.log"

    def filtered(self, attempt: int, name: str) -> Path:
        """The lines of all ranks that a filter picked."""
        return self.attempt(attempt) / f"filtered_{name}.log"

    def error_file(self, attempt: int, local_rank: int) -> Path:
        """Where a worker describes its own exception (torch's ``@record`` does)."""
        if self.torchrun_tree:
            return self.attempt(attempt) / str(local_rank) / "error.json"
        name = f"node_{self.node}_{local_rank}" if self.node else str(local_rank)
        return self.folder / "errors" / f"attempt_{attempt}" / f"{name}.json"


DUMP = "tft_saved_checkpoints-step_"
"""MindSpore's folder name of a power-off checkpoint; the global step follows."""

UNFINISHED = "_tmp"
REMOVED = ".removed_tmp"
"""Ends the name of a folder that is being deleted; leftovers of one belong to nobody."""

REPLACED = "_replaced_"
"""In the name of a folder that a newer one of the same name replaced; a number follows."""

BESIDE = "_beside_"
"""In the name of a folder whose proper name has the folder of another run; a number follows."""

NUMBERED = rf"(?:{REPLACED}|{BESIDE})\d+"
"""Both, as a regular expression."""

BREAKPOINT = "_breakpoint"
MANIFEST = "manifest.json"


class DumpLayout(NamedTuple):
    """Every path of one dump or checkpoint folder.

    A dump is written into a folder whose name ends with the writing run's id and ``_tmp``; the
    rename to ``folder`` is its commit.
    """

    folder: Path  # where the complete one is or will be
    record_id: str = ""  # of the run that writes: two runs may save the same step into one place

    @property
    def unfinished(self) -> Path:
        """The folder during writing."""
        owner = f".{self.record_id}" if self.record_id else ""
        return self.folder.parent / f"{self.folder.name}{owner}{UNFINISHED}"

    @staticmethod
    def of_step(ckpt_save_path: Path, step: int, record_id: str = "") -> DumpLayout:
        """The dump of a global step."""
        return DumpLayout(ckpt_save_path / f"{DUMP}{step}", record_id)

    @staticmethod
    def shard(rank: int, epoch: int, batch: int, share: int = 0) -> str:
        """The file of the rank that wrote replicated state, relative to the folder.

        ``share``: which of the parts of the state that the rank holds.
        """
        more = f"-part{share}" if share else ""
        return f"rank_{rank}/ttp_rank_{rank}-{epoch}_{batch}{more}.safetensors"

    @staticmethod
    def private(rank: int) -> str:
        """A rank's private state, relative to the folder."""
        return f"rank_{rank}/private_rank_{rank}.safetensors"

    @staticmethod
    def group_info(rank: int) -> str:
        """Which ranks hold what this one holds, under MindSpore's name, relative to the folder."""
        return f"rank_{rank}/group_info.pb"


class CheckpointLayout(NamedTuple):
    """Every path of one periodic checkpoint, under MindSpore's name of its file.

    Its folder is written like a dump's: ``worker_hooks.storage.commit`` completes ``place``.
    """

    directory: Path  # ModelCheckpoint's
    prefix: str
    epoch: int
    batch: int  # the step within the epoch
    record_id: str = ""  # of the run that writes
    is_breakpoint: bool = False  # saved because of an exception

    @property
    def name(self) -> str:
        """The name of the folder, and of the files in it without their suffix."""
        end = BREAKPOINT if self.is_breakpoint else ""
        return f"{self.prefix}-{self.epoch}_{self.batch}{end}"

    @property
    def folder(self) -> Path:
        """Where the complete one is or will be."""
        return self.directory / self.name

    @property
    def place(self) -> DumpLayout:
        """The folder as a dump's layout: written aside, then renamed."""
        return DumpLayout(self.folder, self.record_id)

    @property
    def unfinished(self) -> Path:
        """The folder during writing."""
        return self.place.unfinished

    def shard(self, rank: int) -> str:
        """The file of the rank that wrote replicated state, relative to the folder."""
        return f"rank_{rank}/{self.name}.safetensors"

    @staticmethod
    def part(rank: int) -> str:
        """A rank's report of the files it has written, relative to the unfinished folder."""
        return f"rank_{rank}.part.json"


class DrillLayout(NamedTuple):
    """What ranks write for a drill to compare."""

    folder: Path

    @property
    def launcher(self) -> Path:
        """The pid of msrun; the drill writes it."""
        return self.folder / "launcher.pid"

    def struck(self, number: int) -> Path:
        """The mark of the plan's fault ``number``: made before the fault, so it occurs once."""
        return self.folder / f"struck_{number}.json"

    def order(self, rank: int) -> Path:
        """A fault that a rank finds while it trains: the drill writes it, the rank removes it."""
        return self.folder / f"order_{rank}.json"

    def lines(self, rank: int) -> Path:
        """What a rank computed and when, over all attempts."""
        return self.folder / f"rank_{rank}.jsonl"

    def final(self, rank: int) -> Path:
        """What a rank held when training was over."""
        return self.folder / f"final_rank_{rank}.json"


def runs_folder(environ: Mapping[str, str], uid: int) -> Iterator[Path]:
    """Candidate folders for run records, best first; the caller takes the first writable one.

    XDG base directory specification: ``$XDG_STATE_HOME`` alone if it is set (a relative path does
    not count): whoever sets it sees no other run, and stops none. Else ``~/.local/state``, or,
    without a usable home, a private folder under the system's temporary folder.
    """
    state_home = environ.get("XDG_STATE_HOME", "")
    if state_home.startswith("/"):
        yield Path(state_home) / "msrun" / "runs"
        return
    home = environ.get("HOME", "")
    if home.startswith("/"):
        yield Path(home) / ".local" / "state" / "msrun" / "runs"
    yield Path(environ.get("TMPDIR") or "/tmp", f"msrun-{uid}", "runs")  # noqa: S108  see records


def sockets_folder(environ: Mapping[str, str], record_id: str) -> Path:
    """Where multiprocessing makes its sockets in a run; the first process that needs one makes it.

    Its name is short: a socket's path has 107 bytes at most.
    """
    return Path(environ.get("TMPDIR") or "/tmp", f"pymp-msrun-{record_id}")  # noqa: S108


def held(file: int) -> str:
    """The path by which other processes of the user open a file that this process has open."""
    return f"/proc/{os.getpid()}/fd/{file}"
