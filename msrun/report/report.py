"""Writes the report of a run into a file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from agent.records.run_record import Record, find, records
from agent.spec.console import Console
from msrun.report.page import page
from msrun.report.recording import Recording, read_recording
from worker_hooks.contract.atomic_file import write_atomic

MOST_RUNS = 5  # of a chain of resumed runs, the newest


def default_path(record_id: str) -> Path:
    """In the working folder."""
    return Path(f"msrun-report-{record_id}.html")


def write_report(environ: Mapping[str, str], record: Record, path: Path) -> None:
    """Write the report of a run, and of those that it resumed.

    Raises:
        OSError: the file cannot be written.
    """
    html = page(_chain(environ, record), time.time())
    write_atomic(Path(os.path.abspath(path)), html.encode(errors="replace"), durable=False)


def report_at_end(environ: Mapping[str, str], record_id: str, path: Path, console: Console) -> None:
    """The same as a run ends; whatever goes wrong, the exit code stays that of the job."""
    try:
        write_report(environ, find(environ, record_id), path)
    except Exception as error:  # noqa: BLE001  as above
        console.say(f"the report cannot be written to {path}: {error}")
    else:
        console.say(f"the report of this run is {path}")


def _chain(environ: Mapping[str, str], record: Record) -> list[Recording]:
    known = {one.record_id: one for one in records(environ)} if record.lineage else {}
    before = [known[name] for name in record.lineage[: MOST_RUNS - 1] if name in known]
    return [read_recording(one) for one in (*reversed(before), record)]
