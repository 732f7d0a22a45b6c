"""What ranks tell each other through files when there is no agent any more.

Each rank replaces its own note as it gets on; everybody reads all. A note names its writer's
process, so that a dead writer is known, and its file's time is the sign of life of a living one.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.process_stat import read_stat

SAVED = "saved.json"


class PeerNote(NamedTuple):
    """One rank's present word."""

    pid: int
    step: int  # the newest commit
    is_settled: bool = False  # the state stands still, and is as follows
    is_whole: bool = False
    why: str = ""
    leads: str = ""  # the folder it writes a dump into, as the leader
    failed: str = ""  # why it will not lead, or not any more
    digest: str = ""
    private: dict[str, Any] | None = None  # the manifest's line of its private state
    folder: str = ""  # the folder that line is about


class PeerNotes:
    """The notes of all ranks of an attempt, in one folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open the folder, making it if this rank is the first.

        Raises:
            OSError: it cannot be written to.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._rank = rank
        self.mine = PeerNote(os.getpid(), 0)
        self._signs: dict[str, int] = {}
        self._heard_at = time.monotonic()

    def tell(self, **changed: Any) -> None:
        """Change some of one's own note.

        Raises:
            OSError: it cannot be written.
        """
        self.mine = self.mine._replace(**changed)
        text = json.dumps(self.mine._asdict()).encode()
        write_atomic(self.folder / f"rank_{self._rank}.json", text, durable=False)

    def touch(self) -> None:
        """Give a sign of life."""
        os.utime(self.folder / f"rank_{self._rank}.json")

    def read(self) -> dict[int, PeerNote]:
        """The notes of all ranks that wrote one and are alive, one's own with them."""
        notes = {}
        for path in self.folder.glob("rank_*.json"):
            try:
                note = PeerNote(**json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError):
                continue  # replaced this moment, or not a note
            if _is_alive(note.pid):
                notes[int(path.stem[5:])] = note
        return notes

    def last_sign_s(self) -> float:
        """Seconds since this process saw a sign of life of any rank.

        Files' times are only compared with each other: clocks are set, a file server has its own.
        """
        signs = {path.name: path.stat().st_mtime_ns for path in self.folder.glob("rank_*.json")}
        if signs != self._signs:
            self._signs, self._heard_at = signs, time.monotonic()
        return time.monotonic() - self._heard_at

    def announce(self, path: str, step: int) -> None:
        """Say where the dump is.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps({"path": path, "step": step}).encode()
        write_atomic(self.folder / SAVED, text, durable=False)

    def saved(self) -> str | None:
        """Where the dump is, once there is one."""
        try:
            return str(json.loads((self.folder / SAVED).read_bytes())["path"])
        except (OSError, ValueError, KeyError):
            return None


def _is_alive(pid: int) -> bool:
    found = read_stat(pid)
    return found is not None and not found.is_dead
