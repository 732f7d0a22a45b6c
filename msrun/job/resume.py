"""``msrun --resume``: which run is resumed, from which folders, with which command line."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agent.controller.states import JobState
from agent.records import run_record
from agent.records.run_record import Record
from agent.spec.job_spec import UsageError
from msrun.job.resume_point import ResumeOrigin
from msrun.options.argv import CommandLine, scan
from msrun.options.settings import Setting
from msrun.runs.run_state import look
from worker_hooks.contract.layout import FALLBACK

if TYPE_CHECKING:
    from worker_hooks.storage.find import FoundCheckpoint

_RESUMING = frozenset({"resume", "is_recover"})
_PATHS = frozenset(
    {"config", "log_dir", "dump_fallback", "rank_table_file", "graceful_exit_file", "metrics_file"}
)
_ALTERNATIVES = (
    frozenset({"worker_num", "local_worker_num", "nproc_per_node"}),
    frozenset({"master_addr", "master_port", "rdzv_endpoint", "standalone"}),
    frozenset({"module", "no_python", "run_path"}),
    frozenset({"bind_core", "bind_numa", "numa_binding"}),
)
"""Options for the same thing: one that is given now replaces all of its group in the record."""


class ResumedCommand(NamedTuple):
    """How to start the resumed run, and where its checkpoints are."""

    line: CommandLine  # without --resume
    origin: ResumeOrigin
    environ: Mapping[str, str] = {}  # recorded variables that are not set now
    is_away: bool = False  # the run's folder is not the one in which msrun was called
    lacking: tuple[str, ...] = ()  # variables that were set at the run's start, and are not now
    other_args: str = ""  # the run's, if the script gets other arguments now
    failed_devices: tuple[str, ...] = ()  # of the run
    record: Record | None = None  # of the run; None: it is not known


def names_origin(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the word after ``--resume`` is a run or a folder, and not the script.

    ``words``: all words after ``--resume``.
    """
    word = words[0]
    if not word or os.path.isfile(word):
        return False
    if os.path.isdir(word):
        return not os.path.isfile(os.path.join(word, "__main__.py"))
    known = run_record.records(environ)
    return len(words) == 1 or any(
        record.record_id.startswith(word) or record.run_id == word for record in known
    )


def resumed_command(
    name: str,
    line: CommandLine,
    script: str | None,
    environ: Mapping[str, str],
    *,
    is_requeued: bool = False,
) -> ResumedCommand:
    """The command line to start: the typed one if it has a script, else the recorded one.

    Without a script the working folder becomes the run's.

    Args:
        name: a run or a folder with checkpoints; empty for the newest run.
        script: the script that is typed or named in a file.
        is_requeued: the engine that ran it starts it once more: it is over, wherever it was, and
            begins anew if it came to no checkpoint.

    Raises:
        UsageError: the run does not exist, is alive, or has no checkpoints.
    """
    folder = os.path.realpath(name) if name and os.path.isdir(name) else None
    record = _record(name, folder, script, environ)
    if record is not None:
        _check_over(record, environ, is_sure=folder is not None or is_requeued)
    typed = line._replace(given=_without(line.given, _RESUMING))
    lineage = () if record is None else (record.saves_as, *record.lineage)
    if folder is not None:
        folders: tuple[str, ...] = (folder,)
    else:
        assert record is not None  # else `_record` has raised
        folders = _folders(record)
    origin = ResumeOrigin(
        tuple(map(Path, folders)),
        lineage,
        is_run=folder is None,
        resumed_step=None if record is None else record.resumed_step,
        may_begin_anew=is_requeued,
        complete=None if folder is not None or record is None else record.complete,
    )
    failed = () if record is None else record.failed_devices
    if script is not None:
        other_args = _other_args(record, line)
        return ResumedCommand(
            typed, origin, other_args=other_args, failed_devices=failed, record=record
        )
    if record is None:
        raise UsageError(
            f"no recorded run has saved into {folder}: give the script as well, as in "
            f"msrun --resume {name} train.py"
        )
    found = _recorded(record, typed, origin, environ)
    return found._replace(failed_devices=failed, record=record)


def newest_of(
    engine_job: str, script: str, script_args: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    """The newest run that a batch system's job has begun with this script, by its own name.

    A job may run several scripts, or one with several arguments: none goes on from another's state.
    ``script``: as it is typed, in the working folder.
    """
    wanted = os.path.join(os.getcwd(), script)
    for record in run_record.records(environ):
        is_of_job = record.engine_job == engine_job and not record.job
        is_here = record.cwd == os.getcwd() and _script_of(record) == wanted
        if is_of_job and is_here and record.checkpoints and _args_of(record) == tuple(script_args):
            return record.record_id
    return None


def _args_of(record: Record) -> tuple[str, ...] | None:
    """The script's arguments in a run; ``None``: unknown."""
    try:
        return tuple(scan(record.argv[1:]).script_args)
    except UsageError:  # a record of another version
        return None


def _record(
    name: str, folder: str | None, script: str | None, environ: Mapping[str, str]
) -> Record | None:
    """The run to resume; ``None``: no recorded run saved into ``folder``."""
    every = _of_this_node([*run_record.records(environ)])
    saved = [record for record in every if record.checkpoints]
    if folder is not None:
        return next((one for one in saved if _saved_into(one, folder)), None)
    if name:
        return _named(name, environ)
    if script is not None:
        wanted = os.path.join(os.getcwd(), script)
        for record in saved:
            if record.cwd == os.getcwd() and _script_of(record) == wanted:
                return record
        raise UsageError(
            f"no recorded run of {script} in this folder has a checkpoint: "
            "name a run or a folder, as in --resume=FOLDER"
        )
    return _newest(saved, every)


def _of_this_node(every: Sequence[Record]) -> list[Record]:
    """Without those of a job's other nodes, whose home may be the same: each has its own line."""
    host = socket.gethostname()
    jobs = {one.saves_as for one in every if one.host == host}
    return [one for one in every if one.host in {"", host} or one.saves_as not in jobs]


def _named(name: str, environ: Mapping[str, str]) -> Record:
    if "/" in name:
        raise UsageError(f"--resume {name}: the folder does not exist")
    record = run_record.find(environ, name)
    if not record.checkpoints:
        raise UsageError(
            f"run {record.record_id} has no checkpoint: none of its ranks registered a state"
        )
    return record


def _newest(saved: Sequence[Record], every: Sequence[Record]) -> Record:
    """The newest run of this folder that has ended; one of another folder must be named.

    ``saved``: runs that have a checkpoint folder, the newest first.
    """
    if not saved:
        raise UsageError("no run of this user on this host has saved a checkpoint")
    known = [record for record in saved if record.cwd == os.getcwd()]
    if not known:
        nothing = "no run that was started in this folder has saved a checkpoint"
        other = next((record for record in saved if _resumable(record)), None)
        if other is None:
            raise UsageError(f"{nothing}, and no other run on this host has one that is complete")
        raise UsageError(
            f"{nothing}; the newest elsewhere is of {other.cwd}: msrun --resume {other.record_id}"
        )
    record = next((record for record in known if not record.is_alive()), known[0])
    status = look(record).status
    if status is not None and status.state == JobState.SUCCEEDED.value:
        finished = f"the newest run {record.record_id} finished, there is nothing to resume"
        later = next(one for one in every if one.cwd == os.getcwd())
        if later.record_id != record.record_id and not later.checkpoints:
            finished = (
                f"run {later.record_id} came to no step that could be saved, and the one before "
                f"it, {record.record_id}, finished: there is nothing to resume"
            )
        kept = _resumable(record)
        if kept is None:  # no line to type that would be refused
            raise UsageError(f"{finished}; it needed no checkpoint, and saved none")
        raise UsageError(
            f"{finished}; to resume it anyway, from step {kept.manifest.step}: "
            f"msrun --resume {record.record_id}"
        )
    return record


def _resumable(record: Record) -> FoundCheckpoint | None:
    """The checkpoint that the run would resume from; its files are not verified."""
    from worker_hooks.storage.find import Verify, search_of_run  # rarely needed

    lineage, folders = (record.saves_as, *record.lineage), map(Path, _folders(record))
    return search_of_run(folders, lineage, record.resumed_step, verify=Verify.NONE).newest


def _folders(record: Record) -> tuple[str, ...]:
    """Where the run saved, and where its ranks save if msrun itself is killed."""
    fallback = os.path.join(record.log_dir, FALLBACK)
    with contextlib.suppress(UsageError):  # a record of another version
        given = scan(record.argv[1:]).given.get("dump_fallback")
        if given is not None and given.text:
            fallback = os.path.join(record.cwd, given.text)
    return tuple(dict.fromkeys((*record.checkpoints, fallback)))


def _saved_into(record: Record, folder: str) -> bool:
    """Whether the run saves into ``folder``, or it is a checkpoint of the run."""
    folders = {os.path.realpath(each) for each in _folders(record)}
    return folder in folders or os.path.dirname(folder) in folders


def _script_of(record: Record) -> str | None:
    """The script of a run, absolute; ``None``: unknown."""
    try:
        line = scan(record.argv[1:])
        script, config = line.script, line.given.get("config")
        if script is None and config is not None:
            from msrun.options.config_file import read_config

            script = read_config(os.path.join(record.cwd, config.text)).script
    except UsageError:  # a record of another version, or the file is gone
        return None
    return None if script is None else os.path.join(record.cwd, script)


def _check_over(record: Record, environ: Mapping[str, str], *, is_sure: bool) -> None:
    """Two runs must not continue one: neither it nor one that resumed it may be alive."""
    for other in run_record.records(environ):
        if not other.is_alive():
            continue
        if other.record_id == record.record_id:
            raise UsageError(
                f"run {record.record_id} is alive (msrun pid {record.pid}): "
                f"`msrun stop {record.record_id}` ends it"
            )
        if record.saves_as in other.lineage:
            raise UsageError(
                f"run {record.record_id} has been resumed already, as run {other.record_id} "
                f"(msrun pid {other.pid})"
            )
    state = look(record)
    if state.elsewhere and not state.ended and not is_sure:
        raise UsageError(
            f"run {record.record_id} was last seen on host {state.elsewhere} and may be alive "
            f"there: if it is not, name its folder: msrun --resume {record.checkpoints[0]}"
        )


def _recorded(
    record: Record, typed: CommandLine, origin: ResumeOrigin, environ: Mapping[str, str]
) -> ResumedCommand:
    """The run's own command line, in which options that are typed now replace recorded ones."""
    old = scan(record.argv[1:])
    replaced = {dest for same in _ALTERNATIVES if same & typed.given.keys() for dest in same}
    given = dict(_without(old.given, replaced | _RESUMING))
    for dest, setting in typed.given.items():
        is_here = dest in _PATHS and setting.text and not setting.text.startswith("/")
        given[dest] = setting._replace(text=os.path.abspath(setting.text)) if is_here else setting
    is_away = os.path.realpath(record.cwd) != os.getcwd()
    try:
        os.chdir(record.cwd)
    except OSError as error:
        raise UsageError(
            f"the folder of run {record.record_id} cannot be entered: {record.cwd} "
            f"({error.strerror})"
        ) from None
    missing = {name: text for name, text in record.environ.items() if name not in environ}
    line = CommandLine(given, old.script, old.script_args)
    lacking = tuple(name for name in record.unrecorded if name not in environ)
    return ResumedCommand(line, origin, missing, is_away, lacking)


def _other_args(record: Record | None, line: CommandLine) -> str:
    """The script's arguments in a run, if they are not those of this line; empty: they are."""
    if record is None or line.script is None:
        return ""
    try:
        old = scan(record.argv[1:])
    except UsageError:  # a record of another version
        return ""
    if old.script is None or old.script_args == line.script_args:
        return ""
    return shlex.join(old.script_args) or "none"


def _without(given: Mapping[str, Setting], dests: Iterable[str]) -> dict[str, Setting]:
    return {dest: setting for dest, setting in given.items() if dest not in dests}
