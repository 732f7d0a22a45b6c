"""The states of a job and of a rank, and the table of every move that is allowed.

Rules: what changes a job's state stands in ``MOVES`` and nowhere else; an absent row is a bug and
raises; this file imports nothing of ours. ``diagram`` draws the README's picture from the table.

A job moves on three facts: the state it is in, what happened, and a *condition*, the one question
that the controller has to answer about the ranks. ``STOPPING`` is the place where the later rungs
of the ladder put their *drain* before it: freeze, dump, then stop.
"""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    """Where a job is. The last three are ends."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    KILLING = "killing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_end(self) -> bool:
        """Whether nothing can happen any more."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED}


class RankState(Enum):
    """Where a rank of the present attempt is. The last three are ends."""

    PENDING = "pending"  # ordered, not known to exist
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # left with 0
    FAILED = "failed"  # left by itself with anything else, or never came to life
    STOPPED = "stopped"  # left after msrun told it to

    @property
    def is_alive(self) -> bool:
        """Whether a process exists or may come to exist."""
        return self in {RankState.PENDING, RankState.RUNNING}


class Condition(Enum):
    """The answer that decides between the moves of one state and event."""

    ALWAYS = "always"
    RANKS_AWAITED = "ranks are still awaited"
    ALL_STARTED = "every rank has started"
    RANKS_ALIVE = "other ranks are alive"
    ALL_SUCCEEDED = "every rank left with 0"
    RANK_FAILED = "a rank failed, others are alive"
    BUDGET_LEFT = "no rank is alive, the restart budget allows another attempt"
    BUDGET_SPENT = "no rank is alive, the restart budget is spent"
    STOP_WANTED = "no rank is alive, a stop was asked for"
    FIRST_REQUEST = "first request to stop"
    SECOND_REQUEST = "second request to stop"


_S = JobState
_C = Condition

_ALL_GONE = {
    _C.BUDGET_LEFT: _S.STARTING,
    _C.BUDGET_SPENT: _S.FAILED,
    _C.STOP_WANTED: _S.STOPPED,
}

# state -> event's name -> condition -> next state
MOVES: dict[JobState, dict[str, dict[Condition, JobState]]] = {
    _S.NEW: {
        "LaunchRequested": {_C.ALWAYS: _S.STARTING},
    },
    _S.STARTING: {
        "WorkerStarted": {_C.RANKS_AWAITED: _S.STARTING, _C.ALL_STARTED: _S.RUNNING},
        "WorkerExited": {
            _C.RANKS_AWAITED: _S.STARTING,
            _C.RANK_FAILED: _S.STOPPING,
        },
        "StartFailed": {
            _C.RANK_FAILED: _S.STOPPING,
            _C.BUDGET_LEFT: _S.STARTING,
            _C.BUDGET_SPENT: _S.FAILED,
        },
        "StopRequested": {_C.RANKS_ALIVE: _S.STOPPING},
        "SignalReceived": {_C.ALWAYS: _S.STARTING},
        "DeadlinePassed": {_C.ALWAYS: _S.STOPPING},
    },
    _S.RUNNING: {
        "WorkerExited": {
            _C.RANKS_ALIVE: _S.RUNNING,
            _C.ALL_SUCCEEDED: _S.SUCCEEDED,
            _C.RANK_FAILED: _S.STOPPING,
            _C.BUDGET_LEFT: _S.STARTING,
            _C.BUDGET_SPENT: _S.FAILED,
        },
        "StopRequested": {_C.RANKS_ALIVE: _S.STOPPING},
        "SignalReceived": {_C.ALWAYS: _S.RUNNING},
    },
    _S.STOPPING: {
        "WorkerStarted": {_C.ALWAYS: _S.STOPPING},
        "WorkerExited": {_C.RANKS_ALIVE: _S.STOPPING, **_ALL_GONE},
        "StartFailed": {_C.RANKS_ALIVE: _S.STOPPING, **_ALL_GONE},
        "StopRequested": {_C.FIRST_REQUEST: _S.STOPPING, _C.SECOND_REQUEST: _S.KILLING},
        "SignalReceived": {_C.ALWAYS: _S.STOPPING},
        "DeadlinePassed": {_C.ALWAYS: _S.KILLING},
    },
    _S.KILLING: {
        "WorkerStarted": {_C.ALWAYS: _S.KILLING},
        "WorkerExited": {_C.RANKS_ALIVE: _S.KILLING, **_ALL_GONE},
        "StartFailed": {_C.RANKS_ALIVE: _S.KILLING, **_ALL_GONE},
        "StopRequested": {_C.ALWAYS: _S.KILLING},
        "SignalReceived": {_C.ALWAYS: _S.KILLING},
        "DeadlinePassed": {_C.ALWAYS: _S.FAILED},
    },
}


def next_state(state: JobState, event: str, condition: Condition) -> JobState:
    """The state after ``event`` under ``condition``.

    Raises:
        KeyError: the table has no such move.
    """
    return MOVES[state][event][condition]


def diagram() -> str:
    """The table as a Mermaid state diagram; moves that stay where they are, are left out."""
    lines = ["stateDiagram-v2", "    [*] --> new"]
    for state, events in MOVES.items():
        for event, conditions in events.items():
            for condition, target in conditions.items():
                if target is not state:
                    words = "" if condition is Condition.ALWAYS else f" [{condition.value}]"
                    lines.append(f"    {state.value} --> {target.value}: {event}{words}")
    lines += [f"    {state.value} --> [*]" for state in JobState if state.is_end]
    return "\n".join(lines)
