"""The newest saved step of a running job; its folders are read only after a change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from agent.records import run_record
from agent.records.run_record import Record
from worker_hooks.storage.find import Verify, search

Mark = tuple[tuple[str, int], ...]


class Checkpoints:
    """Remembers the newest step until a folder changes."""

    def __init__(self, environ: Mapping[str, str], record: Record) -> None:
        """``record``: of the run; msrun adds folders to it when ranks save into them."""
        self._environ, self.record = environ, record
        self._mark: Mark = ()
        self._step: int | None = None

    def newest(self) -> int | None:
        """The newest step in a complete dump or checkpoint of this run.

        Earlier runs may have left newer ones in the same folder.
        """
        self.record = run_record.present(self._environ, self.record)
        mark = tuple(_marks(self.record))
        if mark != self._mark:
            self._mark, self._step = mark, _newest(self.record)
        return self._step


def _marks(record: Record) -> Mark:
    found = []
    for place in record.checkpoints:
        with contextlib.suppress(OSError):  # the folder does not exist yet
            found.append((place, os.stat(place).st_mtime_ns))
    return tuple(found)


def _newest(record: Record) -> int | None:
    folders = map(Path, record.checkpoints)
    newest = search(folders, verify=Verify.NONE, runs=(record.saves_as,)).newest
    return None if newest is None else newest.manifest.step
