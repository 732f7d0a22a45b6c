"""What the report of a run holds: what msrun recorded, what its ranks printed, and the machine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from agent.text.sanitize import sanitized
from agent.text.secret_names import masked, secrets
from agent.text.wording import sized
from msrun.bugreport.archive import Archive, tail
from msrun.runs.log_files import Wanted, views
from msrun.runs.run_state import RunState, files
from msrun.terminal.stdout import put
from worker_hooks.contract.layout import EVENTS, FAILURE, SCHEDULER_LOG, STATUS

LOG_BYTES = 64 << 10  # of each rank's log
LOGS_BYTES = 16 << 20  # of all of them
OWN = {EVENTS: 8 << 20, SCHEDULER_LOG: 2 << 20, STATUS: 4 << 20, FAILURE: 4 << 20}
QUOTING = {SCHEDULER_LOG, FAILURE}  # they quote what ranks printed
PACKAGES = ("msrun", "torch", "numpy", "click", "rich", "psutil", "pyyaml", "safetensors")


class ReportOrder(NamedTuple):
    """What was asked for."""

    output: Path | None
    has_logs: bool


def report(run: RunState, order: ReportOrder, machine: Mapping[str, Any]) -> int:
    """Write the report of a run, and say what is in it; the exit code.

    ``machine``: what ``msrun doctor --json`` prints.

    Raises:
        UsageError: it cannot be written.
    """
    name = f"msrun-bugreport-{run.record.record_id}"
    path = order.output or Path(f"{name}-{time.strftime('%H%M%S')}.tar.gz")
    variables = (f"{name}={value}" for name, value in run.record.environ.items())
    known = secrets((*run.record.argv, *variables))  # earlier versions recorded more of them
    archive = Archive(name)
    archive.add("record.json", masked(_json(_record(run)), known))
    archive.add("doctor.json", _json(machine))
    archive.add("versions.json", _json(_versions()))
    written = files(run.record, run.folder)
    paths = (written.events, written.scheduler_log, written.status, written.failure)
    for (own, most), from_ in zip(OWN.items(), paths, strict=True):
        text = tail(from_, run.folder, most)
        if text is not None and (order.has_logs or own not in QUOTING):
            archive.add(own, masked(text, known))
    if order.has_logs:
        for file, text in _logs(run):
            archive.add(f"logs/{file}", masked(text, known))
    nbytes = archive.write(path)
    put("".join(f"{line}\n" for line in _said(path, nbytes, archive.names, order)))
    return 0


def _said(path: Path, nbytes: int, names: list[str], order: ReportOrder) -> Iterator[str]:
    count = sum(name.startswith("logs/") for name in names)
    yield f"wrote {sanitized(str(path.absolute()))} ({sized(nbytes)}, readable for you only)"
    yield "  record.json    the command line, with *** for what looks like a secret, and variables"
    yield "                 of msrun, Python and libraries; of other variables only the names"
    yield "  doctor.json    this machine; versions.json: of msrun, Python and libraries"
    own = ", ".join(name for name in names if name in OWN)
    if own:
        yield f"  {own}: what msrun recorded"
    if order.has_logs:
        yield f"  logs/          the end of {count} logs of ranks, as the script printed them:"
        yield "                 read them before you send this, or leave them out with --no-logs"


def _record(run: RunState) -> dict[str, Any]:
    """The record, with how the run stands now."""
    return {**run.record._asdict(), "state": run.state_words, "folder": str(run.folder)}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _logs(run: RunState) -> Iterator[tuple[str, str]]:
    """Each rank's log by its name, the newest attempt first, until there is too much."""
    left, seen = LOGS_BYTES, set[Path]()
    folder = Path(os.path.commonpath([run.folder, run.record.log_dir]))
    for attempt in range(run.status.attempt if run.status else 0, -1, -1):
        for view in views(run, Wanted(), attempt):
            text = None if view.path in seen else tail(view.path, folder, min(LOG_BYTES, left))
            seen.add(view.path)
            if text is not None and left > 0:
                left -= len(text)
                yield os.path.relpath(view.path, folder), text


def _json(content: object) -> str:
    return json.dumps(content, indent=1) + "\n"
