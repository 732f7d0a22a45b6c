"""What becomes of a checkpoint that the disk does not take: it is said, and training continues.

A disk that is full or fails is no reason to end a training that is well: the previous checkpoint
stays, and the next one is tried when it is due. A checkpoint that was asked for, and the last one,
raise instead.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_hooks.checkpoint.save_plan import CheckpointError
from worker_hooks.guard.guard import Guard

log = logging.getLogger("msrun")


class PassingFailures:
    """The failures of one rank since the last checkpoint that was saved."""

    def __init__(self) -> None:
        """There was none."""
        self._step = 0  # that was tried last
        self._newest: CheckpointError | None = None  # of that step
        self._causes: set[str] = set()  # that were said
        self._folders: list[Path] = []  # unfinished, on rank 0

    def attempt(self, step: int) -> None:
        """A step is about to be saved."""
        self._step, self._newest = step, None

    def begin(self, unfinished: Path) -> None:
        """Rank 0 is about to write into this folder; remove what is left of those that failed."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = [unfinished]

    @contextmanager
    def said(self, guard: Guard) -> Iterator[None]:
        """Say a failure that may pass, once for each cause, and suppress it.

        Raises:
            CheckpointError: another failure.
        """
        try:
            yield
        except CheckpointError as error:
            if not error.is_passing:
                raise
            self._newest = error
            cause = re.sub(r"/\S+|[0-9]+", "", str(error))  # which step and which file: no matter
            if cause in self._causes:
                return
            self._causes.add(cause)
            self._say(
                guard,
                f"{error}; training continues, earlier checkpoints stay, and the next one is tried "
                "when it is due",
            )

    def saved(self, guard: Guard, folder: str) -> None:
        """A checkpoint was saved; ``folder``: of all ranks; empty: this one's part of it."""
        if folder and guard.is_on:
            guard.report_checkpoint(self._step, folder)
        self._newest, self._folders = None, []
        if self._causes and folder:
            self._say(guard, f"checkpoints are saved again: {folder}")
        self._causes.clear()

    def raise_that_of(self, step: int) -> None:
        """Raise the failure of this step, if it was tried in vain.

        Raises:
            CheckpointError: it was.
        """
        if self._newest is not None and self._step == step:
            raise self._newest

    def _say(self, guard: Guard, text: str) -> None:
        if guard.is_on and guard.env.rank == 0:
            guard.say_unprotected(text, is_refused=False)
        else:
            log.error("%s", text)
