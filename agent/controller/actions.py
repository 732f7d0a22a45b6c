"""What can be done about a job, in the imperative: the controller's answers to events.

Plain facts. Every action carries its reason in words; the journal, the report and the tests read
it. A rank here is a local rank's global number.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.controller.states import JobState

MEMORY = -1  # a place: the agent's memory, from which lost ranks are replaced


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

    ``digesters`` only say what they hold. ``place``: 0 the script's folder, 1 the fallback, MEMORY
    the agent's. A higher ``round`` of the same dump replaces the orders to write before it: what
    was written for those no longer counts, unless it is complete and named by ``CommitDump``.
    ``is_raised``: the failure that is answered is an exception, as far as is known.
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
    from_memory: bool = False  # nobody writes: it is the checkpoint in memory that goes to disk


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


@dataclass(frozen=True, slots=True)
class PrepareRanks:
    """Let others come to life in the place of dead ``ranks``, as they would in ``attempt``.

    ReplaceRanks takes them in. Until then nobody hears of them, and if it never comes, they end
    with the present attempt. Whoever cannot be prepared, is started then.
    """

    attempt: int
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceRanks:
    """Start ``newcomers`` in the place of ranks that are gone, with a fresh store.

    The survivors leave their broken group (each answers RankRejoining), and all go on from the
    checkpoint in memory at ``path``, which holds ``step``. No update begins before GoOnRanks.
    """

    attempt: int
    survivors: tuple[int, ...]
    newcomers: tuple[int, ...]
    path: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class GoOnRanks:
    """Every rank has joined the new group: let updates begin."""

    ranks: tuple[int, ...]
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetMemory:
    """Nobody needs the checkpoint in memory any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class RemindReplaced:
    """Answer ReplacementAged in ``after_s`` seconds."""

    after_s: float


OnLoss = PrepareRanks | ReplaceRanks | GoOnRanks | RemindReplaced
# fmt: off
Action = (
    StartAttempt | CancelStarts | SignalRanks | SetDeadline | Sweep | Finish | HoldRanks
    | ProceedRanks | LeaveRanks | DismissRanks | FreezeRanks | SaveRanks | CommitDump
    | AbandonDump | ReleaseRanks | RefuseRanks | OnLoss | ForgetMemory
)
# fmt: on
