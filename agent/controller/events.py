"""What can happen to a job, in the past tense. What can be done about it: ``actions``.

What a rank's hooks say happened is an event as it is: the messages of
``worker_hooks.contract.protocol`` from :data:`RankMessage` on. Everything else is defined here.
Plain facts: no I/O, no clock. A rank is a global rank number.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from agent.controller.states import JobState
from worker_hooks.contract import protocol


@dataclass(frozen=True, slots=True)
class LaunchRequested:
    """The first event: start every rank."""


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A rank's process exists."""

    rank: int
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A rank's process could not be made, or its start was cancelled.

    ``lost``: its node is gone for good, because of this.
    """

    rank: int
    attempt: int
    why: str
    lost: str = ""


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A rank's process ended: ``exit_code`` 0-255, or negative for the signal that ended it.

    ``step``: its newest commit, if it had a status page. ``error``: the last line that a rank wrote
    which failed by itself, its exception as a rule; of one that killed itself, why. ``amid``: where
    in a step it was when it exited with 0, such as ``in forward of step 14``; empty: nowhere, or
    that is not known. ``is_over``: it was killed on its way out, after the end of its script.
    ``fault``: how its device failed, if devices are planned and a spare one can help. ``lost``: why
    nobody saw it end, because its node is gone; then ``exit_code`` says nothing. ``kept``: the
    steps that its memory, which outlives it, holds whole.
    """

    rank: int
    attempt: int
    exit_code: int
    step: int | None = None
    error: str = ""
    amid: str = ""
    is_over: bool = False
    fault: str = ""
    lost: str = ""
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked msrun to stop, by a signal that msrun handles.

    ``grace_s``: how long a graceful exit may take; ``None``: as the policy says. ``node``: whose
    msrun it was; the first signal at one node repeats none at another. ``leaves``: that node alone
    is to end, and the job goes on without it.
    """

    signum: int
    why: str = ""  # as text, where the signal's name does not say it
    grace_s: float | None = None
    passes: bool = True  # unguarded scripts get this same signal; otherwise SIGTERM
    is_now: bool = False  # no grace for anything
    node: int = 0
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class ExitRequestedByFile:
    """A JSON file asks for a graceful exit. A rank asks with ``protocol.ExitRequested``.

    A repeated request changes nothing. ``goes_on``: no file but nodes that have come are why, and
    the job goes on with them.
    """

    attempt: int
    why: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """msrun received a signal that is meant for the workers (SIGUSR1, SIGUSR2)."""

    signum: int


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A waiting state has lasted as long as it may."""

    state: JobState
    attempt: int


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """A script asked to resume: the newest checkpoint, verified, and the step that it holds."""

    attempt: int
    path: str
    step: int


@dataclass(frozen=True, slots=True)
class StartRefused:
    """The job must not train: no checkpoint can be trusted, or it would be unprotected.

    ``ranks``: those that asked to resume; they wait for the answer.
    """

    attempt: int
    why: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankUnreachable:
    """A rank can be told nothing: its hooks gave up, or a signal has stopped it.

    ``why``: a verb phrase.
    """

    rank: int
    attempt: int
    why: str = "let go of its state"


@dataclass(frozen=True, slots=True)
class RankExiting:
    """A rank's script has come to its end, and waits: it cannot train again in this process."""

    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DumpProgressed:
    """The agent's own share of a dump made progress. A rank says ``protocol.Progress``."""

    dump_id: int


@dataclass(frozen=True, slots=True)
class DumpCommitted:
    """A dump is complete, under its final name. ``nbytes`` of all files, and the seconds taken.

    ``stale``: the ranks whose random numbers, buffers and data position are of an earlier step.
    ``is_early``: it is in memory, where ranks find it, and is being written; CheckpointWritten
    follows.
    """

    dump_id: int
    path: str
    nbytes: int = 0
    write_s: float = 0.0  # from the order to save to the order to commit
    commit_s: float = 0.0
    stale: tuple[int, ...] = ()
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """What ranks restart from in memory is on the disk as ``path``, or cannot be: ``why_not``.

    Then it stays in memory. It is of no attempt: the job may have restarted again meanwhile.
    """

    dump_id: int
    step: int
    path: str
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The shards exist, but the manifest or the rename failed. Exactly one answer to an order.

    ``is_place``: the folder is at fault, and another one may do.
    """

    dump_id: int
    why: str
    is_place: bool
    is_state: bool = False  # the state itself cannot be saved, wherever it is to go


@dataclass(frozen=True, slots=True)
class RankHung:
    """A rank is alive and makes no progress while its peers wait for it.

    ``why``: a verb phrase, such as ``made no progress for 2.1 s (stopped)``. ``silent_s``: how long
    ago its last progress was. ``is_mutual``: it is no more to blame than others, as all wait
    for each other.
    """

    rank: int
    attempt: int
    why: str
    silent_s: float = 0.0
    is_mutual: bool = False


@dataclass(frozen=True, slots=True)
class ShadowsChanged:
    """All ranks can go on from their shadows of optimizer step ``step``; -1: no longer, ``why``.

    ``why`` with a step: why no newer ones are made. ``every``: how many steps behind those before;
    0: not known.
    """

    attempt: int
    step: int
    why: str = ""
    every: int = 0


@dataclass(frozen=True, slots=True)
class StateCopied:
    """Every rank's state as of ``step`` is in the agent's memory, or will never be there.

    The next copy is due ``every`` so many steps. ``variants``: the ranks that wrote each replica
    group's part; without all parts it is no copy. ``why_not``: this job's state cannot be copied.
    """

    attempt: int
    step: int
    every: int = 1
    variants: tuple[tuple[int, ...], ...] = ()
    nbytes: int = 0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class FolderApart:
    """The nodes do not share the folder into which ranks save; ``why``: a sentence that says so.

    It is a fact about the machines, of no attempt.
    """

    why: str


@dataclass(frozen=True, slots=True)
class ReplacementAged:
    """One replacement is so old that it no longer counts against the budget."""


# fmt: off
RankMessage = (
    protocol.Registered | protocol.Fingerprinted | protocol.VoteOpened | protocol.NotesMeasured
    | protocol.Raised | protocol.ExitRequested | protocol.Standing | protocol.Frozen
    | protocol.Written | protocol.Digested | protocol.SaveFailed | protocol.Progress
    | protocol.Rejoining
)
AgentEvent = (
    LaunchRequested | WorkerStarted | StartFailed | WorkerExited | StopRequested
    | ExitRequestedByFile | SignalReceived | DeadlinePassed | CheckpointFound | StartRefused
    | RankUnreachable | RankExiting | DumpProgressed | DumpCommitted | CommitFailed | RankHung
    | ReplacementAged | StateCopied | CheckpointWritten | ShadowsChanged | FolderApart
)
# fmt: on
Event = AgentEvent | RankMessage


_ALIKE = {ExitRequestedByFile: "ExitRequested", DumpProgressed: "Progress"}


def row(event: Event) -> str:
    """An event's name in the table of moves; the agent's word moves a job as a rank's does."""
    return _ALIKE.get(type(event), type(event).__name__)


def fields(event: Event) -> dict[str, object]:
    """What an event says, by the names of its fields."""
    if isinstance(event, protocol.Fingerprinted):  # may be large, and is only read by its meaning
        crc32 = zlib.crc32(repr(sorted(event.texts.items())).encode())
        about = {"parts": str(len(event.texts)), "crc32": f"{crc32:08x}"}
        return {**event._asdict(), "texts": about}
    return event._asdict() if isinstance(event, RankMessage) else asdict(event)


def renewed(event: Event, attempt: int, survivors: Collection[int]) -> Event:
    """An event that is not decided yet when a replacement begins ``attempt``.

    The death of a survivor, or its closed link, is as true in the new attempt; everything else
    that it said belongs to the old one.
    """
    match event:
        case (
            WorkerExited(rank=rank, attempt=old)
            | RankUnreachable(rank=rank, attempt=old)
            | RankExiting(rank=rank, attempt=old)
        ):
            if rank in survivors and old == attempt - 1:
                return replace(event, attempt=attempt)
        case _:
            pass
    return event
