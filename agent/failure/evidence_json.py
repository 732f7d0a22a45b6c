"""Evidence as JSON: what one node found of its ranks' ends, for the one report of the job."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agent.failure.evidence import ErrorFile, Evidence, WorkerEnd
from agent.failure.log_excerpt import Traceback


def as_json(evidence: Evidence) -> dict[str, Any]:
    """All of it; paths are those of its node."""
    found = asdict(evidence)
    end = found["end"]
    for name in ("error_file", "log"):
        end[name] = None if end[name] is None else str(end[name])
    return found


def from_json(found: Any) -> Evidence:
    """The evidence that :func:`as_json` described.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    end = dict(found["end"])
    for name in ("error_file", "log"):
        end[name] = None if end[name] is None else Path(end[name])
    error, logged = found["error"], found["logged"]
    return Evidence(
        **{
            **found,
            "end": WorkerEnd(**end),
            "error": None if error is None else ErrorFile(**error),
            "logged": None if logged is None else Traceback(**logged),
            "log_tail": tuple(map(str, found["log_tail"])),
        }
    )


def as_heard(evidence: Evidence, at_epoch_s: float, order: int) -> Evidence:
    """Evidence of another node, by this one's clock: two nodes' clocks are never compared.

    Args:
        evidence: as that node saw it.
        at_epoch_s: when this one heard of the end.
        order: in which it heard of the ends of all ranks.
    """
    later_s = at_epoch_s - evidence.end.at_epoch_s
    error = evidence.error
    if error is not None and error.timestamp is not None:
        error = replace(error, timestamp=round(error.timestamp + later_s))
    return replace(
        evidence, end=replace(evidence.end, at_epoch_s=at_epoch_s, order=order), error=error
    )
