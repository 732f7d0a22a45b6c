"""Run records: small files by which ``msrun status``, ``stop`` and ``logs`` find a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.spec.job_spec import JobSpec, UsageError
from agent.text.secret_names import has_password, is_secret_name
from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.layout import DUMP, RECORD, RunLayout, runs_folder
from worker_hooks.contract.process_stat import read_stat

KEPT = 100  # records of ended runs; the oldest go first


class Record(NamedTuple):
    """Who runs what, and where its files are."""

    record_id: str
    run_id: str
    pid: int
    born: int  # when the process started, in clock ticks since boot: detects a reused pid
    log_dir: str
    argv: tuple[str, ...]
    cwd: str
    started: float  # seconds since the epoch
    checkpoints: tuple[str, ...] = ()  # folders that this run saves into, absolute
    environ: Mapping[str, str] = {}  # what remembered() keeps of the launcher's environment
    lineage: tuple[str, ...] = ()  # record ids of the runs that this one resumes, newest first
    resumed_step: int | None = None  # of those, that this one began from
    unrecorded: tuple[str, ...] = ()  # names of variables that were set, without their values
    failed_devices: tuple[str, ...] = ()  # that no resume is to use again
    node: int = 0  # by which its own files are named in a folder that several nodes share
    job: str = ""  # the record id of the job's first node, which names what is saved; empty: this
    host: str = ""  # of this node; empty: the only one of its job
    engine_job: str = ""  # names the batch system's job that has started it
    ranks: tuple[int, ...] = ()  # of this node, if the job has others
    complete_path: str = ""  # the newest checkpoint that the run completed, or began from
    complete_step: int = 0  # that it holds
    may_leave: bool = False  # its node alone is meant by a signal (--on-leave=shrink)

    @property
    def saves_as(self) -> str:
        """The run's name in what it saves."""
        return self.job or self.record_id

    @property
    def complete(self) -> CompleteCheckpoint | None:
        """The newest checkpoint that must be there; ``None``: none is known."""
        if not self.complete_path:
            return None
        return CompleteCheckpoint(self.complete_path, self.complete_step)

    def has_rank(self, rank: int) -> bool:
        """Whether a rank's process and page are on this node: elsewhere its pid is another's."""
        return not self.host or rank in self.ranks

    def is_alive(self) -> bool:
        """Whether the msrun process of this record still runs."""
        return birth(self.pid) == self.born


def new_record_id() -> str:
    """A new name for a run: unique on this host, sortable by its start."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def record_of(
    spec: JobSpec, layout: RunLayout, environ: Mapping[str, str], started: float, host: str
) -> Record:
    """What other msrun processes can read about this one's run.

    Args:
        layout: of the run's files.
        environ: msrun's.
        started: in seconds since the epoch.
        host: this one.
    """
    resume = spec.dump.resume
    has_others = spec.nnodes > 1
    return Record(
        record_id=spec.record_id,
        run_id=spec.run_id,
        pid=os.getpid(),
        born=birth(os.getpid()) or 0,
        log_dir=str(layout.folder),
        argv=(sys.argv[0], *spec.argv),
        cwd=os.getcwd(),
        started=started,
        checkpoints=() if resume is None else (str(resume.parent),),
        environ=remembered(environ),
        lineage=spec.dump.lineage,
        resumed_step=spec.dump.resume_step if spec.dump.resume else None,
        unrecorded=unrecorded(environ),
        failed_devices=spec.devices.given_up,
        node=layout.node,
        job="" if spec.saves_as == spec.record_id else spec.saves_as,
        engine_job=spec.engine_job,
        host=host if has_others else "",
        ranks=spec.ranks_here if has_others else (),
        complete_path="" if resume is None else str(resume),
        complete_step=spec.dump.resume_step,
        may_leave=spec.cluster is not None and spec.cluster.leaves,
    )


def birth(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; ``None``: it is not alive."""
    found = read_stat(pid)
    return None if found is None or found.is_dead else found.born


def writable_folder(environ: Mapping[str, str]) -> Path:
    """The folder of run records, made if missing.

    Raises:
        UsageError: no candidate can be written to.
    """
    for folder in runs_folder(environ, os.getuid()):
        with contextlib.suppress(OSError):
            for level in (folder.parent, folder):
                level.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_ours(folder) and os.access(folder, os.W_OK):
                return folder
    tried = ", ".join(map(str, runs_folder(environ, os.getuid())))
    raise UsageError(
        f"run records cannot be written ({tried}): set XDG_STATE_HOME to a folder that can be"
    )


def _is_ours(folder: Path) -> bool:
    """Whether both levels belong to this user: under /tmp, others may have prepared them."""
    found = (os.lstat(level) for level in (folder.parent, folder))
    return all(
        stat.S_ISDIR(level.st_mode)
        and level.st_uid == os.getuid()
        and not level.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
        for level in found
    )


def write(folder: Path, record: Record) -> None:
    """Write a record into ``folder/<record id>/``; surplus records of ended runs are deleted.

    Raises:
        OSError: it cannot be written.
    """
    own = folder / record.record_id
    own.mkdir(mode=0o700, exist_ok=True)
    content = json.dumps(record._asdict(), indent=1).encode() + b"\n"
    write_atomic(own / RECORD, content, durable=False, private=True)
    _prune(folder)


def add_checkpoints(folder: Path, record: Record, path: str) -> Record:
    """Add a folder that the run saves into, so that a resume finds it; return the new record.

    Raises:
        OSError: the record cannot be written.
    """
    if path in record.checkpoints:
        return record
    added = record._replace(checkpoints=(*record.checkpoints, path))
    write(folder, added)
    return added


class KeptRecord:
    """The record of a run that gets on, for a resume to come; its calls do file work."""

    def __init__(self, folder: Path, record: Record) -> None:
        """``folder``: of the records, in which this one is written already."""
        self._folder, self._record = folder, record
        self._lock = threading.Lock()  # places are added by a thread of the agent
        self._writing = threading.Lock()
        self.tell: Callable[[CompleteCheckpoint], object] = lambda _: None
        """Takes each checkpoint that was completed: other nodes are to know it."""

    def add_place(self, path: str) -> None:
        """The run saves into this folder.

        Raises:
            OSError: the record cannot be written.
        """
        with self._lock:
            if path in self._record.checkpoints:
                return
            places = (*self._record.checkpoints, path)
            self._record = self._record._replace(checkpoints=places)
        self.write()

    def give_up(self, devices: tuple[str, ...]) -> None:
        """No run that resumes this one uses these devices again.

        Raises:
            OSError: the record cannot be written.
        """
        with self._lock:
            failed = (*self._record.failed_devices, *devices)
            self._record = self._record._replace(failed_devices=failed)
        self.write()

    def resumed(self, lineage: tuple[str, ...], step: int) -> None:
        """The run found by itself what it began from: a step of the newest of these runs.

        Raises:
            OSError: the record cannot be written.
        """
        with self._lock:
            self._record = self._record._replace(lineage=lineage, resumed_step=step)
        self.write()

    def know(self, done: CompleteCheckpoint) -> None:
        """A checkpoint is complete. Does no file work: :meth:`write` puts it down."""
        with self._lock:
            self._record = self._record._replace(complete_path=done.path, complete_step=done.step)

    def complete(self, done: CompleteCheckpoint) -> None:
        """As :meth:`know`, on the controller's node, which tells the others."""
        self.know(done)
        self.tell(done)

    def write(self) -> None:
        """Write the record as it is by now.

        Raises:
            OSError: it cannot be written.
        """
        with self._writing:
            write(self._folder, self._record)

    def end(self) -> None:
        """The run is over though its msrun goes on, with another one.

        Raises:
            OSError: the record cannot be written.
        """
        with self._lock:
            self._record = self._record._replace(pid=0, born=0)
        self.write()

    @property
    def present(self) -> Record:
        """The record as it is now."""
        return self._record


def _prune(folder: Path) -> None:
    for old in sorted(path for path in folder.iterdir() if path.is_dir())[:-KEPT]:
        record = read(old)
        if record is not None and not record.is_alive() and not any(old.glob(f"*/{DUMP}*")):
            import shutil  # slow to import, rarely needed

            shutil.rmtree(old, ignore_errors=True)


def claim(folder: Path, record_id: str) -> int | None:
    """Be the only one to resume a run, for as long as the returned descriptor is open.

    ``record_id``: the run's. Its record may be gone; then there is nothing to lock.

    Raises:
        UsageError: another msrun resumes it.
    """
    try:
        own = os.open(folder / Path(record_id).name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(own)
        raise UsageError(
            f"run {record_id} is being resumed already: another msrun began a moment ago"
        ) from None
    except OSError:  # a file system without locks
        os.close(own)
        return None
    return own


def read(folder: Path) -> Record | None:
    """The record in a run's own folder; ``None`` if there is none that can be read."""
    try:
        fields = json.loads((folder / RECORD).read_bytes())
        for name in ("argv", "checkpoints", "lineage", "unrecorded", "failed_devices", "ranks"):
            fields[name] = tuple(fields.get(name, ()))
        return Record(**fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def present(environ: Mapping[str, str], record: Record) -> Record:
    """A record as it is now, or as it was if it cannot be read."""
    folders = (folder / record.record_id for folder in runs_folder(environ, os.getuid()))
    return next(filter(None, map(read, folders)), record)


def records(environ: Mapping[str, str]) -> Iterator[Record]:
    """All readable records, newest first."""
    found = [
        read(path)
        for folder in runs_folder(environ, os.getuid())
        if folder.is_dir() and _is_ours(folder)
        for path in folder.iterdir()
    ]
    known = {record.record_id: record for record in found if record is not None}
    yield from sorted(known.values(), key=lambda record: record.started, reverse=True)


def successor(environ: Mapping[str, str], record: Record) -> Record | None:
    """The run that the msrun of this one goes on with, as after the loss of node 0; ``None``: none.

    ``record``: as it was while that was its run.
    """
    if present(environ, record).pid:  # see KeptRecord.end
        return None
    msrun = record.pid, record.born
    return next((each for each in records(environ) if (each.pid, each.born) == msrun), None)


def find(environ: Mapping[str, str], name: str) -> Record:
    """The record called ``name`` (run id, record id, or the unique beginning of one).

    Raises:
        UsageError: there is none, or more than one.
    """
    known = list(records(environ))
    if not known:
        raise UsageError("no run is recorded for this user on this host")
    # other nodes of a job that are on this machine have its first node's as their run id
    exact = [record for record in known if record.record_id == name]
    exact += [record for record in known if record.run_id == name]
    if exact:
        return exact[0]
    fitting = [record for record in known if record.record_id.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        listed = ", ".join(record.record_id for record in fitting[:5])
        raise UsageError(f"{name} fits {len(fitting)} runs ({listed}): give more of the id")
    raise UsageError(f"no run is called {name}: `msrun status --all` lists them")


_SESSION = frozenset(
    (
        *("PWD", "OLDPWD", "SHLVL", "_", "SHELL", "PS1", "PS2", "PS4", "PROMPT_COMMAND", "MAIL"),
        *("COLUMNS", "LINES", "LS_COLORS", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID"),
        *("STY", "WINDOW", "INVOCATION_ID", "JOURNAL_STREAM", "XDG_RUNTIME_DIR"),
    )
)

_SESSION_STARTS = (
    *("TERM", "SSH_", "XDG_SESSION", "XDG_SEAT", "XDG_VTNR", "DBUS", "TMUX", "VTE_", "GPG_"),
    *("BASH_FUNC_", "MSRUN_", "SLURM_"),  # an outer run or an allocation has ended by then
    "TORCHELASTIC_",  # of an outer launcher
)

_KEPT = frozenset(
    ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "TZ")
)

_KEPT_STARTS = (
    *("PET_", "MS_", "PYTHON", "LC_"),  # options of msrun, the interpreter, the locale
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH", "PYTORCH_", "ATEN_", "DDP_", "TRITON_"),
    *("NCCL_", "GLOO_", "UCX_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "HIP_", "ROCM_", "HSA_"),
)

_DEVICES = "VISIBLE_DEVICES"  # those of an allocation that may be over


def remembered(environ: Mapping[str, str]) -> dict[str, str]:
    """What a resume sets again: variables of msrun's options, of the interpreter and libraries."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _KEPT or name.startswith(_KEPT_STARTS))
        and not _is_session(name)
        and not name.endswith(_DEVICES)
        and not is_secret_name(name)
        and not has_password(value)
    }


def unrecorded(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of other variables, whose values are not written down: the script may read them."""
    kept = remembered(environ)
    names = (name for name in environ if name not in kept and not _is_session(name))
    return tuple(sorted(name for name in names if not name.endswith(_DEVICES)))


def _is_session(name: str) -> bool:
    """Whether it belongs to a terminal's session, an allocation or an outer launcher."""
    return name in _SESSION or name.startswith(_SESSION_STARTS)
