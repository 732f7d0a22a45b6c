"""The page ``docs/architecture/state-machine.md``: the table of moves, drawn and listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from markdown_tables import code, note, table

from agent.controller.states import MOVES, Condition, JobState

_S = JobState
RING = (
    *(_S.NEW, _S.STARTING, _S.RUNNING, _S.FREEZING, _S.DUMPING, _S.COMMITTING, _S.REPLACING),
    _S.SUCCEEDED,
)
"""The states of a job that goes well, a replacement included: the first picture."""

GONE = "gone"  # no state, but a fork that both ways out of an attempt share
NOBODY = "no rank is alive"
OR = " / "  # a semicolon ends a line of Mermaid

MEANINGS = {
    _S.NEW: "Nothing was started yet.",
    _S.STARTING: "The processes of an attempt were ordered, and some are not known to exist.",
    _S.RUNNING: "Every rank exists.",
    _S.HOLDING: "A stop was requested: every rank stays at the end of its step, until all stay at "
    "the same one.",
    _S.FREEZING: "A rank failed: the survivors were ordered to begin no further update, and say "
    "which step they hold.",
    _S.DUMPING: "The step to save is chosen; its writers write, the others send digests.",
    _S.COMMITTING: "Everything is written; the manifest and the rename are under way. No rank "
    "needs to be alive.",
    _S.REPLACING: "The state is complete in memory: the lost ranks are started again, the "
    "survivors leave the broken process group, and all meet in a new one.",
    _S.STOPPING: "The ranks were asked to exit, by a signal or by an order.",
    _S.KILLING: "The ranks were sent SIGKILL.",
    _S.SUCCEEDED: "Every rank exited with 0 without being asked to.",
    _S.FAILED: "A rank failed, and no attempt follows.",
    _S.STOPPED: "A stop was requested, and no rank is alive any more.",
}

_FOREWORD = """\
# The state machine of a job

After this page you can follow a job's `events.jsonl` from state to state, and say which event moved
it and why.

The controller ([`agent/controller/decide.py`](../../agent/controller/decide.py)) is a pure
function: a job and an event go in, a new job and actions come out. What may change a job's *state*
is one table, `MOVES` in [`agent/controller/states.py`](../../agent/controller/states.py), and this
page is made from it. A move depends on three facts: the state, the event, and a *condition*, which
is the one question that the controller has to answer about the ranks at that moment. An event
without a row in the table is a bug and raises an error; an event of a past attempt is dropped
before the table is asked.

Every state that waits for something has a deadline, so no job waits for ever.

## States
"""
_RING = """\
## The healthy ring

From the start to the end of a training whose ranks die now and then, and are replaced.
"""
_WAYS_OUT = """\
## The ways out

A stop that was requested, a failure without a replacement, and what follows when the last rank of
an attempt is gone.
"""
_ALL = """\
## All moves

An event moves the job to the last column if the condition holds. The events are described in
[events.jsonl](../reference/events.md).
"""


class Move(NamedTuple):
    """A row of the table."""

    at: JobState
    event: str
    condition: Condition
    to: JobState

    @property
    def is_last_rank(self) -> bool:
        """Whether it is one of the ways out of an attempt without a living rank."""
        return self.condition.value.startswith(f"{NOBODY}, ")

    @property
    def is_in_ring(self) -> bool:
        """Whether it belongs into the first picture."""
        is_asked = self.event in {"StopRequested", "ExitRequested", "Fingerprinted"}
        is_copy = self.condition is Condition.IN_MEMORY and self.at is not _S.REPLACING
        return {self.at, self.to} <= {*RING} and not (is_asked or is_copy or self.is_last_rank)

    @property
    def arrow(self) -> tuple[str, str, str]:
        """From where to where, and what is written at it; the ways out are drawn once."""
        if self.is_last_rank:
            return self.at.value, GONE, NOBODY
        is_no_reason = self.condition in {Condition.ALWAYS, Condition.RANKS_ALIVE}
        why = self.event if is_no_reason else self.condition.value
        return self.at.value, self.to.value, why


def moves() -> list[Move]:
    """The table, row by row."""
    return [
        Move(at, event, condition, to)
        for at, events in MOVES.items()
        for event, conditions in events.items()
        for condition, to in conditions.items()
    ]


def pictures() -> tuple[str, str]:
    """Two Mermaid diagrams: the ring of a job that goes well, and all ways out of it.

    Moves that stay where they are, are not drawn.
    """
    drawn = [move for move in moves() if move.is_last_rank or move.at is not move.to]
    ring = [move.arrow for move in drawn if move.is_in_ring]
    ways_out = [move.arrow for move in drawn if not move.is_in_ring]
    ways_out += [
        (GONE, move.to.value, move.condition.value.removeprefix(f"{NOBODY}, "))
        for move in drawn
        if move.is_last_rank
    ]
    ends = [state for state in JobState if state.is_end]
    return (
        _diagram("[*] --> new", ring, [_S.SUCCEEDED]),
        _diagram(f"state {GONE} <<choice>>", ways_out, ends),
    )


def _diagram(first: str, arrows: Iterable[tuple[str, str, str]], ends: Iterable[JobState]) -> str:
    """One line for each pair of states, with all that leads from one to the other."""
    joined: dict[tuple[str, str], dict[str, None]] = {}
    for start, end, words in arrows:
        joined.setdefault((start, end), {})[words] = None
    lines = [f"{start} --> {end}: {OR.join(words)}" for (start, end), words in joined.items()]
    lines += [f"{state.value} --> [*]" for state in ends]
    return "\n".join(("stateDiagram-v2", *(f"    {line}" for line in (first, *lines))))


def page() -> str:
    """The whole page."""
    ring, ways_out = pictures()
    meanings = ((code(state.value), MEANINGS[state]) for state in JobState)
    lines = [
        note("agent/controller/states.py"),
        "",
        *_FOREWORD.splitlines(),
        "",
        *table(("state", "meaning"), meanings),
        "",
        *(*_RING.splitlines(), "", "```mermaid", ring, "```", ""),
        *(*_WAYS_OUT.splitlines(), "", "```mermaid", ways_out, "```", ""),
        *_ALL.splitlines(),
    ]
    for state in MOVES:
        lines += ["", f"### In {state.value}", ""]
        lines += table(("event", "condition", "next"), _rows(state))
    return "\n".join(lines) + "\n"


def _rows(state: JobState) -> Iterator[tuple[str, str, str]]:
    for move in moves():
        if move.at is state:
            to = "stays" if move.to is state else code(move.to.value)
            yield code(move.event), move.condition.value or "always", to
