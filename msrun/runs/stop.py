"""``msrun stop``: ask a run's msrun to end its job, and wait for that.

The signal goes to a pidfd, so a pid that was given to somebody else meanwhile is never hit. Every
SIGTERM makes msrun less patient; so one that was asked before is not asked again unless that is
wanted. What a signal cannot say, how patient to be, is left as a note beside the run's record.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from agent.records.run_record import Record, find, records
from agent.records.stop_note import StopNote, write_note
from agent.spec.job_spec import Timeouts, UsageError
from msrun.runs.run_state import RunState, has_ended, is_alive, look, open_process
from msrun.terminal.stdout import put
from msrun.terminal.table import duration
from worker_hooks.contract.layout import EVENTS, runs_folder

SLACK_S = 10.0  # for msrun's own end, beyond what its job may take
FAILED_EXIT = 1


def stop(
    environ: Mapping[str, str], name: str | None, timeout_s: float | None, note: StopNote
) -> int:
    """Stop the run called ``name`` and say what became of it.

    Args:
        environ: msrun's environment.
        name: a run; ``None`` for the only one that is alive.
        timeout_s: how long to wait; ``None``: as long as the run's own timeouts allow.
        note: how patient the run is to be.

    Returns:
        0 when the run has ended, 1 when it has not within the time.

    Raises:
        UsageError: there is no such run, or it is not clear which one is meant.
    """
    run = look(_choose(environ, name))
    if run.elsewhere and not run.ended:
        raise UsageError(f"run {run.record.record_id} runs on {run.elsewhere}: stop it there")
    process = open_process(run.record)
    if process is None:
        put(f"run {run.record.record_id} had already ended: {_end(look(run.record))}\n")
        return 0
    try:
        return _stop(run, process, _bound(run, timeout_s, note), note, _notes(environ, run.record))
    finally:
        os.close(process)


def _choose(environ: Mapping[str, str], name: str | None) -> Record:
    """Only one of several living runs may be meant: stopping the wrong one loses work."""
    living = [record for record in records(environ) if is_alive(record)]
    if name is not None:
        living = [record for record in living if name in {record.record_id, record.run_id}]
    if len(living) > 1:
        listed = ", ".join(record.record_id for record in living)
        raise UsageError(f"{len(living)} runs are alive ({listed}): say which one to stop")
    return living[0] if living else find(environ, name)


def _bound(run: RunState, timeout_s: float | None, note: StopNote) -> float | None:
    if timeout_s is not None:
        return timeout_s
    default, word = Timeouts(), run.word
    stop_s = word.stop_s if word else (default.grace_s or 0) + (default.kill_s or 0)
    if stop_s is None:
        return None
    if word is not None and word.is_guarded and not note.is_now:
        stop_s += word.asked_s if note.is_graceful else word.graceful_s
        stop_s += 2 * (note.grace_s or 0.0)
    return stop_s + SLACK_S


def _notes(environ: Mapping[str, str], record: Record) -> Path:
    """Where the run looks for notes."""
    folders = [folder / record.record_id for folder in runs_folder(environ, os.getuid())]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def _stop(run: RunState, process: int, bound_s: float | None, note: StopNote, notes: Path) -> int:
    record, now = run.record, note.is_now
    began = time.monotonic()
    asked = _requests(run.folder)
    if now or asked == 0:
        _leave(record, notes, note)
        _terminate(record, process)
    told = "is told to leave gracefully" if note.is_graceful else "is told to stop"
    verb = "is being killed" if now else "was told to stop before" if asked else told
    patience = "" if bound_s is None else f", waiting up to {duration(bound_s)}"
    put(f"run {record.record_id} (msrun pid {record.pid}) {verb}{patience}\n")
    if _await_end(process, bound_s, began):
        took = time.monotonic() - began
        put(f"run {record.record_id} ended after {took:.1f} s: {_end(look(record))}\n")
        return 0
    left = _left(look(record))
    hint = "" if now else f"; `msrun stop --now {record.record_id}` kills its workers"
    put(f"run {record.record_id} has not ended within {duration(bound_s or 0)}{left}{hint}\n")
    return FAILED_EXIT


def _leave(record: Record, notes: Path, note: StopNote) -> None:
    """A signal alone says what the run's own options say."""
    if note == StopNote():
        return
    try:
        write_note(notes, note)
    except OSError as error:
        raise UsageError(
            f"{notes} cannot be written ({error.strerror}), where the run would read how patient "
            f"to be: msrun stop {record.record_id} asks without"
        ) from error


def _terminate(record: Record, process: int) -> None:
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return  # it has just ended by itself
    except PermissionError as error:
        raise UsageError(
            f"msrun (pid {record.pid}) belongs to another user: ask them to stop it"
        ) from error


def _requests(folder: Path) -> int:
    """How many requests to stop the run has noted; two that are not noted may become one."""
    try:
        lines = (folder / EVENTS).read_bytes().splitlines()
    except OSError:
        return 0
    return sum(b"StopRequested" in line and _is_request(line) for line in lines)


def _is_request(line: bytes) -> bool:
    try:
        return bool(json.loads(line)["event"] == "StopRequested")
    except (ValueError, KeyError, TypeError):
        return False


def _await_end(process: int, bound_s: float | None, began: float) -> bool:
    if bound_s is None:
        while not has_ended(process, 3600.0):
            pass
        return True
    return has_ended(process, max(0.0, began + bound_s - time.monotonic()))


def _end(run: RunState) -> str:
    if run.word and run.word.reason:
        return f"{run.state_words} ({run.word.reason})"
    return run.state_words


def _left(run: RunState) -> str:
    pids = (
        [f"rank {w.rank} (pid {w.pid})" for w in run.word.workers if w.state == "running"]
        if run.word
        else []
    )
    return f", still there: {', '.join(pids)}" if pids else ""
