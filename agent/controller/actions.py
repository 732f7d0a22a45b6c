"""What can be done about a job, in the imperative: the controller's answers to events.

Plain facts. Every action carries its reason as text, for the journal, the report and the tests. A
rank is a global rank number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from agent.controller.states import JobState
from agent.ranks.parts import Groups, Part
from worker_hooks.contract import protocol

MEMORY = -1  # a place: the agent's memory, from which lost ranks are replaced


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Start every rank with a fresh store; ``resume``: the checkpoint folder to resume from.

    ``devices``: what the ranks see; empty: what msrun sees. ``shadow``: the optimizer step at which
    all go on from their shadows; -1: their scripts begin.
    """

    attempt: int
    reason: str
    resume: str | None = None
    devices: tuple[str, ...] = ()
    shadow: int = -1


@dataclass(frozen=True, slots=True)
class CancelStarts:
    """Cancel the starts that were ordered and have not happened; each answers StartFailed.

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
    """Kill the processes that an attempt's workers left behind (orphans that the agent adopted)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End msrun with ``exit_code``."""

    state: JobState
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand ``message`` on to ``ranks``. The message itself says what they do, and what they answer.

    Proceed is answered by Frozen at that step; the others are not answered.
    """

    ranks: tuple[int, ...]
    message: (
        protocol.Proceed
        | protocol.Leave
        | protocol.Dismiss
        | protocol.Release
        | protocol.GoOn
        | protocol.EndNotes
    )
    reason: str


@dataclass(frozen=True, slots=True)
class HoldRanks:
    """Order ``ranks`` to stay at the end of their step; each answers Standing."""

    ranks: tuple[int, ...]
    dump_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class FreezeRanks:
    """Order ``ranks`` to begin no update; each answers Frozen.

    ``step``: one that other ranks hold; those that froze before it may reach it, and answer again.
    """

    ranks: tuple[int, ...]
    dump_id: int
    reason: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class SaveRanks:
    """Order ``writers`` to write the state as of ``step``, split evenly between them.

    ``groups``: the writers by what they hold, if that is not the same; each group splits its part.
    ``parts``: of the state, if a rank is in several; then all these are seats. ``digesters`` only
    say what they hold. ``place``: 0 the script's folder, 1 the fallback, MEMORY the agent's. A
    higher ``round`` of the same dump replaces the orders to write before it: what was written for
    those no longer counts, unless it is complete and named by ``CommitDump``. ``is_raised``: the
    failure is an exception, as far as is known. ``gone``: ranks in whose place others will be
    started from it, if it is in memory.
    """

    dump_id: int
    step: int
    writers: tuple[int, ...]
    digesters: tuple[int, ...]
    place: int
    reason: str
    round: int = 0
    is_raised: bool = False
    groups: Groups = ()
    parts: tuple[Part, ...] = ()
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitDump:
    """Add every rank's private state and the manifest, then rename: the dump is complete.

    ``variants``: who wrote each distinct state; seats, where ranks are in several parts of it.
    ``odd``: ranks that differ from what the majority held. ``holders``: if there is more than one
    state, the ranks that hold each variant; these are the parts of the state unless
    ``is_disputed``: replicas disagreed without a majority.
    """

    dump_id: int
    step: int
    place: int
    variants: Groups
    odd: tuple[int, ...]
    reason: str
    holders: Groups = ()
    is_disputed: bool = False
    from_memory: bool = False  # no rank writes: the agent writes the checkpoint in memory to disk
    is_copy: bool = False  # that one is the newest copy which was taken while training went on
    is_early: bool = False  # all ranks restart from memory: answer at once, and write it meanwhile
    is_kept: bool = False  # what is in memory has yet to be read in that of killed ranks


@dataclass(frozen=True, slots=True)
class AbandonDump:
    """Give up a dump, perhaps before anything was written; remove what was written of it."""

    dump_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseRanks:
    """Tell ranks that asked to resume why they cannot; each exits by itself."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PrepareRanks:
    """Start replacements of the dead ``ranks`` early, as they would start in ``attempt``.

    ReplaceRanks takes them in. Until then no peer hears of them, and if it never comes, they end
    with the present attempt. A rank that cannot be started early is started by ReplaceRanks.
    ``devices``: what they see; empty: what msrun sees. ``rehearses``: each runs its script alone,
    up to ``run``.
    """

    attempt: int
    ranks: tuple[int, ...]
    reason: str
    devices: tuple[str, ...] = ()
    rehearses: bool = False


@dataclass(frozen=True, slots=True)
class ReplaceRanks:
    """Start ``newcomers`` in the place of ranks that are gone, with a fresh store.

    The survivors leave their broken group (each answers Rejoining), and all resume from the
    checkpoint in memory at ``path``, which holds ``step``. No update begins before GoOn.
    ``devices``, ``rehearses``: as in PrepareRanks, of newcomers that are not started yet.
    """

    attempt: int
    survivors: tuple[int, ...]
    newcomers: tuple[int, ...]
    path: str
    step: int
    reason: str
    devices: tuple[str, ...] = ()
    rehearses: bool = False


@dataclass(frozen=True, slots=True)
class GiveUpDevices:
    """Do not use these devices again, nor in a run that resumes this one.

    Successors of the ranks that had them are ordered with it. None: there is no spare device left.
    """

    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetMemory:
    """Free the checkpoint in memory: nobody needs it any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Have the forkserver import what a restart or a replacement needs, soon but not at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class RemindReplaced:
    """Answer ReplacementAged in ``after_s`` seconds."""

    after_s: float


# fmt: off
Action = (
    StartAttempt | CancelStarts | SignalRanks | SetDeadline | Sweep | Finish | Tell | HoldRanks
    | FreezeRanks | SaveRanks | CommitDump | AbandonDump | RefuseRanks | PrepareRanks
    | ReplaceRanks | GiveUpDevices | ForgetMemory | WarmUp | RemindReplaced
)
# fmt: on


def name_of(action: Action) -> str:
    """An action's name; a message that is handed on keeps its own."""
    return type(action.message if isinstance(action, Tell) else action).__name__


def name_and_fields(action: Action) -> tuple[str, dict[str, object]]:
    """An action's name and fields for the journal."""
    if isinstance(action, Tell):
        said = {"ranks": action.ranks, **action.message._asdict(), "reason": action.reason}
        return name_of(action), said
    return name_of(action), asdict(action)
