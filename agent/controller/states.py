"""The states of a job and of a rank, and the table of every move that is allowed.

Rules: only ``MOVES`` says what changes a job's state; an absent row is a bug and raises; this file
imports nothing of ours. ``docs/architecture/state-machine.md`` is made from it.

A job moves on three facts: the state it is in, what happened, and a *condition*, the one question
that the controller has to answer about the ranks. After a failure the ranks that hold the state are
*drained* before they are stopped: freeze, dump, commit. If the dump is one in memory, only the lost
ranks are *replaced*, and no rank is stopped. A stop that is asked for *holds* all ranks at one step
first, where that is possible. Events without a row only state a fact.
"""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    """The state of a job. The last three are ends."""

    __hash__ = object.__hash__  # quicker than Enum's, and as right: members are unique

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    HOLDING = "holding"
    FREEZING = "freezing"
    DUMPING = "dumping"
    COMMITTING = "committing"
    REPLACING = "replacing"
    STOPPING = "stopping"
    KILLING = "killing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_end(self) -> bool:
        """Whether no event can change anything any more."""
        return self in _ENDS

    @property
    def is_interrupted(self) -> bool:
        """Whether the ranks that live wait: the state is saved, or ranks are replaced."""
        return self in _INTERRUPTED


class RankState(Enum):
    """The state of a rank of the present attempt. The last three are ends."""

    __hash__ = object.__hash__  # quicker than Enum's, and as right: members are unique

    PENDING = "pending"  # its start was ordered, and it is not known to exist
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # exited with 0
    FAILED = "failed"  # exited by itself with anything else, or never started
    STOPPED = "stopped"  # exited after msrun ordered it to

    @property
    def is_alive(self) -> bool:
        """Whether a process exists or may come to exist."""
        return self in _ALIVE


class Condition(Enum):
    """The answer that decides between the moves of one state and event."""

    __hash__ = object.__hash__  # quicker than Enum's, and as right: members are unique

    ALWAYS = ""
    RANKS_AWAITED = "ranks are still awaited"
    ALL_STARTED = "every rank has started"
    RANKS_ALIVE = "other ranks are alive"
    ALL_SUCCEEDED = "every rank exited with 0"
    RANK_FAILED = "a rank failed, others are alive"
    STATE_HELD = "a rank failed, ranks that hold the state are alive"
    ANSWERS_AWAITED = "answers are still awaited"
    WHOLE = "a step that is not saved yet is complete"
    WRITTEN = "the whole state is written"
    GIVEN_UP = "nothing is to be saved or can be, ranks are alive"
    BUDGET_LEFT = "no rank is alive, the restart budget allows another attempt"
    BUDGET_SPENT = "no rank is alive, the restart budget is spent"
    HOPELESS = "no rank is alive, another attempt would meet the same"
    STOP_WANTED = "no rank is alive, a stop was asked for"
    ALL_GUARDED = "every rank can stay at one step"
    SOME_HOLD = "only some ranks can be asked for their state"
    DISTURBED = "the ranks come to no common step any more, or soon enough"
    NOTED = "what is under way continues"
    REPLACEABLE = "the lost ranks can be replaced"
    ALL_JOINED = "every rank has joined"
    IN_MEMORY = "no rank is replaced, the state is in memory only"
    NOW = "at once, or asked for once too often"


_ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)
_INTERRUPTED = (JobState.FREEZING, JobState.DUMPING, JobState.COMMITTING, JobState.REPLACING)
_ALIVE = (RankState.PENDING, RankState.RUNNING)

_S = JobState
_C = Condition

_ALL_GONE = {
    _C.BUDGET_LEFT: _S.STARTING,
    _C.BUDGET_SPENT: _S.FAILED,
    _C.HOPELESS: _S.FAILED,
    _C.STOP_WANTED: _S.STOPPED,
}
_ASKED = {
    _C.ALL_GUARDED: _S.HOLDING,
    _C.SOME_HOLD: _S.FREEZING,
    _C.RANKS_ALIVE: _S.STOPPING,
}
_UNDONE = {  # the last replacement: its checkpoint is still in memory
    _C.IN_MEMORY: _S.COMMITTING,
    _C.GIVEN_UP: _S.STOPPING,
}
_FAILED = {
    _C.RANK_FAILED: _S.STOPPING,
    _C.STATE_HELD: _S.FREEZING,
    _C.IN_MEMORY: _S.COMMITTING,
}
_HELD = {
    _C.ANSWERS_AWAITED: _S.HOLDING,
    _C.WHOLE: _S.DUMPING,
    _C.IN_MEMORY: _S.COMMITTING,
    _C.GIVEN_UP: _S.STOPPING,
}
_FROZEN = {
    _C.ANSWERS_AWAITED: _S.FREEZING,
    _C.WHOLE: _S.DUMPING,
    _C.IN_MEMORY: _S.COMMITTING,
    _C.GIVEN_UP: _S.STOPPING,
}
_SAVED = {
    _C.ANSWERS_AWAITED: _S.DUMPING,
    _C.WRITTEN: _S.COMMITTING,
    _C.IN_MEMORY: _S.COMMITTING,
    _C.GIVEN_UP: _S.STOPPING,
}
_REPLACED = {
    _C.ANSWERS_AWAITED: _S.REPLACING,
    _C.IN_MEMORY: _S.COMMITTING,
    _C.GIVEN_UP: _S.STOPPING,
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
            _C.HOPELESS: _S.FAILED,
        },
        "Raised": {_C.RANK_FAILED: _S.STOPPING},
        "RankHung": {_C.RANK_FAILED: _S.STOPPING},
        "StartRefused": {_C.ALWAYS: _S.STOPPING},
        "StopRequested": {_C.RANKS_ALIVE: _S.STOPPING, _C.NOW: _S.KILLING},
        "ExitRequested": {_C.RANKS_ALIVE: _S.STOPPING},
        "SignalReceived": {_C.ALWAYS: _S.STARTING},
        "DeadlinePassed": {_C.ALWAYS: _S.STOPPING},
    },
    _S.RUNNING: {
        "WorkerExited": {
            _C.RANKS_ALIVE: _S.RUNNING,
            _C.ALL_SUCCEEDED: _S.SUCCEEDED,
            _C.RANK_FAILED: _S.STOPPING,
            _C.STATE_HELD: _S.FREEZING,
            _C.IN_MEMORY: _S.COMMITTING,
            _C.BUDGET_LEFT: _S.STARTING,
            _C.BUDGET_SPENT: _S.FAILED,
            _C.HOPELESS: _S.FAILED,
        },
        "Raised": _FAILED,
        "RankHung": _FAILED,
        "Fingerprinted": _UNDONE,
        "StartRefused": {_C.ALWAYS: _S.STOPPING},
        "StopRequested": {**_ASKED, _C.NOW: _S.KILLING},
        "ExitRequested": _ASKED,
        "SignalReceived": {_C.ALWAYS: _S.RUNNING},
    },
    _S.HOLDING: {
        "Standing": {_C.ANSWERS_AWAITED: _S.HOLDING},
        "Fingerprinted": _UNDONE,
        "Frozen": {**_HELD, _C.DISTURBED: _S.FREEZING},
        "WorkerExited": {
            **_HELD,
            _C.DISTURBED: _S.FREEZING,
            _C.ALL_SUCCEEDED: _S.SUCCEEDED,
            _C.STOP_WANTED: _S.STOPPED,
        },
        "Raised": {_C.DISTURBED: _S.FREEZING},
        "RankHung": {_C.DISTURBED: _S.FREEZING},
        "RankUnreachable": {
            _C.DISTURBED: _S.FREEZING,
            _C.IN_MEMORY: _S.COMMITTING,
            _C.GIVEN_UP: _S.STOPPING,
        },
        "StopRequested": {
            _C.NOTED: _S.HOLDING,
            _C.DISTURBED: _S.FREEZING,
            _C.NOW: _S.KILLING,
        },
        "ExitRequested": {_C.ALWAYS: _S.HOLDING},
        "SignalReceived": {_C.ALWAYS: _S.HOLDING},
        "DeadlinePassed": {_C.DISTURBED: _S.FREEZING},
    },
    _S.FREEZING: {
        "Frozen": _FROZEN,
        "Fingerprinted": _UNDONE,
        "RankUnreachable": _FROZEN,
        "WorkerExited": {**_FROZEN, **_ALL_GONE},
        "Raised": {_C.ALWAYS: _S.FREEZING},
        "RankHung": _FROZEN,
        "StopRequested": {_C.NOTED: _S.FREEZING, _C.NOW: _S.KILLING},
        "ExitRequested": {_C.ALWAYS: _S.FREEZING},
        "SignalReceived": {_C.ALWAYS: _S.FREEZING},
        "DeadlinePassed": {
            _C.WHOLE: _S.DUMPING,
            _C.IN_MEMORY: _S.COMMITTING,
            _C.GIVEN_UP: _S.STOPPING,
        },
    },
    _S.DUMPING: {
        "Written": _SAVED,
        "Fingerprinted": _UNDONE,
        "Digested": _SAVED,
        "SaveFailed": _SAVED,
        "RankUnreachable": _SAVED,
        "WorkerExited": {**_SAVED, **_ALL_GONE},
        "Progress": {_C.ALWAYS: _S.DUMPING},
        "Raised": {_C.ALWAYS: _S.DUMPING},
        "StopRequested": {_C.NOTED: _S.DUMPING, _C.NOW: _S.KILLING},
        "ExitRequested": {_C.ALWAYS: _S.DUMPING},
        "SignalReceived": {_C.ALWAYS: _S.DUMPING},
        "DeadlinePassed": _SAVED,
    },
    _S.COMMITTING: {  # nobody needs to be alive any more
        "DumpCommitted": {
            _C.REPLACEABLE: _S.REPLACING,
            _C.IN_MEMORY: _S.COMMITTING,
            _C.GIVEN_UP: _S.STOPPING,
            _C.RANKS_ALIVE: _S.STOPPING,
            **_ALL_GONE,
        },
        "CommitFailed": {
            _C.ANSWERS_AWAITED: _S.DUMPING,
            _C.IN_MEMORY: _S.COMMITTING,
            _C.GIVEN_UP: _S.STOPPING,
            **_ALL_GONE,
        },
        "WorkerStarted": {_C.ALWAYS: _S.COMMITTING},  # to replace another, which was given up
        "StartFailed": {_C.ALWAYS: _S.COMMITTING},
        "WorkerExited": {_C.ALWAYS: _S.COMMITTING},
        "Progress": {_C.ALWAYS: _S.COMMITTING},
        "Raised": {_C.ALWAYS: _S.COMMITTING},
        "StopRequested": {
            _C.NOTED: _S.COMMITTING,
            _C.NOW: _S.KILLING,
            _C.STOP_WANTED: _S.STOPPED,
        },
        "ExitRequested": {_C.ALWAYS: _S.COMMITTING},
        "SignalReceived": {_C.ALWAYS: _S.COMMITTING},
        "DeadlinePassed": {_C.GIVEN_UP: _S.STOPPING, **_ALL_GONE},
    },
    _S.REPLACING: {
        "Rejoining": {_C.ANSWERS_AWAITED: _S.REPLACING},
        "Registered": {**_REPLACED, _C.ALL_JOINED: _S.RUNNING},
        "WorkerStarted": {_C.ANSWERS_AWAITED: _S.REPLACING},
        "WorkerExited": _REPLACED,
        "StartFailed": _REPLACED,
        "Raised": {_C.ANSWERS_AWAITED: _S.REPLACING},
        "RankExiting": _REPLACED,
        "RankUnreachable": _REPLACED,
        "StopRequested": {
            _C.IN_MEMORY: _S.COMMITTING,
            _C.GIVEN_UP: _S.STOPPING,
            _C.NOW: _S.KILLING,
        },
        "ExitRequested": {_C.IN_MEMORY: _S.COMMITTING, _C.GIVEN_UP: _S.STOPPING},
        "SignalReceived": {_C.ALWAYS: _S.REPLACING},
        "DeadlinePassed": _REPLACED,
    },
    _S.STOPPING: {
        "WorkerStarted": {_C.ALWAYS: _S.STOPPING},
        "WorkerExited": {_C.RANKS_ALIVE: _S.STOPPING, _C.IN_MEMORY: _S.COMMITTING, **_ALL_GONE},
        "StartFailed": {_C.RANKS_ALIVE: _S.STOPPING, **_ALL_GONE},
        "Raised": {_C.ALWAYS: _S.STOPPING},
        "StopRequested": {_C.NOTED: _S.STOPPING, _C.NOW: _S.KILLING},
        "ExitRequested": {_C.ALWAYS: _S.STOPPING},
        "SignalReceived": {_C.ALWAYS: _S.STOPPING},
        "DeadlinePassed": {_C.ALWAYS: _S.KILLING},
    },
    _S.KILLING: {
        "WorkerStarted": {_C.ALWAYS: _S.KILLING},
        "WorkerExited": {_C.RANKS_ALIVE: _S.KILLING, _C.IN_MEMORY: _S.COMMITTING, **_ALL_GONE},
        "StartFailed": {_C.RANKS_ALIVE: _S.KILLING, **_ALL_GONE},
        "Raised": {_C.ALWAYS: _S.KILLING},
        "StopRequested": {_C.ALWAYS: _S.KILLING},
        "ExitRequested": {_C.ALWAYS: _S.KILLING},
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
