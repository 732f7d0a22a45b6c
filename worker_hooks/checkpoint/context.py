"""What a checkpoint needs to know of the ``TrainState`` that it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.env import RankEnv
from worker_hooks.guard.guard import Guard
from worker_hooks.state.committed_state import CommittedState


class CheckpointContext(NamedTuple):
    """A rank's state, seen by what saves it."""

    told: RankEnv
    ledger: CommittedState
    guard: Guard
    resumed: Path | None  # the checkpoint that training went on from
    ancestor: str  # the run that saved it; empty: none that is known
    remembered: int  # the step that all ranks went on from in memory; 0: they did not

    @staticmethod
    def of(state: Any) -> CheckpointContext:
        """Look at a ``TrainState`` as it begins."""
        point = state._resumed  # noqa: SLF001  scripts have no business with it
        is_on_disk = point is not None and not point.quick_digest
        resumed = Path(point.saved.folder) if is_on_disk else None
        run = "" if point is None else str(point.saved.manifest.record_id)
        told = state._guard.told  # noqa: SLF001
        ancestor = "" if run == told.record_id else run
        remembered = 0 if point is None or is_on_disk else int(point.step)
        guard, ledger = state._guard, state._ledger  # noqa: SLF001
        return CheckpointContext(told, ledger, guard, resumed, ancestor, remembered)

    def again(self, state: Any) -> CheckpointContext:
        """The same ``TrainState`` when it goes on with new peers, from memory."""
        return self._replace(told=state._guard.told, remembered=state.step)  # noqa: SLF001

    def stand(self) -> tuple[int, bool, str]:
        """The step that the state is whole as of behind an exception, whether it is; why not."""
        self.guard.gate.note_raised()
        return self.guard.freeze(0.0)
