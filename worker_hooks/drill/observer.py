"""What may watch a training from inside: every moment of a step, in the threads that live it.

Ordinary training has no observers. A drill has two: one injects faults, one records results.
"""

from __future__ import annotations

from typing import Any

from worker_hooks.contract.status_page import Phase


class StepObserver:
    """Called by ``worker_hooks.training``; an observer overrides the moments that it needs."""

    def attempt_begins(self, attempt: int) -> None:
        """The process continues as a rank of another attempt."""

    def phase_begins(self, phase: Phase, step: int) -> None:
        """The main thread enters ``phase`` of ``step``, which is the next one to be committed."""

    def backward_begins(self, step: int, loss: Any) -> None:
        """``backward`` is called on ``loss``, in ``step``."""

    def committed(self, step: int) -> None:
        """A step is committed."""

    def dump_begins(self) -> None:
        """The state is about to be digested or written. Called in the listener thread."""

    def training_ends(self) -> None:
        """The last step is committed; the callbacks' ``end`` follows."""

    def training_ended(self, step: int, digest: str, private_digest: str) -> None:
        """The callbacks' ``end`` is over.

        Args:
            digest: of the replicated state as of that commit.
            private_digest: of what the rank has for itself.
        """
