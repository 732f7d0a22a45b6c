"""Puts a run together, runs it to its end, reports how it ended, and takes it apart again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.controller.protection import Level, Protection
from agent.controller.states import JobState
from agent.launch.prepare import Prepared, StartedForkserver
from agent.notify.notifier import Notifier
from agent.spec.console import Console
from agent.spec.run_facts import RunFacts
from agent.spec.spent_budget import SpentBudget
from agent.supervisor.run_parts import RunParts, make_parts, report, take_apart
from agent.supervisor.status import StatusFile
from agent.text.tone import Tone
from agent.text.wording import duration
from agent.workers.worker import Worker

if TYPE_CHECKING:
    from agent.failure.evidence import Evidence
    from agent.launch.meeting import Continuation, Met
    from agent.supervisor.all_nodes import AllNodes
    from agent.supervisor.hooks_bridge import HooksBridge
    from agent.supervisor.job_controller import JobController
    from agent.supervisor.supervisor import Supervisor


class RunResult(NamedTuple):
    """How a run has ended, for who started it."""

    exit_code: int
    next: Continuation | None = None  # the job goes on as another one
    is_stopped: bool = False  # because of a request; known on the controller's node
    has_left: bool = False  # the job goes on without this node, which was the controller's


def run(
    prepared: Prepared,
    ignited: StartedForkserver,
    environ: Mapping[str, str],
    console: Console,
    met: Met | None = None,
) -> RunResult:
    """Run a job whose forkserver is at work to its end.

    Args:
        met: the other nodes; ``None``: there are none.
    """
    if met is not None and prepared.spec.is_controlled:
        from agent.supervisor.run_controlled import run_controlled

        return RunResult(*run_controlled(prepared, ignited, environ, console, met))
    spec = prepared.spec
    parts = make_parts(prepared, ignited, environ, console)
    facts, journal = parts.facts, parts.journal
    _say_unprotected(facts, console)
    hooks = parts.bridge(spec, ignited.hooks_listener, console)
    notifier = Notifier(facts, console.say)
    nodes: AllNodes | None = None

    published = StatusFile(facts, journal)

    def changed(job: Job, workers: tuple[Worker, ...] | None, account: Account) -> None:
        if workers is None:
            published.replace_state(job, account)
            return
        notifier.changed(job, workers, account)
        content = published.replace(job, workers, account)
        if nodes is not None:
            nodes.show(content)

    def evidence() -> tuple[Evidence, ...]:
        return () if nodes is None else nodes.evidence()

    supervisor = parts.supervisor(hooks, console.say, lambda: notifier.pids)
    controller = parts.controller(spec, notifier, console, changed, evidence)
    if met is not None:
        nodes = _with_others(met, parts, supervisor, hooks, controller, console)
    controller.attach(supervisor.loop, nodes or supervisor)
    supervisor.run(controller, nodes)
    parts.finish_output(console.say)
    ending = controller.ending
    goes_on = nodes is not None and nodes.goes_on_with > 0
    code, farewell = ending.exit_code, "" if nodes is None else nodes.farewell
    beside = _beside_others(nodes, parts, ignited, environ, console, controller)
    if goes_on or beside:
        console.say(_why_it_goes_on(ending.reason, beside))
    else:
        report(ending, prepared, parts, environ, console)
    notifier.close()
    if farewell:
        code = 0
        console.say(farewell)
    journal.log(f"exit {code}: {ending.reason}")
    journal.close()
    take_apart(prepared, ignited)
    if farewell:
        return RunResult(code, has_left=True)
    following = beside or _following(nodes, parts, ignited, environ, console, controller.spent)
    return RunResult(ending.exit_code, following, is_stopped=ending.state is JobState.STOPPED)


def _with_others(
    met: Met,
    parts: RunParts,
    supervisor: Supervisor,
    hooks: HooksBridge,
    controller: JobController,
    console: Console,
) -> AllNodes:
    """All nodes, of which this one is node 0."""
    from agent.nodes.link import NodeLink
    from agent.supervisor.all_nodes import AllNodes
    from agent.supervisor.remote_node import RemoteNode

    reader = parts.log_reader(supervisor)
    others = [
        RemoteNode(met.roster.nodes[rank], met.roster.ranks(rank), NodeLink(line), hooks)
        for rank, line in sorted(met.lines.items())
    ]
    nodes = AllNodes(supervisor, others, hooks, controller, met, console.say, reader=reader)
    parts.kept.tell = nodes.know_checkpoint
    nodes.attach(supervisor.loop)
    return nodes


def import_as_spare() -> None:
    """Import what a node takes that gets a lost one's place: who waits has the time for it.

    All ranks of the job wait for those of that node, and the machine is busy then.
    """
    import encodings.idna  # noqa: F401  for names of hosts

    import psutil  # noqa: F401

    import agent.launch.succession
    import agent.supervisor.run_controlled  # noqa: F401


def _following(
    nodes: AllNodes | None,
    parts: RunParts,
    ignited: StartedForkserver,
    environ: Mapping[str, str],
    console: Console,
    spent: SpentBudget,
) -> Continuation | None:
    """What this node, node 0, takes part in next; ``None``: in nothing, as far as it finds."""
    if nodes is None or not (expected := nodes.goes_on_with):
        return None
    from agent.supervisor.run_controlled import NextJob

    following = NextJob(nodes.met, environ, console, parts.starter, ignited, lambda: spent)
    following.follow(nodes.nodes, stay=nodes.staying)
    found = following.lost(parts, 0, 0.0)
    if found is None:
        following.call_off()
        return None
    return found._replace(expected=expected, past=parts.kept, held=nodes.going_on.held)


def _beside_others(
    nodes: AllNodes | None,
    parts: RunParts,
    ignited: StartedForkserver,
    environ: Mapping[str, str],
    console: Console,
    controller: JobController,
) -> Continuation | None:
    """What node 0 takes part in next if others may go on without it; ``None``: they do not."""
    if nodes is None or not nodes.going_on.gives_way(controller.ending):
        return None
    from agent.supervisor.run_controlled import NextJob

    following = NextJob(nodes.met, environ, console, parts.starter, ignited)
    found = following.beside(nodes.nodes, nodes.rank)
    return found and found._replace(past=parts.kept, kept=controller.ending.saved or "")


def _why_it_goes_on(reason: str, beside: Continuation | None) -> str:
    """``beside``: as of :func:`_beside_others`."""
    if beside is None:
        return reason
    wait = duration(beside.job.replace.node_wait_s)
    return f"{reason}. It looks for the others, {wait} at most, and waits for a place in their job"


def _say_unprotected(facts: RunFacts, console: Console) -> None:
    if facts.unprotected:
        console.tell(str(Protection(Level.NOT_PROTECTED, facts.unprotected)), Tone.BAD)
