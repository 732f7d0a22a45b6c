"""After a rank was replaced: whether a checkpoint is overdue because the death interrupted it.

All ranks resume from memory, and none knows whether the checkpoint was saved: the new rank knows
nothing, and some of the survivors had written their part. So rank 0 looks, after it has made sure
that nothing of an earlier incarnation can be completed any more. The others see its answer on the
disk: either the checkpoint is there, or rank 0 has made the unfinished folder of this incarnation,
for which all ranks then write their parts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from worker_hooks.checkpoint import incarnation, numbering
from worker_hooks.checkpoint.rank_writer import describe_error
from worker_hooks.checkpoint.save_plan import CheckpointError, is_passing
from worker_hooks.contract.atomic_file import FOLDER_MODE
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.storage import commit, retention
from worker_hooks.storage.manifest import CHECKPOINT_KIND, Manifest

LOOK_S = 0.005  # between two looks for rank 0's answer
READ_S = 0.1  # between two looks for checkpoints, whose manifests are read


class OverdueCheckpoint(NamedTuple):
    """The step that all ranks resumed from memory, and whether its checkpoint is overdue.

    Every method raises CheckpointError if the directory cannot be used, or if rank 0 does not
    answer.
    """

    layout: CheckpointLayout  # of the checkpoint in this incarnation
    env: RankEnv
    step: int
    check: Callable[[], None]  # called while waiting for rank 0; may raise, to give up
    within_s: float  # how long to wait for rank 0

    def remove_older_incarnations(self) -> None:
        """Remove what earlier incarnations left unfinished, so that it cannot be completed.

        Rank 0 calls this before any other method.
        """
        with self._named_errors() as directory:
            for path in list(directory.iterdir()) if directory.is_dir() else ():
                owner = incarnation.owner_of(path, self.layout.prefix)
                if incarnation.is_past(owner, self.env.record_id, self.env.attempt):
                    _remove(path)

    def is_saved(self, since: int) -> bool:
        """Whether a complete checkpoint of this run holds a step from ``since`` to this one.

        All ranks get the same answer.
        """
        return self._agree(lambda: self._holds(since))

    def passed_s(self) -> float:
        """Seconds since the newest checkpoint of this run; 0 if one holds this step."""
        with self._named_errors():
            if self._holds(self.step):
                return 0.0
            newest = max((one.saved_at for one in self._own_checkpoints()), default=float("-inf"))
            return max(0.0, time.time() - newest)

    def is_not_due(self, is_not_due: bool, announcement_file: Path) -> bool:
        """Whether it is too early for a checkpoint by time; rank 0's answer counts for all ranks.

        Args:
            is_not_due: rank 0's answer.
            announcement_file: rank 0 makes it after its answer, and removes it after its last step.
        """
        if self.env.rank == 0:
            return self._agree(lambda: is_not_due)
        return self._agree(lambda: announcement_file.exists() or self._holds(self.step))

    def _agree(self, is_known: Callable[[], bool]) -> bool:
        """Rank 0's answer for all ranks: whether nothing is to be saved, which then stays so."""
        sign = self.layout.unfinished
        with self._named_errors() as directory:
            if self.env.rank == 0:
                if is_known():
                    return True
                commit.make_durable(directory)
                sign.mkdir(FOLDER_MODE, exist_ok=True)
                return False
            due = time.monotonic()
            until = due + self.within_s
            while (now := time.monotonic()) < until:
                # before the sign is read: rank 0 gives its sign, if at all, before anything else
                is_over = now >= due and is_known()
                due = now + READ_S if now >= due else due
                if sign.is_dir():
                    return False
                if is_over:
                    return True
                self.check()
                time.sleep(LOOK_S)
        raise CheckpointError(
            f"{self.layout.folder} cannot be saved: rank 0 gave no sign for {self.within_s:g} s"
        )

    def _holds(self, since: int) -> bool:
        return any(since <= one.step <= self.step for one in self._own_checkpoints())

    def _own_checkpoints(self) -> list[Manifest]:
        """The complete checkpoints of this run."""
        return [
            manifest
            for path, manifest in retention.present(self.layout.directory)
            if numbering.prefix_in(path, self.layout.prefix)
            and manifest.kind == CHECKPOINT_KIND
            and manifest.record_id == self.env.record_id
        ]

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[Path]:
        try:
            yield self.layout.directory
        except OSError as error:
            why = describe_error(error)
            raise CheckpointError(
                f"{self.layout.folder} cannot be saved: {why}", is_passing=is_passing(error)
            ) from error


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        retention.remove(path)
    except OSError:
        if path.exists():  # else it was renamed, which is enough
            raise
