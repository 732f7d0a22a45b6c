"""Prepares a run's folder: it exists, is writable and locked, and holds no earlier run's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
from pathlib import Path

from agent.spec.job_spec import UsageError
from worker_hooks.contract.atomic_file import FOLDER_MODE, ensure_folder
from worker_hooks.contract.layout import EARLIER, RunLayout


def open_run_folder(layout: RunLayout) -> int:
    """Make the folder and hold its lock.

    Returns:
        The lock's descriptor; the folder is ours while it is open.

    Raises:
        UsageError: the folder cannot be made or written, or a live msrun writes there.
    """
    try:
        ensure_folder(layout.folder)
        lock = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(_why_not(layout.folder, error.errno or 0)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UsageError(
            f"--log-dir {layout.folder} is in use by another msrun: name another folder"
        ) from error
    _set_earlier_run_aside(layout)
    return lock


def check_writable(folder: Path) -> None:
    """Refuse a run's folder that could not be written; it is not made yet.

    Raises:
        UsageError: it, or the folder that it would be made in, cannot be written.
    """
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise UsageError(_why_not(folder, errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        is_fixed = os.statvfs(there).f_flag & os.ST_RDONLY
        raise UsageError(_why_not(folder, errno.EROFS if is_fixed else errno.EACCES))


def _why_not(folder: Path, code: int) -> str:
    if code in {errno.EEXIST, errno.ENOTDIR}:
        return f"--log-dir {folder} is not a folder: name one, it is made if missing"
    return f"--log-dir {folder} cannot be written ({os.strerror(code)}): name another folder"


def abandon_run_folder(layout: RunLayout, lock: int) -> None:
    """Leave the folder as it was found: nothing was started."""
    with contextlib.suppress(OSError):
        os.unlink(layout.scheduler_log)
        os.unlink(layout.lock)
        os.rmdir(layout.folder)  # unless it holds files of others
    os.close(lock)


def _set_earlier_run_aside(layout: RunLayout) -> None:
    """Move the files of an earlier run into ``earlier/<its id>/``: nothing is overwritten."""
    earlier = _earlier_id(layout)
    own = (layout.scheduler_log, layout.events, layout.status, layout.failure)
    found = [path for path in own if path.exists()]
    if not layout.node:  # others may share the folder, and come later
        if earlier is not None:  # else files of such names are the user's, and are appended to
            found += layout.folder.glob("errors/attempt_*")
        found += sorted(layout.folder.glob(f"{glob.escape(layout.stem)}_*.log"))
    if not found:
        return
    aside = _free_name(layout.folder / EARLIER, earlier or "unknown")
    with contextlib.suppress(OSError):  # a full disk: the old files are appended to instead
        ensure_folder(aside)
        for path in found:
            kept = aside / path.relative_to(layout.folder)
            kept.parent.mkdir(FOLDER_MODE, exist_ok=True)
            os.rename(path, kept)
        os.rmdir(layout.folder / "errors")  # unless it holds files of the user


def _earlier_id(layout: RunLayout) -> str | None:
    """The record id of the run that wrote here; ``None`` if no run of msrun did."""
    try:
        return Path(str(json.loads(layout.status.read_bytes())["record_id"])).name
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _free_name(folder: Path, name: str) -> Path:
    taken = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}.{count}"
    return folder / candidate
