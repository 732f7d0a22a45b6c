"""What ``msrun stop`` adds to its signal: how patient it is. A file in the run's record.

The run removes it when the signal arrives, so it counts for that signal only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from worker_hooks.contract.atomic_file import write_atomic

NOTE = "stop.json"


class StopNote(NamedTuple):
    """How to stop."""

    is_graceful: bool = False  # nobody will kill msrun soon: it may take its time
    grace_s: float | None = None  # for the graceful exit; None: as the run's options say
    is_now: bool = False  # no grace at all

    @property
    def words(self) -> str:
        """What the person typed."""
        if self.is_now:
            return "msrun stop --now"
        return "msrun stop --graceful" if self.is_graceful else "msrun stop"


def write_note(folder: Path, note: StopNote) -> None:
    """Write a note for the run with this record folder; the signal follows.

    Raises:
        OSError: it cannot be written.
    """
    content = json.dumps(note._asdict()).encode()
    write_atomic(folder / NOTE, content, durable=False, private=True)


def take_note(folder: Path) -> StopNote | None:
    """Read the note and remove it; ``None``: there is none that can be read."""
    try:
        content = (folder / NOTE).read_bytes()
        (folder / NOTE).unlink()
        said = StopNote(**json.loads(content))
    except (OSError, ValueError, TypeError):
        return None
    grace_s = said.grace_s
    if grace_s is not None and not (isinstance(grace_s, int | float) and grace_s > 0):
        return None
    return said
