"""What ranks left behind when they failed: the end of their logs, and where hung ranks stood."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.spec.job_spec import UsageError
from agent.text.log_lines import last_lines, log_lines
from msrun.report.recording import Recording
from msrun.runs.cost import PastIncident
from msrun.runs.log_files import Wanted, views
from worker_hooks.contract.atomic_file import read_end

LINES = 15  # of one log
BYTES = 6000
MOST_RANKS = 4  # of one incident
MOST_FRAMES = 30  # lines of one rank's stack


def log_end(recording: Recording, rank: int, attempt: int) -> str:
    """The last lines of what a rank printed in an attempt; empty: there are none."""
    try:
        found = views(recording.run, Wanted(rank=rank), attempt)
    except UsageError:
        return ""
    for view in found:
        if text := _end(view.path):
            return text
    return ""


def _end(path: Path) -> str:
    try:
        raw, before = read_end(path, BYTES)
    except OSError:
        return ""
    return "\n".join(last_lines(log_lines(raw, cut=before > 0), LINES))


def stacks(recording: Recording, incident: PastIncident) -> Mapping[int, str]:
    """Where ranks stood when one of them was judged to hang: those, and one that waited."""
    if incident.kind != "hung":
        return {}
    for judged in recording.stacks:  # the first one after its last progress
        is_its = set(judged["culprits"]) & set(incident.ranks)
        if is_its and float(judged["time"]) >= incident.at:
            return _chosen(judged)
    return {}


def _chosen(judged: Mapping[str, Any]) -> Mapping[int, str]:
    wanted = [*judged["culprits"][:MOST_RANKS], *judged["victims"][:1]]
    found = {int(rank): lines for rank, lines in judged["stacks"].items()}
    return {
        rank: "\n".join(map(str, found[rank][-MOST_FRAMES:])) for rank in wanted if rank in found
    }
