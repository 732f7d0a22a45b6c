"""Runs the ranks of a node whose controller is on another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.failure.evidence_json import as_json
from agent.launch.meeting import Met
from agent.launch.prepare import Prepared, StartedForkserver
from agent.nodes.link import NodeLink
from agent.spec.console import Console
from agent.supervisor.hooks_relay import HooksRelay
from agent.supervisor.remote_controller import FAILED_EXIT, RemoteController
from agent.supervisor.run_parts import make_parts, take_apart
from agent.text.wording import ranged
from agent.workers.worker import Worker


def run_controlled(
    prepared: Prepared,
    ignited: StartedForkserver,
    environ: Mapping[str, str],
    console: Console,
    met: Met,
) -> int:
    """Run the ranks of this node until the controller's node says that the job is over.

    Returns:
        The exit code, the same on every node.
    """
    spec, layout = prepared.spec, prepared.layout
    parts = make_parts(prepared, ignited, environ, console)
    host = met.lines[0].connection.getpeername()[0]
    link = NodeLink(met.lines[0])
    hooks = HooksRelay(spec, ignited.hooks_listener, parts.journal, parts.kept, link.send)

    def evidence(workers: Sequence[Worker]) -> list[dict[str, object]]:
        return [as_json(each) for each in parts.post_mortem().evidence(workers)]

    def show_status(status: dict[str, object]) -> None:
        own = {"record_id": spec.record_id, "host": parts.facts.host}
        parts.journal.replace(layout.status, status | own)

    controller = RemoteController(
        link,
        hooks,
        evidence=evidence,
        show_status=show_status,
        say=console.say,
        grace_s=spec.timeouts.grace_s,
        host=host,
        security=met.security,
    )
    supervisor = parts.supervisor(hooks, console.say, frozenset)
    head = met.roster.nodes[0]
    here = ranged(spec.ranks_here)
    place = ", in the place of a lost one" if prepared.is_late else ""
    console.say(
        f"this is node {spec.node_rank} of {spec.nnodes}{place}, with {here} of {spec.world_size}; "
        f"the job is controlled and reported by node 0 ({head.host})"
    )
    controller.attach(supervisor.loop, supervisor)
    if prepared.is_late:
        supervisor.stand_in()
    supervisor.run(controller)
    controller.close()
    parts.finish_output(console.say)
    ending = controller.ending
    code = FAILED_EXIT if ending is None else ending.exit_code
    reason = (
        "the controller's node did not say how the job ended" if ending is None else ending.reason
    )
    if code:
        console.say(f"the job has failed, see the report of node 0 ({head.host}): {reason}")
    parts.journal.log(f"exit {code}: {reason}")
    parts.journal.close()
    take_apart(prepared, ignited)
    return code
