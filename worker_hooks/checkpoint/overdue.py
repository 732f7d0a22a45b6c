"""What is owed when a dead rank was replaced: a checkpoint that was due, and that its death undid.

All ranks go on from memory then, and none knows what was saved: who came knows nothing, and of who
lives on some were done with their part. So rank 0 looks, once nothing of an earlier life can
become complete any more, and what it finds the others see: either the checkpoint is on the disk, or
rank 0 has made the unfinished folder of this life, for which all then write their parts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from worker_hooks.checkpoint import incarnation, numbering
from worker_hooks.checkpoint.rank_writer import words
from worker_hooks.checkpoint.save_plan import CheckpointError
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.storage import commit, retention
from worker_hooks.storage.manifest import CHECKPOINT_KIND, Manifest

LOOK_S = 0.005  # between two looks for rank 0's word
READ_S = 0.1  # between two for checkpoints, which are read


class OverdueCheckpoint(NamedTuple):
    """What may be owed of the step that all ranks went on from.

    Whatever is asked raises CheckpointError if the directory cannot be used, or if rank 0 does not
    come.
    """

    layout: CheckpointLayout  # of its checkpoint in this life
    env: RankEnv
    step: int
    look: Callable[[], None]  # called while rank 0 is waited for
    within_s: float  # how long it is

    def fence(self) -> None:
        """Take away what earlier lives left unfinished; nothing of it will be complete.

        Rank 0 does so before anything else is asked.
        """
        with self._used() as directory:
            for path in list(directory.iterdir()) if directory.is_dir() else ():
                owner = incarnation.owner(path, self.layout.prefix)
                if incarnation.is_past(owner, self.env.record_id, self.env.attempt):
                    _take_away(path)

    def is_paid(self, since: int) -> bool:
        """Whether a complete checkpoint of this run holds the step, or one since that step.

        All ranks come to the same answer.
        """
        return self._agreed(lambda: self._is_saved(since))

    def passed_s(self) -> float:
        """The time since the newest checkpoint of this run; none, if one holds this very step."""
        with self._used():
            if self._is_saved(self.step):
                return 0.0
            newest = max((one.saved_at for one in self._saved()), default=float("-inf"))
            return max(0.0, time.time() - newest)

    def is_early(self, is_early: bool, announcement: Path) -> bool:
        """Whether it is too early for a checkpoint by time; for all ranks what rank 0 says.

        Args:
            is_early: rank 0's word.
            announcement: rank 0 makes it behind its word, and removes it behind its last step.
        """
        if self.env.rank == 0:
            return self._agreed(lambda: is_early)
        return self._agreed(lambda: announcement.exists() or self._is_saved(self.step))

    def _agreed(self, is_known: Callable[[], bool]) -> bool:
        """Rank 0's answer, for all: whether nothing is to be saved. Once known it stays so."""
        sign = self.layout.unfinished
        with self._used() as directory:
            if self.env.rank == 0:
                if is_known():
                    return True
                commit.make_durable(directory)
                sign.mkdir(exist_ok=True)
                return False
            due = time.monotonic()
            until = due + self.within_s
            while (now := time.monotonic()) < until:
                # first: if rank 0 gives its sign, then before anything else
                is_over = now >= due and is_known()
                due = now + READ_S if now >= due else due
                if sign.is_dir():
                    return False
                if is_over:
                    return True
                self.look()
                time.sleep(LOOK_S)
        raise CheckpointError(
            f"{self.layout.folder} cannot be saved: rank 0 gave no sign for {self.within_s:g} s"
        )

    def _is_saved(self, since: int) -> bool:
        return any(since <= one.step <= self.step for one in self._saved())

    def _saved(self) -> list[Manifest]:
        """The complete checkpoints of this run."""
        return [
            manifest
            for path, manifest in retention.present(self.layout.directory)
            if numbering.numbered(path, self.layout.prefix)
            and manifest.kind == CHECKPOINT_KIND
            and manifest.record_id == self.env.record_id
        ]

    @contextlib.contextmanager
    def _used(self) -> Iterator[Path]:
        try:
            yield self.layout.directory
        except OSError as error:
            why = words(error)
            raise CheckpointError(f"{self.layout.folder} cannot be saved: {why}") from error


def _take_away(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        retention.remove(path)
    except OSError:
        if path.exists():  # else it has lost its name at least, and with it all that counts
            raise
