"""What a rank computed, written down while it computes: a drill compares runs by it.

One file of JSON lines a rank (life, loss, commit), which every attempt adds to, and one more at the
end of training.
Floats are written in hexadecimal: equal means equal to the last bit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.env import RankEnv
from worker_hooks.drill.plan import DrillPlan


class TrainingTrace:
    """Writes one rank's lines; each is whole on disk before training goes on."""

    def __init__(self, plan: DrillPlan, told: RankEnv) -> None:
        """Begin the lines of this attempt.

        Raises:
            OSError: the drill's folder cannot be written.
        """
        self._final = plan.layout.final(told.rank)
        self.ckpt = plan.ckpt  # where to save instead of the script's folder; empty: there
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(plan.layout.lines(told.rank), flags, 0o644)
        self._run = told.record_id
        self.begin(told.attempt)

    @staticmethod
    def from_env(environ: Mapping[str, str], rank: int) -> TrainingTrace | None:
        """The witness of this rank; ``None`` outside of a drill.

        Raises:
            ValueError: the drill is unreadable.
            OSError: the drill's folder cannot be written.
        """
        told = RankEnv.read(environ)
        plan = DrillPlan.decode(told.drill)
        return TrainingTrace(plan, told._replace(rank=rank)) if plan is not None else None

    def begin(self, attempt: int) -> None:
        """The lines of another attempt follow, in the same process or in a new one."""
        self._put(life=attempt, run=self._run, at=time.monotonic())

    def loss(self, step: int, loss: Any) -> None:
        """A loss of a step: a number, or a tensor (of which the sum is taken); ``None``: unknown.

        Of a step that is repeated by another attempt the last one's losses count.
        """
        if loss is None:
            return
        if hasattr(loss, "detach"):
            loss = loss.detach()
            loss = loss if loss.numel() == 1 else loss.double().sum()
        self._put(loss=float(loss).hex(), step=step)

    def commit(self, step: int, at: float | None = None) -> None:
        """A step is committed; ``at`` is ``time.monotonic()``, one clock for all processes."""
        self._put(commit=step, at=time.monotonic() if at is None else at)

    def finish(self, step: int, digest: str, private_digest: str) -> None:
        """Training is over: the replicated and the private state by their digests."""
        content = {"step": step, "digest": digest, "private_digest": private_digest}
        write_atomic(self._final, json.dumps(content).encode(), durable=False)

    def close(self) -> None:
        """Write no more."""
        os.close(self._fd)

    def _put(self, **fields: object) -> None:
        os.write(self._fd, json.dumps(fields).encode() + b"\n")
