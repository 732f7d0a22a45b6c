"""``--dry-run``: the launch plan as text that a shell can run; nothing is started, made or bound.

It is the plan that the supervisor uses (``agent.launch.rank_plan``), not a copy of its logic.
Comment lines are for people; the environment and each rank's command line can be pasted.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.controller.protection import Level, Protection
from agent.launch import rank_plan
from agent.launch.prepare import bindings
from agent.launch.rank_plan import Binding
from agent.launch.unprotected import unprotected
from agent.launch.warm_imports import Choice, choose
from agent.spec.job_spec import JobSpec, UsageError
from agent.text.ranges import format_ranges
from msrun.terminal.stdout import ReaderLeftError, put
from worker_hooks.contract.layout import runs_folder
from worker_hooks.contract.protocol import WorkerOrder

if TYPE_CHECKING:
    from msrun.job.request import Request

FREE_PORT = "a free port"
PORT_NAMES = ("MASTER_PORT", "MS_SCHED_PORT")
CONSOLE = "the console"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that a launch would do."""

    spec: JobSpec
    folder: Path
    choice: Choice
    environ: Mapping[str, str]  # of all ranks, in addition to msrun's own
    orders: tuple[WorkerOrder, ...]


def show(request: Request, environ: Mapping[str, str]) -> int:
    """Print the plan of a request; the exit code.

    Raises:
        UsageError: the job has no rank ``--sim-rank-id``, or the binding does not fit it.
    """
    bound = bindings(request.job, environ)
    plan = make_plan(request.job, environ, bound, _records_folder(environ))
    try:
        put("\n".join(lines(plan, request.sim_rank_id)) + "\n")
    except ReaderLeftError:
        return 0
    return 0


def make_plan(
    spec: JobSpec, environ: Mapping[str, str], bound: Sequence[Binding], records_folder: Path
) -> LaunchPlan:
    """The plan of a job's first attempt.

    Args:
        bound: CPUs of each local rank; empty: none are bound.
        records_folder: where the run's record would be.

    Raises:
        UsageError: fewer visible devices than ``--virtual-local-rank`` needs, or a command line
            that is too long.
    """
    layout = rank_plan.run_layout(spec, records_folder)
    orders = rank_plan.plan_ranks(spec, layout, 0, environ, bound)
    rank_plan.check_orders(orders)
    shared = rank_plan.job_env(spec, spec.master_port or 0).environ(environ, spec.record_id)
    if spec.cluster is not None or not spec.master_port:
        shared.update(dict.fromkeys(PORT_NAMES, FREE_PORT))
    choice = choose(spec, rank_plan.command(spec, 0), environ)
    return LaunchPlan(spec, layout.folder, choice, environ=shared, orders=orders)


def lines(plan: LaunchPlan, rank: int | None) -> Iterator[str]:
    """The plan as text; with ``rank`` only that rank's part of it.

    Raises:
        UsageError: the plan has no such rank.
    """
    chosen = [order for order in plan.orders if rank in {None, order.rank}]
    if rank is not None and not plan.orders:
        raise UsageError(f"--sim-rank-id={rank}: no rank runs here")
    if not chosen and plan.orders:
        known = f"{plan.orders[0].rank} to {plan.orders[-1].rank}"
        raise UsageError(f"--sim-rank-id={rank} is out of range: the ranks are {known}")
    yield "# dry run: nothing is started; every run gets new ids"
    yield from (f"# {name:<9} {_one_line(value)}" for name, value in facts(plan))
    yield ""
    yield "# environment of every rank"
    for name in sorted(plan.environ):
        is_open = plan.environ[name] == FREE_PORT
        yield f"# {name}: {FREE_PORT}" if is_open else f"export {_assigned(name, plan.environ)}"
    for order in chosen:
        yield ""
        yield from rank_lines(order)


def facts(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """The job as text, by name."""
    spec = plan.spec
    port = f"port {spec.master_port}" if spec.master_port else FREE_PORT
    yield "world", f"{spec.world_size} ranks on {_nodes(spec)}, {spec.nproc} here"
    if spec.cluster is None:
        yield "master", f"{spec.master_addr}, {port}"
    else:
        yield "nodes", f"meet at {spec.master_addr}, {port}; the workers at {FREE_PORT} there"
    yield "run id", spec.run_id
    yield "start", f"{'warm' if plan.choice.warmth else 'cold'}: {plan.choice.reason}"
    yield "logs", "none (/dev/null)" if spec.logs.disabled else str(plan.folder)
    yield "failure", _on_failure(spec)
    if why := unprotected(spec):
        yield "safety", str(Protection(Level.NOT_PROTECTED, why))
    yield "restarts", f"at most {spec.max_restarts}"
    yield "resumes", f"with {spec.dump.recover_arg or 'no argument'} appended"
    yield "timeouts", _timeouts(spec)
    yield "signals", ", ".join(spec.signals)
    yield "binding", _binding(spec)


def _nodes(spec: JobSpec) -> str:
    if spec.cluster is None:
        return "1 node"
    if (by_hand := spec.cluster.by_hand) is not None:
        this = by_hand.name or ("a worker" if by_hand.has_worker else "the scheduler")
        return f"as many msruns, started one by one; this is {this}"
    known = spec.cluster.node_rank >= 0
    this = f"this is {spec.node_rank}" if known else "numbered by their addresses when all are here"
    least = f"{spec.cluster.least} to " if spec.cluster.least else ""
    return f"{least}{spec.nnodes} nodes, {this}"


def _on_failure(spec: JobSpec) -> str:
    """The rungs of the ladder."""
    replace = spec.replace
    whom = "ranks or nodes" if spec.nnodes > 1 else "ranks"
    within = f"replace at most {replace.max_replacements} {whom} within {replace.period_s:g} s"
    rungs = (within, replace.is_on), ("save", spec.dump.after_failure and spec.dump.ttp)
    taken = [words for words, is_on in (*rungs, ("restart", spec.max_restarts > 0)) if is_on]
    return ", else ".join(taken) or "stop"


def _timeouts(spec: JobSpec) -> str:
    waits = (
        ("start", spec.timeouts.start_s),
        ("grace", spec.timeouts.grace_s),
        ("kill", spec.timeouts.kill_s),
    )
    return ", ".join(f"{name} {'unbounded' if s is None else f'{s:g} s'}" for name, s in waits)


def _binding(spec: JobSpec) -> str:
    if not spec.bind.wanted:
        return "none"
    if spec.bind.cores:
        return "as listed by --bind-core"
    return f"by NUMA ({spec.bind.numa})" if spec.bind.numa else "an even share of the cores"


def rank_lines(order: WorkerOrder) -> Iterator[str]:
    """One rank: where its output goes, what it is bound to, its environment and command line."""
    yield f"# rank {order.rank}"
    yield f"#   stdout  {_one_line(order.stdout or CONSOLE)}"
    yield f"#   stderr  {_one_line(order.stderr or CONSOLE)}"
    if order.cpus:
        yield f"#   cpus    {format_ranges(order.cpus)}"
    yield "env \\"
    yield from (f"  {_assigned(name, order.environ)} \\" for name in sorted(order.environ))
    yield f"  {shlex.join(order.argv)}"


def _assigned(name: str, values: Mapping[str, str]) -> str:
    return f"{name}={shlex.quote(values[name])}"


def _one_line(text: str) -> str:
    """Text for a comment: nothing in it ends the comment or controls the terminal."""
    from agent.text.sanitize import sanitized

    return sanitized(text).replace("\n", "\\n")


def _records_folder(environ: Mapping[str, str]) -> Path:
    """Where a record would be written; nothing is created to find out."""
    candidates = list(runs_folder(environ, os.getuid()))
    return next((folder for folder in candidates if _may_make(folder)), candidates[-1])


def _may_make(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return os.path.isdir(existing) and os.access(existing, os.W_OK)
