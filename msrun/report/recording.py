"""All that a run recorded, read for a report; what cannot be read is missing in it, no more."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agent.records.run_record import Record
from msrun.report.pace import PaceNote, read_note
from msrun.report.timeline import Timeline
from msrun.runs.cost import PastIncident, read_incident
from msrun.runs.fields import read_object
from msrun.runs.run_state import RunState, look
from worker_hooks.contract.layout import EVENTS, FAILURE

MOST_INCIDENTS = 1000  # that are kept, the newest
LONGEST_LINE = 4 << 20  # bytes


class Recording(NamedTuple):
    """One run."""

    run: RunState
    timeline: Timeline
    incidents: tuple[PastIncident, ...]  # the oldest first
    paces: tuple[PaceNote, ...]
    stacks: tuple[Mapping[str, Any], ...]  # of ranks that hung, as HangJudged says
    stills: tuple[tuple[float, str], ...]  # moments at which no rank made progress, and why
    failure: Mapping[str, Any]  # the content of failure.json; empty: there is none

    @property
    def record(self) -> Record:
        """Who ran what."""
        return self.run.record


def read_recording(record: Record) -> Recording:
    """What is recorded of a run by now."""
    run = look(record)
    timeline = Timeline(len(run.status.workers) if run.status else 0)
    incidents: list[PastIncident] = []
    paces: list[PaceNote] = []
    stacks: list[Mapping[str, Any]] = []
    stills: list[tuple[float, str]] = []
    for event in _events(run.folder):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
            timeline.take(event)
            match event["event"]:
                case "IncidentOver":
                    incidents = [*incidents[1 - MOST_INCIDENTS :], read_incident(event)]
                case "StepsTimed":
                    paces.append(read_note(event))
                case "HangJudged" if event["culprits"]:
                    stacks = [*stacks[-MOST_INCIDENTS:], event]
                case "JobStandsStill" | "JobPaused":
                    stills.append((float(event["time"]), str(event["reason"])))
    cost = run.status.cost if run.status else None
    known = {(one.at, one.ranks) for one in incidents}
    incidents += [one for one in (cost.last if cost else ()) if (one.at, one.ranks) not in known]
    return Recording(
        run=run,
        timeline=timeline,
        incidents=tuple(incidents),
        paces=tuple(paces),
        stacks=tuple(stacks),
        stills=tuple(stills),
        failure=read_object(run.folder / FAILURE),
    )


def _events(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of ``events.jsonl``; those that are damaged are skipped."""
    try:
        with (folder / EVENTS).open("rb") as lines:
            while line := lines.readline(LONGEST_LINE):
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict) and "event" in event and "time" in event:
                        yield event
    except OSError:
        return
