"""Records what a rank computed while it computes; a drill compares runs by these records.

Each rank has one file of JSON lines (life, loss, commit, warning), which every attempt appends to,
and one more file at the end of training. Floats are in hexadecimal: equal text means equal bits.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.env import RankEnv
from worker_hooks.drill.observer import StepObserver
from worker_hooks.drill.plan import DrillPlan

log = logging.getLogger("msrun")


class TrainingTrace(StepObserver):
    """Writes one rank's records; each line is in its file before training continues."""

    def __init__(self, plan: DrillPlan, env: RankEnv) -> None:
        """Begin the lines of this attempt.

        Raises:
            OSError: the drill's folder cannot be written.
        """
        self._final = plan.layout.final(env.rank)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(plan.layout.lines(env.rank), flags, 0o644)
        self._life: tuple[str, int] = (env.record_id, env.attempt)
        self.attempt_begins(env.attempt)
        log.addFilter(self._warned)  # no handler: with one, logging would print nothing by itself

    def attempt_begins(self, attempt: int) -> None:
        """Write that the lines of another attempt follow."""
        self._begin(attempt)

    def woken(self, attempt: int) -> None:
        """The process goes on in another attempt as it was at an earlier step, to repeat some."""
        self._begin(attempt, woken=True)

    def _begin(self, attempt: int, **more: object) -> None:
        run, _ = self._life
        self._life = run, attempt
        self._write(life=attempt, run=run, at=time.monotonic(), **more)

    def backward_begins(self, step: int, loss: Any) -> None:
        """Write the loss: of a number itself, of a tensor the sum; nothing for ``None``.

        If another attempt repeats the step, the losses of the last attempt count.
        """
        if loss is None:
            return
        if hasattr(loss, "detach"):
            loss = loss.detach()
            loss = loss if loss.numel() == 1 else loss.double().sum()
        self._write(loss=float(loss).hex(), step=step)

    def committed(self, step: int) -> None:
        """Write when the step was committed, by the clock that all processes share."""
        self._write(commit=step, at=time.monotonic())

    def training_ended(self, step: int, digest: str, private_digest: str) -> None:
        """Write the digests of the final state."""
        content = {"step": step, "digest": digest, "private_digest": private_digest}
        write_atomic(self._final, json.dumps(content).encode(), durable=False)

    def close(self) -> None:
        """Write no more."""
        log.removeFilter(self._warned)
        os.close(self._fd)

    def _warned(self, record: logging.LogRecord) -> bool:
        """Write what the hooks tell people, and when; it is printed all the same."""
        self._write(warning=record.getMessage(), at=time.monotonic())
        return True

    def _write(self, **fields: object) -> None:
        """Write a line; where a job has two parts for a while, two processes may be this rank."""
        os.write(self._fd, json.dumps({**fields, "of": self._life}).encode() + b"\n")
