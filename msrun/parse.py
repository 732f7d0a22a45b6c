"""From a command line and an environment to a checked `agent.spec.JobSpec`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent.spec import JobSpec, StartMethod, Timeouts, UsageError
from msrun import __version__, dialect
from msrun.logspec import logs
from msrun.options import BY_DEST
from msrun.program import build_program
from msrun.scan import scan
from msrun.settings import Setting, Settings, bounded, from_environ
from msrun.usage import USAGE, help_text
from worker_hooks import env

_UNFORWARDABLE = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD"})
_DEFAULT_GRACE_S = 30.0


class Request(NamedTuple):
    """What the user asked for: a job, and what to do with it."""

    job: JobSpec
    join: bool
    dry_run: bool
    sim_rank_id: int | None  # a dry run of this rank only
    warnings: tuple[str, ...]  # sentences to print before anything starts


class _Layers(NamedTuple):
    """All layers merged."""

    settings: Settings
    script: str
    script_args: tuple[str, ...]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Turn the words after ``msrun`` and the environment into a request.

    Raises:
        UsageError: one sentence on what is wrong and where it was given.
        SystemExit: 0, after ``--help`` or ``--version`` was printed.
    """
    layers, warnings = _layers(argv, environ), list[str]()
    settings = layers.settings
    job = _job(layers, environ, warnings)
    return Request(
        job=job,
        join=settings.boolean("join"),
        dry_run=_dry_run(settings),
        sim_rank_id=_sim_rank(settings, job.world_size, warnings),
        warnings=tuple(warnings),
    )


def _layers(argv: Sequence[str], environ: Mapping[str, str]) -> _Layers:
    """Defaults < YAML < environment < flags. A script typed brings its own arguments."""
    line = scan(argv)
    if line.asked is not None:
        _answer(line.asked)
    typed = from_environ(environ) | dict(line.given)
    given, script, script_args = typed, line.script, line.script_args
    if "config" in typed and typed["config"].text:
        from msrun.config import read_config

        config = read_config(typed["config"].text)
        given = config.given | typed
        if script is None:
            script, script_args = config.script, config.script_args
    if script is None:
        raise UsageError(f"no script was given ({USAGE}); msrun --help lists the options")
    return _Layers(Settings(given), script, script_args)


def _answer(asked: str) -> None:
    """Print what was asked for and leave."""
    print(f"msrun {__version__}" if asked == "version" else help_text(), end="\n")
    sys.exit(0)


def _job(layers: _Layers, environ: Mapping[str, str], warnings: list[str]) -> JobSpec:
    """The checked job."""
    settings = layers.settings
    size = dialect.size(settings, environ)
    master = dialect.master(settings, warnings)
    _check_unused(settings)
    record = record_id()
    job = JobSpec(
        program=build_program(settings, layers.script, layers.script_args, environ),
        nproc=size.nproc,
        run_id=_run_id(settings.of("rdzv_id"), record),
        record_id=record,
        role=settings.text("role"),
        master_addr=master.addr,
        master_port=master.port,
        max_restarts=settings.integer("max_restarts") or 0,
        start_method=_start_method(settings),
        preload=_preload(settings.of("preload")),
        timeouts=_timeouts(settings, environ),
        signals=_signals(settings.of("signals_to_handle"), warnings),
        logs=logs(settings, size, environ, warnings),
        bind=dialect.bind(settings, size.nproc),
        virtual_local_rank=_virtual(settings, size.nproc, environ),
        rank_table_file=_rank_table(settings.of("rank_table_file")),
        event_log_handler=settings.text("event_log_handler"),
    )
    _one_node(settings, size, warnings)
    return job


def _one_node(settings: Settings, size: dialect.Size, warnings: list[str]) -> None:
    """Many nodes are read and understood, and not started yet."""
    if size.nnodes > 1:
        message = f"{size.nnodes} nodes are not supported yet: start with --nnodes=1"
        raise UsageError(message)
    if (settings.integer("node_rank") or 0) > 0:
        warnings.append(f"{settings.of('node_rank').shown} is ignored, there is one node.")


def _check_unused(settings: Settings) -> None:
    """Options without effect are checked all the same: a typo in them is a typo."""
    settings.text("logs_specs")
    if not settings.number("monitor_interval") > 0:
        raise UsageError(f"{settings.of('monitor_interval').shown} must be above 0")


def record_id() -> str:
    """A new name for a run: unique on this host, sortable by its start."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def _run_id(setting: Setting, record: str) -> str:
    """TORCHELASTIC_RUN_ID; it names a folder, too."""
    if setting.text in {"", BY_DEST["rdzv_id"].default}:
        return record
    if "/" in setting.text or setting.text.startswith("."):
        raise UsageError(f"{setting.shown} names a folder: no slash, no leading dot")
    return setting.text


def _start_method(settings: Settings) -> StartMethod:
    """How workers start: fork and forkserver are what auto does where it is safe."""
    chosen = settings.text("start_method")
    return StartMethod.SPAWN if chosen == "spawn" else StartMethod.AUTO


def _preload(setting: Setting) -> tuple[str, ...]:
    """Names of modules."""
    names = tuple(name.strip() for name in setting.text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"{setting.shown}: {name!r} is no module's name")
    return names


def _timeouts(settings: Settings, environ: Mapping[str, str]) -> Timeouts:
    """Bounds of waiting, in seconds."""
    start, grace = settings.integer("cluster_time_out"), settings.integer("shutdown_timeout")
    if start == 0:
        shown = settings.of("cluster_time_out").shown
        raise UsageError(f"{shown} must be above 0, or negative for no bound")
    inherited = environ.get(env.SHUTDOWN_TIMEOUT)
    if grace is None and inherited:
        grace = bounded(Setting(inherited, env.SHUTDOWN_TIMEOUT), BY_DEST["shutdown_timeout"])
    return Timeouts(
        start_s=None if start is None or start < 0 else float(start),
        grace_s=_DEFAULT_GRACE_S if grace is None else float(grace),
    )


def _signals(setting: Setting, warnings: list[str]) -> tuple[str, ...]:
    """Names of signals; as in torchrun, one that cannot be handled is dropped with a warning."""
    names = dict.fromkeys(name.strip() for name in setting.text.split(",") if name.strip())
    kept = []
    for name in names:
        if name in _UNFORWARDABLE or name not in signal.Signals.__members__:
            warnings.append(f"{setting.shown}: {name} cannot be handled and is left out.")
        else:
            kept.append(name)
    return tuple(kept)


def _virtual(settings: Settings, nproc: int, environ: Mapping[str, str]) -> bool:
    """Whether each worker sees one device; there must be one for each."""
    wanted = settings.boolean("virtual_local_rank")
    if wanted:
        try:
            env.visible_devices(nproc, environ)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return wanted


def _rank_table(setting: Setting) -> str | None:
    """An existing file."""
    if setting.text and not os.path.isfile(setting.text):
        raise UsageError(f"{setting.shown}: there is no such file")
    return setting.text or None


def _dry_run(settings: Settings) -> bool:
    """In either dialect."""
    level = settings.integer("sim_level")
    return settings.boolean("dry_run") or (level is not None and level >= 0)


def _sim_rank(settings: Settings, world_size: int, warnings: list[str]) -> int | None:
    """The one rank a dry run shows."""
    setting, rank = settings.of("sim_rank_id"), settings.integer("sim_rank_id")
    if rank is None or rank < 0:
        return None
    if rank >= world_size:
        raise UsageError(f"{setting.shown}: the ranks are 0 to {world_size - 1}")
    if not _dry_run(settings):
        warnings.append(f"{setting.shown} is ignored without --dry_run or --sim_level.")
        return None
    return rank
