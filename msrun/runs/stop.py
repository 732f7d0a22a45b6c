"""``msrun stop``: request the end of a run's job, and wait for it.

The signal goes to a pidfd, so it cannot hit another process that reuses the pid. Every SIGTERM
makes msrun less patient, so a run that has a request already gets another one only with ``--now``.
A signal cannot carry how patient the run shall be: that is a note beside the run's record.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from agent.records.run_record import Record, records
from agent.records.stop_note import StopNote, write_note
from agent.spec.job_spec import Timeouts, UsageError
from agent.text.wording import duration
from msrun.runs.choice import agreed, chosen
from msrun.runs.run_state import RunState, files, has_ended, is_alive, look, open_process
from msrun.terminal.stdout import put
from worker_hooks.contract.layout import runs_folder

SLACK_S = 10.0  # for msrun's own end, in addition to the job's timeouts
FAILED_EXIT = 1
COMMAND = "msrun stop"


def stop(
    environ: Mapping[str, str], name: str | None, timeout_s: float | None, note: StopNote
) -> int:
    """Stop the run called ``name`` and print how it ended.

    Args:
        name: a run; ``None`` for the only one that is alive.
        timeout_s: how long to wait; ``None``: as long as the run's own timeouts allow.
        note: how patient the run shall be.

    Returns:
        0 if the run has ended in time, else 1.

    Raises:
        UsageError: there is no such run, or more than one fits.
    """
    run = look(_choose(environ, name))
    if run.elsewhere and not run.ended:
        raise UsageError(f"run {run.record.record_id} runs on {run.elsewhere}: stop it there")
    process = open_process(run.record)
    if process is None:
        put(f"run {run.record.record_id} had already ended: {_end(look(run.record))}\n")
        return 0
    try:
        return _stop(run, process, _bound(run, timeout_s, note), note, _folder(environ, run.record))
    finally:
        os.close(process)


def _choose(environ: Mapping[str, str], name: str | None) -> Record:
    """Several living runs are an error: stopping the wrong one loses work."""
    living = [record for record in records(environ) if is_alive(record)]
    if name is not None:
        fitting = [record for record in living if name in {record.record_id, record.run_id}]
    else:
        fitting = [record for record in living if record.cwd == os.getcwd()] or living
    if len({record.saves_as for record in fitting}) == 1:  # several nodes of one job are here
        fitting = sorted(fitting, key=lambda record: bool(record.job))[:1]
    if len(fitting) > 1:
        listed = ", ".join(f"{record.record_id} in {record.cwd}" for record in fitting)
        raise UsageError(f"{len(fitting)} runs are alive ({listed}): say which one to stop")
    if not fitting:
        return chosen(environ, name, COMMAND)
    is_ours = name is not None or fitting[0].cwd == os.getcwd()
    return fitting[0] if is_ours else agreed(fitting[0], COMMAND)


def _bound(run: RunState, timeout_s: float | None, note: StopNote) -> float | None:
    if timeout_s is not None:
        return timeout_s
    default, status = Timeouts(), run.status
    stop_s = status.stop_s if status else (default.grace_s or 0) + (default.kill_s or 0)
    if stop_s is None:
        return None
    if status is not None and status.is_guarded and not note.is_now:
        stop_s += status.asked_s if note.is_graceful else status.graceful_s
        stop_s += 2 * (note.grace_s or 0.0)
    return stop_s + SLACK_S


def _folder(environ: Mapping[str, str], record: Record) -> Path:
    """The record's folder, in which the run looks for notes."""
    folders = [folder / record.record_id for folder in runs_folder(environ, os.getuid())]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def _stop(run: RunState, process: int, bound_s: float | None, note: StopNote, folder: Path) -> int:
    record, now = run.record, note.is_now
    began = time.monotonic()
    is_gathering = run.status is not None and run.status.is_gathering
    # its folder may have the files of a run before
    is_repeated = not is_gathering and _has_request(files(record, run.folder).events)
    if now or not is_repeated:
        _write_note(record, folder, note, is_gathering=is_gathering)
        _terminate(record, process)
    doing = "killing" if now else "still stopping" if is_repeated else "stopping"
    how = ", gracefully" if note.is_graceful and not is_repeated else ""
    patience = "" if bound_s is None else f" (up to {duration(bound_s)})"
    put(f"{doing} run {record.record_id}{how}{patience}\n")
    if _await_end(process, bound_s, began):
        took = time.monotonic() - began
        put(f"run {record.record_id} ended after {took:.1f} s: {_end(look(record))}\n")
        return 0
    alive = _still_alive(look(record))
    hint = "" if now else f"; `msrun stop --now {record.record_id}` kills its workers"
    put(f"run {record.record_id} has not ended within {duration(bound_s or 0)}{alive}{hint}\n")
    return FAILED_EXIT


def _write_note(record: Record, folder: Path, note: StopNote, *, is_gathering: bool) -> None:
    """Write the note, unless the signal alone says the same: the run's own options then count.

    A signal alone would end one node if the nodes of the job still gather, or may leave it.
    """
    is_plain = note == StopNote()
    if is_plain and not (is_gathering or record.may_leave):
        return
    try:
        write_note(folder, note)
    except OSError as error:
        what = f"{folder} cannot be written ({error.strerror}), so the run cannot learn"
        if is_plain or record.may_leave:
            raise UsageError(
                f"{what} that the whole job is meant: SIGTERM to its msrun (pid {record.pid}) "
                "would end one node alone"
            ) from error
        raise UsageError(
            f"{what} how patient to be: msrun stop {record.record_id} without options needs no note"
        ) from error


def _terminate(record: Record, process: int) -> None:
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return  # it has just ended
    except PermissionError as error:
        raise UsageError(
            f"msrun (pid {record.pid}) belongs to another user: ask them to stop it"
        ) from error


def _has_request(events: Path) -> bool:
    """Whether the run has recorded a request to stop."""
    try:
        lines = events.read_bytes().splitlines()
    except OSError:
        return False
    return any(b"StopRequested" in line and _is_request(line) for line in lines)


def _is_request(line: bytes) -> bool:
    try:
        event = json.loads(line)
        # as long as only a node leaves the job goes on
        return bool(event["event"] == "StopRequested" and not event.get("leaves"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _await_end(process: int, bound_s: float | None, began: float) -> bool:
    left_s = None if bound_s is None else max(0.0, began + bound_s - time.monotonic())
    return has_ended(process, left_s)


def _end(run: RunState) -> str:
    if run.status and run.status.reason:
        return f"{run.state_words} ({run.status.reason})"
    return run.state_words


def _still_alive(run: RunState) -> str:
    pids = (
        [f"rank {w.rank} (pid {w.pid})" for w in run.status.workers if w.state == "running"]
        if run.status
        else []
    )
    return f", still alive: {', '.join(pids)}" if pids else ""
