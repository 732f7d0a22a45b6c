"""What can happen to a job, in the past tense. What can be done about it: ``actions``.

Plain facts: no I/O, no clock. A rank here is a local rank's global number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from agent.controller.states import JobState


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
    """A rank's process ended: ``exit_code`` 0-255, or negative for the signal that ended it.

    ``step``: its newest commit, if it had a status page.
    """

    rank: int
    attempt: int
    exit_code: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked msrun to stop, by a signal it handles; each request is less patient.

    ``grace_s``: what a graceful exit may take; ``None``: as the rules say.
    """

    signum: int
    why: str = ""  # in words, where the signal's name does not say it
    grace_s: float | None = None
    passes: bool = True  # scripts that are not guarded get this signal, too; else SIGTERM
    is_now: bool = False  # no grace for anything


@dataclass(frozen=True, slots=True)
class ExitRequested:
    """A graceful exit was asked for without a signal to msrun: by a file, or by ``rank``.

    Asked for again it changes nothing: all ranks may say so at once.
    """

    attempt: int
    why: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal that is for the workers and means nothing to msrun (SIGUSR1, SIGUSR2)."""

    signum: int


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time a waiting state may last is over."""

    state: JobState
    attempt: int


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """A rank's state can be saved from now on; ``step`` is its newest commit, often resumed.

    ``why_fixed``: why it can join no other group of processes; empty: it can.
    """

    rank: int
    attempt: int
    step: int
    why_fixed: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """A script asked by itself to go on: the newest checkpoint, verified, and what it holds."""

    attempt: int
    path: str
    step: int


@dataclass(frozen=True, slots=True)
class ResumeRefused:
    """A script asked by itself to go on, and nothing that was saved can be trusted.

    ``ranks``: those that asked; they wait for the answer.
    """

    attempt: int
    why: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankRaised:
    """A rank's main thread is held at its top with an exception, its state still in memory."""

    rank: int
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class RankUnreachable:
    """A rank closed its link without ending: finished training, or its hooks stepped aside."""

    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RankStanding:
    """A rank stays at the end of ``step``, which it has begun, and begins no later one."""

    rank: int
    dump_id: int
    step: int


@dataclass(frozen=True, slots=True)
class RankFrozen:
    """A rank begins no update any more; it is whole as of ``step``, or torn and says why."""

    rank: int
    dump_id: int
    step: int
    is_whole: bool
    why: str = ""
    nbytes: int = 0  # of the replicated state, about; 0: nobody knows


@dataclass(frozen=True, slots=True)
class ShardWritten:
    """A rank's part of the dump is on disk; ``digest`` is of the whole replicated state.

    ``round``: of the order that it answers.
    """

    rank: int
    dump_id: int
    digest: str
    round: int = 0


@dataclass(frozen=True, slots=True)
class StateDigested:
    """A rank that does not write says what it holds.

    ``round``: of the order that it answers; ``None``: not known.
    """

    rank: int
    dump_id: int
    digest: str
    round: int | None = None


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A rank could not write or digest; ``is_place``: the folder is at fault, not the rank.

    ``round``: of the order that it answers.
    """

    rank: int
    dump_id: int
    why: str
    is_place: bool
    round: int = 0


@dataclass(frozen=True, slots=True)
class DumpProgressed:
    """Some bytes of a dump are done."""

    rank: int
    dump_id: int


@dataclass(frozen=True, slots=True)
class DumpCommitted:
    """A dump is complete, under its final name. ``nbytes`` of all files, and the seconds taken."""

    dump_id: int
    path: str
    nbytes: int = 0
    write_s: float = 0.0  # from the order to save to the order to commit
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The shards are there, the manifest or the rename failed. Exactly one answer to an order."""

    dump_id: int
    why: str
    is_place: bool


@dataclass(frozen=True, slots=True)
class RankRejoining:
    """A survivor has left the training function, and is about to enter it again."""

    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RankHung:
    """A rank is alive and makes no progress while its peers wait for it.

    ``why``: a verb phrase, such as ``made no progress for 2.1 s (stopped)``.
    """

    rank: int
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class ReplacementAged:
    """One replacement is so long ago that it counts no more."""


# fmt: off
Event = (
    LaunchRequested | WorkerStarted | StartFailed | WorkerExited | StopRequested | ExitRequested
    | SignalReceived | DeadlinePassed | RankRegistered | CheckpointFound | ResumeRefused
    | RankRaised | RankUnreachable | RankStanding | RankFrozen | ShardWritten | StateDigested
    | SaveFailed | DumpProgressed | DumpCommitted | CommitFailed | RankRejoining | RankHung
    | ReplacementAged
)
# fmt: on


def renewed(event: Event, attempt: int, survivors: Collection[int]) -> Event:
    """What happened to a survivor before, and was not decided on yet, in the new ``attempt``.

    That it died or cannot be reached, is as true then; all else it said for the old one.
    """
    match event:
        case WorkerExited(rank=rank, attempt=old) | RankUnreachable(rank=rank, attempt=old):
            if rank in survivors and old == attempt - 1:
                return replace(event, attempt=attempt)
        case _:
            pass
    return event
