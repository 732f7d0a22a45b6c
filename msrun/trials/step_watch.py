"""Watches from outside how far a training is, by what its ranks record."""

from __future__ import annotations

import json
from pathlib import Path

from worker_hooks.contract.layout import DrillLayout

FIRST_STEP_S = 0.02  # assumed length of a step until one was measured


class StepWatch:
    """The newest commit of any rank, read from the ends of the ranks' records."""

    def __init__(self, layout: DrillLayout) -> None:
        """Nothing was read yet."""
        self._layout = layout
        self._read: dict[Path, int] = {}  # bytes
        self._commits: dict[int, float] = {}  # step -> when the first rank committed it
        self.attempt = 0

    @property
    def step(self) -> int:
        """The newest commit; 0: there is none."""
        return max(self._commits, default=0)

    def look(self) -> None:
        """Read what has been recorded since."""
        for path in self._layout.folder.glob("rank_*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                match json.loads(line):
                    case {"life": attempt}:
                        self.attempt = max(self.attempt, attempt)
                    case {"commit": step, "at": at}:
                        self._commits[step] = min(at, self._commits.get(step, at))

    def moment_in(self, step: int, delay: float) -> float | None:
        """When this fraction of the step is over, monotonic; ``None``: it has not begun."""
        newest = self.step
        if newest < step - 1 or not self._read:
            return None
        if newest >= step or step == 1:
            return 0.0  # now: it is over, or nobody knows when it began
        before = self._commits.get(newest - 1)
        began = self._commits[newest]
        return began + delay * (FIRST_STEP_S if before is None else began - before)
