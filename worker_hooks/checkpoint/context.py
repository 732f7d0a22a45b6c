"""What a checkpoint is made of: the interface between ``ModelCheckpoint`` and a training.

``TrainState`` builds the context; an adapter for a framework with a loop of its own would do the
same. Scripts have no use for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from worker_hooks.contract.env import RankEnv
from worker_hooks.guard.guard import Guard
from worker_hooks.state.committed_state import CommittedState


class CheckpointContext(NamedTuple):
    """A rank's state, as seen by what saves it."""

    env: RankEnv  # of the current attempt
    guard: Guard
    committed: CommittedState
    resumed_folder: Path | None = None  # the checkpoint that training resumed from
    lineage: str = ""  # the runs that this one resumed, newest first, joined by ":"
    resumed_step: int = 0  # of those runs, that this one began from
    memory_step: int = 0  # the step that all ranks resumed from memory; 0: they did not

    def freeze_failed(self) -> tuple[int, bool, str]:
        """Freeze a state whose training ended with an exception.

        Returns:
            The step, whether the state is whole as of it, and why it is not.
        """
        self.guard.gate.note_raised()
        return self.guard.freeze(0.0)


class CheckpointedTraining(Protocol):
    """What ``ModelCheckpoint`` reads of a training."""

    @property
    def step(self) -> int:
        """The newest commit."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def world_size(self) -> int:
        """The count of all ranks."""

    @property
    def checkpoint_context(self) -> CheckpointContext:
        """As of the current attempt."""
