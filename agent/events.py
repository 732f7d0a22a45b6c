"""What can happen to a job (past tense) and what can be done about it (imperative).

Plain facts: no I/O, no clock. Every action carries its reason in words; the journal, the report
and the tests read it. A rank here is a local rank's global number.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.state import JobState


@dataclass(frozen=True, slots=True)
class LaunchRequested:
    """The first event: every rank is wanted."""


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A rank's process exists."""

    rank: int
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A rank's process could not be made, or its start was called off."""

    rank: int
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A rank's process ended: ``exit_code`` 0-255, or negative for the signal that ended it."""

    rank: int
    attempt: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked msrun to stop, by a signal it handles."""

    signum: int


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal that is for the workers and means nothing to msrun (SIGUSR1, SIGUSR2)."""

    signum: int


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time a waiting state may last is over."""

    state: JobState
    attempt: int


Event = (
    LaunchRequested
    | WorkerStarted
    | StartFailed
    | WorkerExited
    | StopRequested
    | SignalReceived
    | DeadlinePassed
)


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Start every rank with a fresh store."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelStarts:
    """Call off the starts that were ordered and have not happened; each answers StartFailed.

    ``now``: do not wait for those that are on their way.
    """

    reason: str
    now: bool = False


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Send ``signum`` to the process groups of ``ranks``."""

    ranks: tuple[int, ...]
    signum: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Answer DeadlinePassed in ``after_s`` seconds unless the job moved on; ``None``: never."""

    state: JobState
    attempt: int
    after_s: float | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Kill what an attempt's workers left behind (their children, adopted by the agent)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave with ``exit_code``."""

    state: JobState
    exit_code: int
    reason: str


Action = StartAttempt | CancelStarts | SignalRanks | SetDeadline | Sweep | Finish
