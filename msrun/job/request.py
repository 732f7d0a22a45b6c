"""From a command line and an environment to a checked `agent.spec.job_spec.JobSpec`."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from agent.records.run_record import new_record_id
from agent.spec.job_spec import ClusterSpec, JobSpec, ProtectMode, StartMethod, UsageError
from msrun import __version__
from msrun.job.resume_point import ResumeOrigin
from msrun.options import dialects
from msrun.options.argv import CommandLine, command_words, scan
from msrun.options.devices import plan_devices
from msrun.options.help import USAGE, help_text, short_help
from msrun.options.logs import logs
from msrun.options.notify import notify
from msrun.options.program import build_program
from msrun.options.recovery import graceful_signals, on_failure, recovery_options
from msrun.options.settings import Setting, Settings, from_environ, is_truth, truth
from msrun.options.table import BY_DEST
from worker_hooks.contract import env

if TYPE_CHECKING:
    from agent.records.run_record import Record
    from msrun.options.engines import Engine

_OF_ENGINES = frozenset(
    (
        "SLURM_STEP_ID",
        "OMPI_COMM_WORLD_SIZE",
        "JOB_COMPLETION_INDEX",
        "KUBERNETES_SERVICE_HOST",
        "MS_ROLE",
    )
)
"""Without any of these no engine has started msrun, and nobody has MindSpore's way."""

_UNFORWARDABLE = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD"})

DETACHED = "the run was detached, and so is this one"
SHOWN_VARIABLES = 10  # names in one sentence


class Request(NamedTuple):
    """What the user wants: a job, and what to do with it."""

    job: JobSpec
    join: bool
    dry_run: bool
    sim_rank_id: int | None  # a dry run of this rank only
    warnings: tuple[str, ...]  # sentences to print before anything starts
    verbose: bool = False
    origin: ResumeOrigin | None = None  # None: the job starts from the beginning
    environ: Mapping[str, str] = {}  # of the resumed run: to be set before anything starts
    resumed: Record | None = None  # that run, if it is known
    report: Path | None = None  # the file to write a report into at the end
    engine: Engine | None = None  # what has started msrun, beside others


class _Layers(NamedTuple):
    """The settings of all layers, merged."""

    settings: Settings
    script: str | None
    script_args: tuple[str, ...]
    engine: Engine | None = None  # what has started msrun, and filled settings


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Turn the words after ``msrun`` and the environment into a request.

    With ``--resume`` and no script the working folder becomes that of the resumed run.

    Raises:
        UsageError: one sentence on what is wrong and where it comes from.
        SystemExit: 0, after ``--help``, ``--help-all`` or ``--version`` was printed.
    """
    line = scan(argv, lambda words: _names_origin(words, environ))
    if line.print_only is not None:
        _print(line.print_only)
    layers = _layers(line, environ)
    name = _resumed_name(layers.settings)
    if is_requeued := name is None and _is_requeued(layers):
        name = _requeued_run(layers, environ)
    if name is None:
        request = _request(layers, environ, tuple(argv))
        return _begun_anew(request) if is_requeued else request
    from msrun.job.resume import resumed_command

    resumed = resumed_command(name, line, layers.script, environ, is_requeued=is_requeued)
    environ = {**environ, **resumed.environ}
    request = _request(
        _layers(resumed.line, environ),
        environ,
        command_words(resumed.line),
        resumed.failed_devices,
    )
    job = request.job._replace(is_away=resumed.is_away)
    warnings = (*request.warnings, *_of_failed_devices(job, resumed.failed_devices, environ))
    if resumed.lacking:
        options_first = sorted(resumed.lacking, key=lambda name: not name.startswith("PET_"))
        names = ", ".join(options_first[:SHOWN_VARIABLES])
        more = " and others" if len(resumed.lacking) > SHOWN_VARIABLES else ""
        said = f"the run was started with {names}{more}, which are not set now: "
        warnings += (said + "secrets and a script's own variables are recorded by name only",)
    if resumed.other_args:
        said = "the script gets other arguments than in the run that is resumed, which had: "
        warnings += (said + resumed.other_args,)
    if not request.join and "join" not in line.given:
        warnings += (f"{DETACHED}: --join=True keeps it in the foreground",)
    return request._replace(
        job=job,
        origin=resumed.origin,
        environ=resumed.environ,
        resumed=resumed.record,
        warnings=warnings,
    )


def _is_requeued(layers: _Layers) -> bool:
    """Whether the engine starts the job once more, and this node has to find where it goes on."""
    found, settings = layers.engine, layers.settings
    asked = {"resume", "is_recover", "spare_node"} & settings.given.keys()
    if found is None or not found.is_requeued or asked or layers.script is None:
        return False
    if found.nnodes == 1 or "node_rank" in settings.given:
        return (settings.integer("node_rank") or 0) == 0
    from agent.workers.master_port import is_of_this_host

    return is_of_this_host(dialects.master(settings, []).addr)


def _requeued_run(layers: _Layers, environ: Mapping[str, str]) -> str | None:
    """The newest run of this script in the job that is started again; ``None``: none is known."""
    from msrun.job.resume import newest_of

    assert layers.engine is not None
    assert layers.script is not None
    return newest_of(layers.engine.job, layers.script, layers.script_args, environ)


def _begun_anew(request: Request) -> Request:
    """With the sentence that nothing is known of the engine's first start of this job."""
    assert request.engine is not None
    said = (
        f"{request.engine.name} was started before, but no run of this script with a checkpoint, "
        "with these arguments and in this folder, is known on this machine: training begins anew"
    )
    return request._replace(warnings=(*request.warnings, said))


def _of_failed_devices(
    job: JobSpec, failed: Sequence[str], environ: Mapping[str, str]
) -> Sequence[str]:
    """What becomes of devices that failed in the resumed run, if they are listed."""
    listed = env.listed_devices(environ)
    there = [device for device in failed if device in listed]
    if not there:
        return ()
    which = f"device {there[0]}" if len(there) == 1 else f"devices {', '.join(there)}"
    if job.devices.is_on:
        again = "used again with --spare-devices=0"
        return (f"{which} failed in the run that is resumed: not used here, {again}",)
    return (f"{which} failed in the run that is resumed, and without --spare-devices used again",)


def _names_origin(following: Sequence[str], environ: Mapping[str, str]) -> bool:
    from msrun.job.resume import names_origin

    return names_origin(following, environ)


def _layers(line: CommandLine, environ: Mapping[str, str]) -> _Layers:
    """Defaults < engine < YAML < environment < flags. A typed script brings its own arguments."""
    typed = from_environ(environ) | dict(line.given)
    given, script, script_args = typed, line.script, line.script_args
    if "config" in typed and typed["config"].text:
        from msrun.options.config_file import read_config

        config = read_config(typed["config"].text)
        given = config.given | typed
        if script is None:
            script, script_args = config.script, config.script_args
    found = None
    if not _OF_ENGINES.isdisjoint(environ):
        from msrun.options.engines import engine

        found = engine(environ, Settings(given))
    if found is not None:
        given = {**found.given, **given}
    return _Layers(Settings(given), script, script_args, found)


def _resumed_name(settings: Settings) -> str | None:
    """The run or folder to resume, empty: the newest; ``None``: start from the beginning."""
    if "resume" in settings.given:
        setting = settings.of("resume")
        if not is_truth(setting):
            return setting.text
        return "" if setting.text == "" or truth(setting) else None
    return "" if settings.boolean("is_recover") else None


def _request(
    layers: _Layers,
    environ: Mapping[str, str],
    argv: tuple[str, ...],
    failed_devices: tuple[str, ...] = (),
) -> Request:
    """The checked request. ``failed_devices``: of the run that is resumed."""
    settings, warnings = layers.settings, list[str]()
    job = _job(layers, environ, warnings)._replace(argv=argv)
    spares = settings.integer("spare_devices") or 0
    job = job._replace(devices=plan_devices(job.ranks_here, spares, environ, failed_devices))
    return Request(
        job=job,
        join=settings.boolean("join"),
        dry_run=_dry_run(settings),
        sim_rank_id=_sim_rank(settings, job.world_size, warnings),
        warnings=tuple(warnings),
        verbose=settings.boolean("verbose"),
        report=_report(settings, job),
        engine=layers.engine,
    )


def _report(settings: Settings, job: JobSpec) -> Path | None:
    """The file for a report at the end, absolute; ``None``: none is wanted."""
    setting = settings.of("report")
    is_off = is_truth(setting) and setting.text != "" and not truth(setting)
    if "report" not in settings.given or is_off:
        return None
    if job.logs.disabled:
        raise UsageError(f"{setting.shown} needs the files that --log-dir=/dev/null does not keep")
    name = f"msrun-report-{job.record_id}.html" if is_truth(setting) else setting.text
    if os.path.isdir(name) or not os.path.isdir(os.path.dirname(os.path.abspath(name))):
        raise UsageError(f"{setting.shown} must name a file in a folder that exists")
    return Path(os.path.abspath(name))


def _print(what: str) -> NoReturn:
    """Print the version or one of the two helps, and exit."""
    texts = {"version": _version, "help": short_help, "help-all": help_text}
    print(texts[what]().rstrip("\n"))
    sys.exit(0)


def _version() -> str:
    """Ours, and those that a report of a fault needs; torch is not imported for it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f"msrun {__version__}, {torch}, Python {platform.python_version()}"


def _job(layers: _Layers, environ: Mapping[str, str], warnings: list[str]) -> JobSpec:
    """The checked job."""
    settings = layers.settings
    if layers.script is None:
        raise UsageError(f"no script was given ({USAGE}); msrun --help shows examples")
    size = dialects.size(settings, environ)
    by_hand = None if layers.engine is None else layers.engine.by_hand
    nproc = 0 if by_hand is not None and not by_hand.has_worker else size.nproc
    master = dialects.master(settings, warnings)
    _check_unused(settings)
    record = new_record_id()
    timeouts, dump = recovery_options(settings, environ)
    replace, dumps, max_restarts = on_failure(settings, environ)
    job = JobSpec(
        program=build_program(settings, layers.script, layers.script_args, environ),
        nproc=nproc,
        cluster=_cluster(layers, size),
        engine_job="" if layers.engine is None else layers.engine.job,
        run_id=_run_id(settings.of("rdzv_id"), record),
        record_id=record,
        role=settings.text("role"),
        master_addr=master.addr,
        master_port=master.port,
        max_restarts=max_restarts,
        start_method=_start_method(settings),
        protect=ProtectMode(settings.text("protect")),
        preload=_preload(settings.of("preload")),
        timeouts=timeouts,
        signals=_signals(settings.of("signals_to_handle"), warnings),
        graceful_signals=graceful_signals(settings.of("graceful_signals")),
        exit_file=_exit_file(settings.of("graceful_exit_file")),
        logs=logs(settings, size, environ, warnings),
        bind=dialects.bind(settings, size.nproc),
        dump=dump._replace(after_failure=dumps),
        replace=replace,
        notify=notify(settings),
        virtual_local_rank=_virtual(settings, nproc, environ),
        rank_table_file=_rank_table(settings.of("rank_table_file")),
        event_log_handler=settings.text("event_log_handler"),
    )
    return _with_nodes(job, settings, warnings)


def _cluster(layers: _Layers, size: dialects.JobSize) -> ClusterSpec | None:
    engine = layers.engine
    found = dialects.cluster(layers.settings, size, None if engine is None else engine.by_hand)
    if found is None or engine is None:
        return found
    return found._replace(
        has_sparse_ranks=engine.has_sparse_ranks and "node_rank" in engine.given,
        place=engine.place,
        token_variable=engine.token_variable,
        own_token=engine.start,
        said=tuple(filter(None, (engine.said,))),
    )


def _protect_on_nodes(wanted: ProtectMode, settings: Settings) -> ProtectMode:
    """What ``--protect`` means on several nodes, which have no shadows."""
    if wanted is ProtectMode.SHADOW:
        shown = settings.of("protect").shown
        raise UsageError(f"{shown} works on one node only: remove it, or the options of nodes")
    return ProtectMode.HOOKS if wanted is ProtectMode.AUTO else wanted


def _with_nodes(job: JobSpec, settings: Settings, warnings: list[str]) -> JobSpec:
    """The job on several nodes, and what it cannot do there yet; ranks are a guess until all came.

    Raises:
        UsageError: it asks for what needs one node.
    """
    found = job.cluster
    if found is None:
        if (settings.integer("node_rank") or 0) > 0:
            warnings.append(f"{settings.of('node_rank').shown} is ignored, there is only one node.")
        if (store := settings.of("controller_store")).text:
            warnings.append(f"{store.shown} is ignored, there is only one node.")
        return job
    job = job._replace(protect=_protect_on_nodes(job.protect, settings))
    if settings.boolean("standalone"):
        raise UsageError(f"{settings.of('standalone').shown} is for one node: leave it out")
    if found.is_spare and not settings.boolean("join"):
        raise UsageError(f"{settings.of('join').shown}: a spare node waits in the foreground")
    wait_s = settings.number("node_wait")
    if settings.integer("spare_devices"):
        raise UsageError("--spare-devices is not supported on several nodes yet: leave it out")
    port = dialects.meeting_port(settings, job.master_port)
    if found.own_token:  # a step may have several jobs at once, at ports of their own
        found = found._replace(own_token=f"{found.own_token}-{port}")
    node_rank = min(max(found.node_rank, 0), found.nnodes - 1)
    nodes = [job.nproc] * found.nnodes
    if found.by_hand is not None:
        nodes, node_rank = [0, *[1] * found.nnodes], int(found.by_hand.has_worker)
    elif found.world is not None:  # then one of the others has what is left
        nodes[0 if node_rank else -1] -= sum(nodes) - found.world
    return job._replace(
        cluster=found,
        nodes=tuple(nodes),
        node_rank=node_rank,
        master_port=port,
        replace=job.replace._replace(
            node_wait_s=wait_s, join_s=max(job.replace.join_s, wait_s + job.replace.rejoin_s)
        ),
    )


def _check_unused(settings: Settings) -> None:
    """Check options that have no effect, too: they may contain a typo."""
    settings.text("logs_specs")
    if not settings.number("monitor_interval") > 0:
        raise UsageError(f"{settings.of('monitor_interval').shown} must be above 0")


def _run_id(setting: Setting, record: str) -> str:
    """TORCHELASTIC_RUN_ID, which is also the name of a folder."""
    if setting.text in {"", BY_DEST["rdzv_id"].default}:
        return record
    if "/" in setting.text or setting.text.startswith("."):
        raise UsageError(f"{setting.shown} names a folder: use no slash and no leading dot")
    return setting.text


def _start_method(settings: Settings) -> StartMethod:
    """How workers start; fork and forkserver mean auto, which forks where that is safe."""
    chosen = settings.text("start_method")
    return StartMethod.SPAWN if chosen == "spawn" else StartMethod.AUTO


def _preload(setting: Setting) -> tuple[str, ...]:
    """Names of modules."""
    names = tuple(name.strip() for name in setting.text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"{setting.shown}: {name!r} is not the name of a module")
    return names


def _signals(setting: Setting, warnings: list[str]) -> tuple[str, ...]:
    """Names of signals; like torchrun, warn of those that cannot be handled and drop them."""
    names = dict.fromkeys(name.strip() for name in setting.text.split(",") if name.strip())
    kept = []
    for name in names:
        if name in _UNFORWARDABLE or name not in signal.Signals.__members__:
            warnings.append(f"{setting.shown}: {name} cannot be handled and is left out.")
        else:
            kept.append(name)
    if names and not kept:
        raise UsageError(f"{setting.shown}: no signal is left to handle; SIGTERM and SIGINT can be")
    return tuple(kept)


def _exit_file(setting: Setting) -> Path | None:
    """The path of a file that need not exist yet, absolute."""
    if setting.text and os.path.isdir(setting.text):
        raise UsageError(f"{setting.shown} is a folder: name a file")
    return Path(os.path.abspath(setting.text)) if setting.text else None


def _virtual(settings: Settings, nproc: int, environ: Mapping[str, str]) -> bool:
    """Whether each worker sees only one device; there must be enough of them."""
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
        raise UsageError(f"{setting.shown} does not exist")
    return setting.text or None


def _dry_run(settings: Settings) -> bool:
    """Whether it is a dry run, in either dialect."""
    level = settings.integer("sim_level")
    return settings.boolean("dry_run") or (level is not None and level >= 0)


def _sim_rank(settings: Settings, world_size: int, warnings: list[str]) -> int | None:
    """The only rank that a dry run shows; ``None``: all."""
    setting, rank = settings.of("sim_rank_id"), settings.integer("sim_rank_id")
    if rank is None or rank < 0:
        return None
    if rank >= world_size:
        raise UsageError(f"{setting.shown}: the ranks are 0 to {world_size - 1}")
    if not _dry_run(settings):
        warnings.append(f"{setting.shown} is ignored without --dry-run or --sim-level.")
        return None
    return rank
