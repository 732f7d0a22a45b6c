"""The notes by which ranks talk to each other through files when the agent is dead.

Each rank replaces its own note and reads all. A note names the process of its writer, so that a
dead writer is detected, and the time of its file is a living writer's sign of progress. Of a writer
on another machine that time is all there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from worker_hooks.contract.atomic_file import ensure_folder, read_small, write_atomic
from worker_hooks.contract.left_pages import left_pages
from worker_hooks.contract.process_stat import read_stat
from worker_hooks.contract.status_page import Page
from worker_hooks.machine import kernel_files
from worker_hooks.storage.private_records import UNSOUND

SAVED = "saved.json"
TOUCH_S = 0.5
AWAY_S = 20.0  # without a sign: a writer on another machine counts as dead; file servers are late


class PeerNote(NamedTuple):
    """The note of one rank."""

    pid: int
    step: int  # the newest commit
    host: str = ""  # the machine on which the process id counts
    copied: Sequence[int] = ()  # ranks on another node of whose pages it has copies
    is_waiting: bool = False  # in front of an update, which it makes only if a peer has made it
    is_settled: bool = False  # the state will not change any more; the rest describes it
    is_whole: bool = False
    is_memory: bool = False  # what it holds of that step is a dump in memory
    memory: str = ""  # that dump, of which it has a part, as worker_hooks.recovery.joint_dump
    states: tuple[int, ...] = ()  # of that, those whose tensors it has
    ranks: tuple[tuple[int, int], ...] = ()  # of that, whose private state it has: first and last
    why: str = ""
    leads: str = ""  # the folder that it writes a dump to, as the leader
    failed: str = ""  # why it cannot lead
    alike: tuple[int, ...] = ()  # the ranks that hold the same; none: all, or nobody knows
    parts: tuple[tuple[int, ...], ...] = ()  # of it, if some is held with others than the rest
    total: int = 0  # parts that the state of all ranks has, or states that the dump has
    by_parts: bool = False  # it leads so that each part is written once, not each group's state
    digest: str = ""
    written: dict[str, Any] | None = None  # the manifest's entry for the state of these
    shares: Sequence[tuple[str, dict[str, Any] | None]] = ()  # the last two, for each of its parts
    private: dict[str, Any] | None = None  # the manifest's entry for its private state
    requests: Sequence[tuple[int, Sequence[int], Sequence[int]]] = ()  # to ranks, as it leads
    files: Sequence[dict[str, Any]] = ()  # the manifest's entries for what it was asked for
    folder: str = ""  # the folder of these entries


class PeerNotes:
    """The notes of all ranks of an attempt, in one folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open the folder; the first rank makes it.

        Raises:
            OSError: the folder cannot be written to.
        """
        ensure_folder(folder)
        self.folder = folder
        self._rank = rank
        self.mine = PeerNote(os.getpid(), 0, _machine())
        self._signs: dict[int, tuple[int, float]] = {}  # by rank: the newest, and when it was seen
        self._touched_s = 0.0
        self._old = b""  # what was announced at an earlier loss

    def tell(self, **changed: Any) -> None:
        """Change fields of this rank's note.

        Raises:
            OSError: the note cannot be written.
        """
        self.mine = self.mine._replace(**changed)
        text = json.dumps(self.mine._asdict()).encode()
        write_atomic(self._path(self._rank), text, durable=False)

    def touch(self) -> None:
        """Give a sign of life, at most twice a second."""
        if (now_s := time.monotonic()) > self._touched_s + TOUCH_S:
            self._touched_s = now_s
            with contextlib.suppress(OSError):  # whoever looks sees that it is missing
                os.utime(self._path(self._rank))

    def read(self) -> dict[int, PeerNote]:
        """The notes of all ranks that are alive and not stopped, this rank's included."""
        notes = {}
        for path in self.folder.glob("rank_*.json"):
            try:
                note = PeerNote(**json.loads(read_small(path)))
                parts = tuple(map(tuple, note.parts))
                note = note._replace(alike=tuple(note.alike), parts=parts)
            except (OSError, ValueError, TypeError):
                continue  # just being replaced, or no note
            rank = int(path.stem[5:])
            is_here = note.host == self.mine.host
            if _is_awake(note.pid) if is_here else self.silent_s(rank) < AWAY_S:
                notes[rank] = note
        return notes

    def left(self) -> set[int]:
        """Dead ranks on other machines whose pages are here."""
        return set(left_pages(self.folder))

    def copied(self) -> set[int]:
        """Ranks on other machines, which may live, of whose pages copies are here."""
        return set(left_pages(self.folder, copies=True))

    def pages(self, attempt: int) -> dict[int, Page]:
        """Those pages and copies, if they are of this attempt."""
        found = {}
        left = left_pages(self.folder, copies=True) | left_pages(self.folder)
        for rank, path in left.items():
            with contextlib.suppress(OSError, *UNSOUND):
                page = _page(path.read_bytes())
                if (page.rank, page.attempt) == (rank, attempt):
                    found[rank] = page
        return found

    def silent_s(self, rank: int) -> float:
        """Seconds since this process last saw a sign of life of a rank.

        The files' times are only compared with each other, because clocks are adjusted, and a file
        server has its own clock.
        """
        try:
            sign = self._path(rank).stat().st_mtime_ns
        except OSError:
            sign = 0
        if rank not in self._signs or self._signs[rank][0] != sign:
            self._signs[rank] = sign, time.monotonic()
        return time.monotonic() - self._signs[rank][1]

    def announce(self, path: str, step: int) -> None:
        """Announce the complete dump.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps({"path": path, "step": step}).encode()
        write_atomic(self.folder / SAVED, text, durable=False)

    def withdraw(self) -> None:
        """Take the note away: ranks on other machines do not see that this one ends."""
        self._path(self._rank).unlink(missing_ok=True)

    def remove_if_last(self) -> None:
        """Remove the folder unless others have notes there: nobody saves what was left in it."""
        if any(self.folder.glob("rank_*.json")):
            return
        with contextlib.suppress(OSError):  # they are at it, too, or have saved
            for copies in (False, True):
                for path in left_pages(self.folder, copies=copies).values():
                    path.unlink(missing_ok=True)
            self.folder.rmdir()

    def saved(self) -> str | None:
        """The folder of the complete dump; ``None``: there is none yet."""
        try:
            text = read_small(self.folder / SAVED)
            return None if text == self._old else str(json.loads(text)["path"])
        except (OSError, ValueError, KeyError):
            return None

    def forget_earlier(self) -> None:
        """What is announced already, of a step before this rank's, is of an earlier loss.

        A job on several nodes goes on where a part of it was cut off, and saved by itself.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            text = read_small(self.folder / SAVED)
            self._old = text if json.loads(text)["step"] < self.mine.step else b""

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"


def _page(content: bytes) -> Page:
    fd = os.memfd_create("msrun-page", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        page = Page(fd)
    except BaseException:
        os.close(fd)
        raise
    finalize(page, os.close, fd)
    return page


def _machine() -> str:
    """Names a kernel and its set of process ids: containers share the former.

    The host's name stands for a kernel that does not tell its id.
    """
    boot = kernel_files.text(Path("/proc/sys/kernel/random/boot_id"))
    return f"{os.uname().nodename} {boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _is_awake(pid: int) -> bool:
    found = read_stat(pid)
    return found is not None and not found.is_dead and not found.is_stopped
