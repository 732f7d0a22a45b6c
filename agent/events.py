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
    """A rank's state can be saved from now on; ``step`` is its newest commit, often resumed."""

    rank: int
    attempt: int
    step: int


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
    """A rank that does not write says what it holds."""

    rank: int
    dump_id: int
    digest: str


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


# fmt: off
Event = (
    LaunchRequested | WorkerStarted | StartFailed | WorkerExited | StopRequested | ExitRequested
    | SignalReceived | DeadlinePassed | RankRegistered | CheckpointFound | ResumeRefused
    | RankRaised | RankUnreachable | RankStanding | RankFrozen | ShardWritten | StateDigested
    | SaveFailed | DumpProgressed | DumpCommitted | CommitFailed
)
# fmt: on


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Start every rank with a fresh store; ``resume``: the checkpoint folder to go on from."""

    attempt: int
    reason: str
    resume: str | None = None


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


@dataclass(frozen=True, slots=True)
class HoldRanks:
    """Let these ranks stay at the end of their step; each answers RankStanding."""

    ranks: tuple[int, ...]
    dump_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProceedRanks:
    """Let ranks that are held go on to the end of ``step``; each answers RankFrozen there."""

    ranks: tuple[int, ...]
    dump_id: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveRanks:
    """Let ranks that are held at ``step`` end with 0, by their own training loop."""

    ranks: tuple[int, ...]
    dump_id: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class DismissRanks:
    """Let ranks that caught the signal to stop end by it after all."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FreezeRanks:
    """Let these ranks begin no update; each answers RankFrozen."""

    ranks: tuple[int, ...]
    dump_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SaveRanks:
    """Let ``writers`` write the replicated state as of ``step``, split evenly between them.

    ``digesters`` only say what they hold. ``place``: 0 the script's folder, 1 the fallback. A
    higher ``round`` of the same dump replaces the orders to write before it: what was written for
    those no longer counts, unless it is complete and named by ``CommitDump``. ``is_raised``: the
    failure that is answered is an exception, as far as is known.
    """

    dump_id: int
    step: int
    writers: tuple[int, ...]
    digesters: tuple[int, ...]
    place: int
    reason: str
    round: int = 0
    is_raised: bool = False


@dataclass(frozen=True, slots=True)
class CommitDump:
    """Add every rank's private state and the manifest, then rename: the dump is complete.

    ``variants``: who wrote each distinct state; the first is the one to go on from, more than one
    means that the replicas disagreed without a majority. ``odd``: ranks that differ from it.
    """

    dump_id: int
    step: int
    place: int
    variants: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AbandonDump:
    """Give a dump up, perhaps before anything was written; what was written of it is removed."""

    dump_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseRanks:
    """Let ranks that are held at their top go on leaving."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseRanks:
    """Tell ranks that asked to go on why they cannot; they leave by themselves."""

    ranks: tuple[int, ...]
    reason: str


# fmt: off
Action = (
    StartAttempt | CancelStarts | SignalRanks | SetDeadline | Sweep | Finish | HoldRanks
    | ProceedRanks | LeaveRanks | DismissRanks | FreezeRanks | SaveRanks | CommitDump
    | AbandonDump | ReleaseRanks | RefuseRanks
)
# fmt: on
