"""Which run a command means: the one that is named, else one that was started in this folder.

Nobody shall stop, or take for his own, the training of another project by a short command. A run
of another folder is named instead, and on a terminal asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import click

from agent.records import run_record
from agent.records.run_record import Record
from agent.spec.job_spec import UsageError
from msrun.runs.run_state import is_alive


def chosen(environ: Mapping[str, str], name: str | None, command: str) -> Record:
    """The run called ``name``; without a name the newest of this folder, a living one first.

    Args:
        name: a run id, a record id, or its unique beginning.
        command: what the user typed before it, ``msrun status``.

    Raises:
        UsageError: there is no such run, or only one of another folder, which was not agreed to.
    """
    if name is not None:
        return run_record.find(environ, name)
    known = list(run_record.records(environ))
    if not known:
        raise UsageError("no run is recorded for this user on this host")
    here = [record for record in known if record.cwd == os.getcwd()]
    newest = next(filter(is_alive, here or known), (here or known)[0])
    return newest if here else agreed(newest, command)


def agreed(record: Record, command: str) -> Record:
    """A run of another folder, if a person on a terminal says that it is meant.

    Raises:
        UsageError: it is not.
    """
    state = "runs" if is_alive(record) else "ended"
    other = f"no run was started in this folder; {record.record_id} {state} in {record.cwd}"
    is_asked = sys.stdin.isatty() and sys.stderr.isatty()
    if is_asked and click.confirm(f"msrun: {other}. Is that one meant?", err=True):
        return record
    raise UsageError(f"{other}: {command} {record.record_id}")
