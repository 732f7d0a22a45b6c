"""How a launched function failed: the first cause, and what followed from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agent.text.wording import describe_exit, known_signal
from worker_hooks.contract.peer_lost import says_peer_lost


class RankFailure(NamedTuple):
    """The end of one rank, in the order in which the parent saw it."""

    rank: int
    exit_code: int | None  # negative: of a signal; None: it went to another part of this program
    error: str = ""  # the exception in one line; empty: there was none
    traceback: str = ""
    origin: str = ""  # the first exception of its chain

    @property
    def signal(self) -> str | None:
        """``SIGKILL``; ``None``: no signal ended it."""
        code = self.exit_code
        return known_signal(-code) if code is not None and code < 0 else None

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only lost a peer that had failed."""
        return says_peer_lost(self.origin)

    def __str__(self) -> str:
        if self.error:
            return f"rank {self.rank} raised {self.error}"
        if self.exit_code is None:
            return (
                f"rank {self.rank} ended in a way that is not known, before the function returned"
            )
        amid = " before the function returned" if self.exit_code >= 0 else ""
        return f"rank {self.rank} {describe_exit(self.exit_code)}{amid}"


class LaunchError(RuntimeError):
    """A rank of :func:`msrun.launch` failed; the attributes are those of the first cause."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        """``failures``: of the ranks that were not stopped, in the order of their ends."""
        # a stable sort: of those alike, the first to end
        self.failures = tuple(sorted(failures, key=lambda each: each.is_consequence))
        root = self.failures[0]
        self.rank, self.exit_code, self.signal = root.rank, root.exit_code, root.signal
        self.traceback = root.traceback
        text = str(root)
        if len(self.failures) > 1:
            text += "".join(f"\nin consequence or later: {each}" for each in self.failures[1:])
        super().__init__(f"{text}\n\n{root.traceback}".rstrip())
