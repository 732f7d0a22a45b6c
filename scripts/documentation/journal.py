"""What ``events.jsonl`` holds: the page ``docs/reference/events.md`` and its JSON Schema.

Events and actions are described by their classes, whose fields the journal writes as they are.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from markdown_tables import code, note

from agent.controller import actions, events
from agent.controller.states import JobState
from worker_hooks.contract import protocol

_SOURCE = "agent/controller/events.py, agent/controller/actions.py and the messages of ranks"
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}
_INTEGERS = {"type": "array", "items": {"type": "integer"}}

NOTES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ForkserverStarted": (
        "Another forkserver was started in the place of one that ended.",
        {"pid": int, "reason": str},
    ),
    "ForkserverReady": (
        "The forkserver has imported what it was ordered to; `problem`: why it must not fork.",
        get_type_hints(protocol.Ready),
    ),
    "ForkserverEnded": (
        "The forkserver is gone; `owed` are the ranks that the next one has to start.",
        {"reason": str, "owed": _INTEGERS},
    ),
    "StoreForked": (
        "The store host of an attempt exists, or `why` it does not.",
        get_type_hints(protocol.StoreForked),
    ),
    "StoreHostExited": (
        "The store host died; a worker that dials in gets another.",
        {"exit_code": int},
    ),
    "LinkRefused": (
        "A connection to msrun's socket for hooks was closed, for the reason in `why`.",
        {"rank": int, "pid": int, "why": str},
    ),
    "WorkerSpoke": (
        "A worker's process exists and could not become what was ordered; its exit follows.",
        {"rank": int, "why": str},
    ),
    "CopyMissed": (
        "No copy of the state of this step came to be in memory (`--protect-memory`).",
        {"step": int, "why": str},
    ),
    "ClearanceBegan": (
        "On several nodes an update waits from this step on until all ranks are ready.",
        {"step": int, "is_cut": bool},
    ),
    "VoteBegan": (
        "Ranks hold parts of the state: from this step on all begin an update, or nobody does.",
        {"step": int},
    ),
    "IncidentOver": (
        "Training resumed after a failure, or the job ended: what it was, and what it cost.",
        {
            "at": float,
            "attempt": int,
            "ranks": _INTEGERS,
            "kind": str,
            "cause": str,
            "step": int | None,
            "answer": str,
            "lost_s": float | None,
            "lost_steps": int | None,
        },
    ),
    "StepsTimed": (
        "The newest step, and the median time of the ranks' last steps; of many ranks, of three.",
        {
            "step": int,
            "ranks": _INTEGERS,
            "median_s": {"type": "array", "items": {"type": "number"}},
        },
    ),
    "LeftoversKilled": (
        "Processes that workers had left behind were killed at the end of an attempt.",
        {"pids": _INTEGERS},
    ),
    "HangSuspected": (
        "These ranks made no progress within their limits; all ranks are asked where they stand.",
        {"ranks": _INTEGERS, "inspection": int, "reason": str},
    ),
    "HangJudged": (
        "Who hangs, who waits for others, who gave no answer; where every main thread stands.",
        {
            "inspection": int,
            "culprits": _INTEGERS,
            "victims": _INTEGERS,
            "unanswered": _INTEGERS,
            "stacks": {
                "type": "object",
                "additionalProperties": {"type": "array", "items": {"type": "string"}},
            },
            "reason": str,
        },
    ),
    "ExitContinued": (
        "A rank that had finished was stopped by a signal on its way out; msrun sent it SIGCONT.",
        {"rank": int, "reason": str},
    ),
    "JobPaused": (
        "Every rank is stopped by a signal; msrun assumes that a person did it, and waits.",
        {"ranks": _INTEGERS, "reason": str},
    ),
    "JobStandsStill": (
        "No rank makes progress and none hangs: an outage, a debugger, a frozen control group.",
        {"reason": str},
    ),
    "JobMovesAgain": ("Every rank that stood still has made progress.", {"reason": str}),
    "StragglerNamed": (
        "This rank takes longer of its own for a step than its peers, in seconds.",
        {"rank": int, "own_s": float, "peers_s": float, "reason": str},
    ),
    "ShadowRefused": (
        "A rank's process cannot be copied at this optimizer step.",
        get_type_hints(protocol.ShadowRefused),
    ),
    "ShadowsDiffer": (
        "Shadows of this optimizer step do not belong together, and are given up.",
        {"step": int, "why": str},
    ),
    "ShadowsWoken": (
        "All ranks go on from their shadows of this optimizer step, made in an earlier attempt.",
        {"attempt": int, "of_attempt": int, "step": int},
    ),
    "StragglerEnded": ("The rank is no longer slower than its peers.", {"rank": int}),
}
"""What the journal holds besides the controller's events and actions: meaning and fields."""

_UNWRITTEN = {"DumpProgressed", "Progress"}  # a large dump makes many
_OPTIONAL = {"LinkRefused": {"rank", "pid"}}  # of a connection without a Hello

_FOREWORD = """\
# events.jsonl

After this page you can read, search and process what msrun wrote down of a run: every event that it
heard of, every action that it decided on, each with its reason.

The file is in the run's folder. Each line is one JSON object with the fields

- `time`: seconds since the epoch,
- `event`: one of the names below,
- the fields of that name. An event of the controller also has `job`: the job's
  [state](../architecture/state-machine.md) after it.

New names and new fields may come with any version: a reader should skip what it does not know. The
JSON Schema of a line: [events.schema.json](schemas/events.schema.json). `--event-log-handler
console` prints the same lines to stderr.

    msrun logs --scheduler                                            # the same for people
    jq -c 'select(.event == "WorkerExited")' logs/events.jsonl        # who exited, when, with what
    jq -r 'select(.reason) | .event + ": " + .reason' logs/events.jsonl   # decisions and reasons

Ranks are global. An `exit_code` from 0 to 255 is the process's own, a negative one is the signal
that ended it. A `dump_id` numbers the dumps of a run, a `round` the orders to write within one.
`None` is JSON's `null`.
"""


def page() -> str:
    """The reference of all events."""
    lines = [note(_SOURCE), "", *_FOREWORD.splitlines()]
    lines += ["", "## What happened", ""]
    lines += [_entry(kind, _hints(kind)) for kind in _classes(events.Event)]
    lines += ["", "## What was decided", ""]
    lines += [_entry(kind, named) for kind, named in _decisions()]
    lines += ["", "## What else is noted", ""]
    for name, (meaning, described) in NOTES.items():
        lines.append(f"- {code(name)}{_listed(described)}: {meaning}")
    return "\n".join(lines) + "\n"


def _entry(kind: type, named: Mapping[str, Any]) -> str:
    meaning = " ".join((kind.__doc__ or "").replace("``", "`").split())
    return f"- {code(kind.__name__)}{_listed(named)}: {meaning}"


def _listed(named: Mapping[str, Any]) -> str:
    return f" ({', '.join(map(code, named))})" if named else ""


def schema() -> str:
    """The JSON Schema of one line."""
    heard = {kind.__name__: (kind.__doc__, _hints(kind)) for kind in _classes(events.Event)}
    decided = {kind.__name__: (kind.__doc__, named) for kind, named in _decisions()}
    described = {
        **{name: _object(name, *each, is_event=True) for name, each in heard.items()},
        **{name: _object(name, *each) for name, each in (decided | dict(NOTES)).items()},
    }
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of msrun's events.jsonl",
        "$comment": f"Generated by scripts/docs generate from {_SOURCE}.",
        "type": "object",
        "required": ["time", "event"],
        "properties": {
            "time": {"type": "number", "description": "Seconds since the epoch."},
            "event": {"type": "string"},
        },
        "allOf": [
            {"if": {"properties": {"event": {"const": name}}}, "then": {"$ref": f"#/$defs/{name}"}}
            for name in described
        ],
        "$defs": described,
    }
    return json.dumps(whole, indent=1) + "\n"


def _object(
    name: str, meaning: str | None, described: Mapping[str, Any], *, is_event: bool = False
) -> dict[str, Any]:
    properties = {field: _type(kind) for field, kind in described.items()}
    if is_event:
        properties["job"] = _type(JobState)
    return {
        "description": " ".join((meaning or "").replace("`", "").split()),
        "properties": properties,
        "required": [field for field in properties if field not in _OPTIONAL.get(name, ())],
    }


def _type(kind: Any) -> dict[str, Any]:
    """The JSON that the journal makes of a value of this type; anything, if that is not known."""
    if isinstance(kind, dict):
        return kind
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [each.value for each in kind]}
    if get_origin(kind) in {Union, types.UnionType}:
        return {"anyOf": [_type(each) for each in get_args(kind)]}
    if kind is type(None):
        return {"type": "null"}
    match get_origin(kind), get_args(kind):
        case builtin, (items, end) if builtin is tuple and end is ...:
            return {"type": "array", "items": _type(items)}
    return {}


def _classes(union: Any) -> list[type]:
    return [kind for kind in get_args(union) if kind.__name__ not in _UNWRITTEN]


def _decisions() -> list[tuple[type, dict[str, Any]]]:
    """Every action; a message that is handed on stands in the place of the action that does it."""
    plain = [(kind, _hints(kind)) for kind in _classes(actions.Action) if kind is not actions.Tell]
    tell = _hints(actions.Tell)
    messages = get_args(tell["message"])
    around = {"ranks": tell["ranks"]}, {"reason": tell["reason"]}
    return plain + [(kind, around[0] | _hints(kind) | around[1]) for kind in messages]


def _hints(kind: type) -> dict[str, Any]:
    return dict(get_type_hints(kind))
