"""The launch plan: what each rank of an attempt runs, with which environment, into which files.

Pure: the same plan is started by the supervisor and printed by a dry run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from agent.spec.job_spec import CopyMode, JobSpec, ProgramKind, ProtectMode, Std, UsageError
from agent.workers.order_batches import order_bytes
from worker_hooks.contract.env import JobEnv, WorkerEnv, listed_devices, visible_devices
from worker_hooks.contract.layout import RunLayout
from worker_hooks.contract.protocol import WorkerOrder
from worker_hooks.contract.wire import PACKET_BYTES

_RUN_PATH = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)

ORDER_BYTES = PACKET_BYTES - 1000  # the rest of a message with one order is short


class Binding(NamedTuple):
    """CPUs of one rank; empty: any."""

    cpus: tuple[int, ...] = ()


class Streams(NamedTuple):
    """Paths a rank's streams are appended to; empty: msrun's own stream."""

    stdout: str
    stderr: str


def run_layout(spec: JobSpec, records_folder: Path) -> RunLayout:
    """Every path of the run: under ``--log-dir``, else under its record."""
    folder = spec.logs.log_dir or records_folder / spec.record_id
    return RunLayout(
        folder=folder.absolute(),
        record_id=spec.record_id,
        run_id=spec.run_id,
        stem=spec.logs.worker_log_name,
        torchrun_tree=spec.logs.torchrun_tree,
        node=spec.node_rank if spec.logs.log_dir else 0,
    )


def job_env(spec: JobSpec, port: int, hooks: str = "", interface: str = "") -> JobEnv:
    """The environment that all workers share.

    ``interface``: at which other nodes are reached; empty: there are none.
    """
    return JobEnv(
        run_id=spec.run_id,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        group_rank=spec.group_rank,
        group_world_size=spec.group_world_size,
        role=spec.role,
        master_addr=spec.master_addr,
        master_port=port,
        max_restarts=spec.max_restarts,
        signals=spec.signals,
        rank_table_file=spec.rank_table_file,
        hooks="" if spec.protect is ProtectMode.OFF else hooks,
        audit=spec.dump.audit,
        is_strict=spec.dump.is_strict,
        job_id=spec.job_id,
        interface=interface,
        shadows=spec.shadows,
        keeps_memory=_keeps_memory(spec),
    )


def _keeps_memory(spec: JobSpec) -> str:
    """Whether the memory of killed ranks is read, as a rank is told."""
    mode, dump = spec.dump.copies, spec.dump
    if spec.nnodes > 1 or mode not in {CopyMode.AUTO, CopyMode.LIVE}:
        return ""
    return mode.value if mode is CopyMode.LIVE or dump.after_failure else ""


def command(spec: JobSpec, local_rank: int, *, resumes: bool = False) -> tuple[str, ...]:
    """A rank's command line, with ``${local_rank}`` filled in as torchrun does.

    ``resumes``: it resumes from a checkpoint, and one argument says so if the script asks for it.
    """
    program = spec.program
    values = {"local_rank": str(local_rank)}
    name, *args = (Template(word).safe_substitute(values) for word in (program.name, *program.args))
    if resumes and spec.dump.recover_arg and spec.dump.recover_arg not in args:
        args.append(spec.dump.recover_arg)
    match program.kind:
        case ProgramKind.SCRIPT:
            return (program.interpreter, "-u", name, *args)
        case ProgramKind.MODULE:
            return (program.interpreter, "-u", "-m", name, *args)
        case ProgramKind.RUN_PATH:
            return (program.interpreter, "-u", "-c", _RUN_PATH, name, *args)
        case ProgramKind.PROGRAM:
            return (name, *args)


def streams(spec: JobSpec, layout: RunLayout, attempt: int, local_rank: int) -> Streams:
    """Where a rank's output goes: torchrun's tree for streams of -r/-t, else the worker log."""
    if spec.logs.disabled:
        return Streams("", "")
    rank = spec.first_rank + local_rank
    plain = str(layout.worker_log(rank))
    filed = spec.logs.redirects.get(local_rank, Std.NONE) | spec.logs.tee.get(local_rank, Std.NONE)
    return Streams(
        str(layout.stream(attempt, local_rank, "stdout")) if filed & Std.OUT else plain,
        str(layout.stream(attempt, local_rank, "stderr")) if filed & Std.ERR else plain,
    )


def plan_ranks(
    spec: JobSpec,
    layout: RunLayout,
    attempt: int,
    inherited: Mapping[str, str],
    bindings: Sequence[Binding],
    *,
    resumes: bool = False,
    devices: tuple[str, ...] = (),
) -> tuple[WorkerOrder, ...]:
    """The orders of one attempt, by local rank.

    Args:
        bindings: CPUs of each local rank; empty: none are bound.
        resumes: it resumes from a checkpoint.
        devices: what its ranks see, if devices are planned; empty: as at the job's start.

    Raises:
        UsageError: ``--virtual-local-rank`` with too few visible devices.
    """
    devices = devices or spec.devices.visible
    only = _only(spec, inherited, devices)
    if devices == listed_devices(inherited):
        devices = ()  # as they are inherited
    orders = []
    for local_rank in range(spec.nproc):
        error_file = "" if spec.logs.disabled else str(layout.error_file(attempt, local_rank))
        rank = spec.first_rank + local_rank
        env = WorkerEnv(
            rank=rank,
            local_rank=spec.local_first + local_rank,
            restart_count=attempt,
            error_file=error_file,
            visible_device=None if only is None else only[spec.local_first + local_rank],
            devices=devices,
        )
        out = streams(spec, layout, attempt, local_rank)
        binding = bindings[local_rank] if bindings else Binding()
        orders.append(
            WorkerOrder(
                rank=rank,
                argv=command(spec, spec.local_first + local_rank, resumes=resumes),
                environ=env.environ(),
                stdout=out.stdout,
                stderr=out.stderr,
                cpus=binding.cpus,
            )
        )
    return tuple(orders)


def check_orders(orders: Sequence[WorkerOrder]) -> None:
    """Refuse what does not fit a message to the forkserver.

    Raises:
        UsageError: one order alone is too large.
    """
    for order in orders:
        size = order_bytes(order)
        if size > ORDER_BYTES:
            raise UsageError(
                f"the command line of rank {order.rank} is too long ({size} bytes as JSON, at most "
                f"{ORDER_BYTES}): pass long arguments in a file"
            )


def _only(
    spec: JobSpec, inherited: Mapping[str, str], devices: tuple[str, ...]
) -> tuple[str, ...] | None:
    """By local rank: the only device that it sees; ``None``: it sees all."""
    if not spec.virtual_local_rank:
        return None
    if devices:
        return devices
    try:
        return visible_devices(spec.local_world_size, inherited)
    except ValueError as error:
        raise UsageError(str(error)) from error
