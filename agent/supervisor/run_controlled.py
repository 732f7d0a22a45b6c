"""Runs the ranks of a node whose controller is on another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from agent.arrivals.places import SURE_S
from agent.controller.states import JobState
from agent.dump.node_memory import MemoryGiver
from agent.failure.evidence_json import as_json
from agent.launch.doors import Address
from agent.launch.meeting import Continuation, Met, rejoin
from agent.launch.prepare import Prepared, StartedForkserver, hand_on, start_early
from agent.launch.scheduler_watch import AloneWith, SchedulerWatch
from agent.launch.succession import next_job, saved_step, why_over
from agent.nodes.join import JoinedNode
from agent.nodes.line import Loss, LossKind
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import NodeFacts
from agent.spec.console import Console
from agent.spec.job_spec import JobSpec, UsageError
from agent.supervisor.hooks_relay import HooksRelay
from agent.supervisor.remote_controller import FAILED_EXIT, RemoteController
from agent.supervisor.run_parts import RunParts, make_parts, take_apart
from agent.text.wording import ranged, worker_named
from agent.workers.master_port import is_loopback
from agent.workers.processes import signal_group_or_process
from agent.workers.starter import Starter
from agent.workers.worker import Worker


def run_controlled(
    prepared: Prepared,
    ignited: StartedForkserver,
    environ: Mapping[str, str],
    console: Console,
    met: Met,
) -> tuple[int, Continuation | None]:
    """Run the ranks of this node until the controller's node says that the job is over.

    Returns:
        The exit code, the same on every node; and what follows if the controller's node is lost.
    """
    spec = prepared.spec
    parts = make_parts(prepared, ignited, environ, console)
    nexts = NextJob(met, environ, console, parts.starter, ignited)
    host = met.lines[0].connection.getpeername()[0]
    link = NodeLink(met.lines[0])
    giver = MemoryGiver(host, met.security)
    hooks = HooksRelay(spec, ignited.hooks_listener, parts.journal, parts.kept, link.send, giver)

    def evidence(workers: Sequence[Worker]) -> list[dict[str, object]]:
        return [as_json(each) for each in parts.post_mortem().evidence(workers)]

    shown = _ShownStatus(parts)
    head = met.roster.nodes[0]
    dialling = None if head.nproc else rejoin(met, environ, console.say)

    def look(
        attempt: int, found: Callable[[JoinedNode], object], too_late: Callable[[str, bool], object]
    ) -> SchedulerWatch:
        assert dialling is not None
        nodes = controller.nodes or met.roster.nodes
        is_near = is_loopback(host)  # else such an address means another machine
        others = (
            each
            for each in nodes
            if each.door
            and each.rank not in {0, spec.node_rank}
            and (is_near or not is_loopback(each.address))
        )
        doors = {each.rank: Address(each.address, each.door) for each in others}
        at = AloneWith(dialling(attempt, hooks.resume), doors, hooks.notes_folders())
        return SchedulerWatch(at, supervisor.loop, found, too_late, console.say)

    controller = RemoteController(
        link,
        hooks,
        evidence=evidence,
        show_status=shown.show,
        say=console.say,
        grace_s=spec.timeouts.grace_s,
        host=host,
        lost=lambda loss, reached, saves: nexts.begin(
            loss, reached, saves, controller.nodes, controller.view.attempt, controller.term
        ),
        look=None if dialling is None else look,
        security=met.security,
        keep=spec.dump.keep,
    )
    supervisor = parts.supervisor(hooks, console.say, nexts.pids)
    here = ranged(spec.ranks_here)
    place = ", in the place of a lost one" if prepared.is_late else ""
    name = met.roster.nodes[spec.node_rank].name
    own = worker_named(name) or f"node {spec.node_rank} of {spec.nnodes}"
    node_0 = f"node 0 ({head.host})" if head.nproc else f"the scheduler ({head.host})"
    console.say(
        f"this is {own}{place}, with {here} of {spec.world_size}; "
        f"the job is controlled and reported by {node_0}"
    )
    controller.attach(supervisor.loop, supervisor)
    if prepared.is_late:
        supervisor.stand_in()
    supervisor.run(controller)
    controller.close()
    parts.finish_output(console.say)
    ending = controller.ending
    newest = hooks.newest_step()
    lost = nexts.behind(controller, parts, newest)
    code = FAILED_EXIT if ending is None else ending.exit_code
    reason = (
        "the controller's node did not say how the job ended" if ending is None else ending.reason
    )
    if code and lost is None:
        console.say(f"the job has failed, see the report of {node_0}: {reason}")
    parts.journal.log(f"exit {code}: {reason}")
    if lost is not None:
        shown.show_meeting(reason)
    parts.journal.close()
    take_apart(prepared, ignited)
    if lost is None:
        nexts.call_off()
        return code, None
    return code, lost._replace(past=parts.kept)


class _ShownStatus:
    """The state of the whole job, for ``msrun status`` on this node."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._shown: dict[str, object] = {}

    def show(self, status: dict[str, object]) -> None:
        """Show what the controller's node says."""
        self._shown, facts = status, self._parts.facts
        own = {"record_id": facts.spec.record_id, "host": facts.host}
        self._parts.journal.replace(facts.layout.status, status | own)

    def show_meeting(self, reason: str) -> None:
        """The run is over for this reason, and the job begins anew once all nodes have met."""
        if self._shown:
            state, why = JobState.STARTING.value, f"{reason}: the nodes meet again"
            meeting = {"state": state, "reason": why, "workers": [], "updated": time.time()}
            self.show(self._shown | meeting)


class NextJob:
    """What follows on this node if node 0 is lost, or the job goes on with another size.

    Its forkserver is that of this run, or is at work while the ranks save the step.
    """

    def __init__(
        self,
        met: Met,
        environ: Mapping[str, str],
        console: Console,
        starter: Starter,
        ignited: StartedForkserver,
    ) -> None:
        self._starter = starter
        self._ignited = ignited
        self._met = met
        self._environ = environ
        self._console = console
        self._nodes = met.roster.nodes
        self._reached = self._attempt = 0
        self._job: JobSpec | None = None
        self._early: StartedForkserver | None = None
        self._is_silent = False
        self._head_lives = False  # it gathers the others
        self._term = ""
        self._begun_s = time.monotonic()

    def begin(
        self,
        loss: Loss,
        reached: int,
        saves: bool,
        nodes: tuple[NodeFacts, ...],
        attempt: int,
        term: str,
    ) -> bool:
        """Node 0 is lost; whether this node may take part in what follows.

        Args:
            loss: of the line to it.
            reached: the newest step that a rank here has committed.
            nodes: that take part in the job; none: those that began it.
            attempt: the newest that is known here.
            term: of the controller's seat, as it is known here.
        """
        spec, self._reached, self._attempt = self._met.prepared.spec, reached, attempt
        self._term = term
        if not (saves or self._has_lost_before):
            return False
        self._nodes = nodes or self._nodes
        self._is_silent = loss.kind is LossKind.SILENCE
        if why := why_over(spec, self._nodes, loss, reached, term):
            self._console.say(f"no node takes the part of node 0: {why}")
            return False
        self._job = next_job(self._met.asked)
        if not self._starter.keep():
            self._start(self._job)
        return True

    def behind(
        self, controller: RemoteController, parts: RunParts, newest: int
    ) -> Continuation | None:
        """What follows on a run that is over; ``None``: nothing.

        Args:
            controller: as this node knew it.
            newest: the newest step that a rank here had committed when it ended.
        """
        if not controller.goes_on:
            return None
        if controller.ending is not None and controller.ending.goes_on:
            self.follow(controller.nodes)
        return self.lost(parts, newest, controller.patience_s)

    def follow(self, nodes: tuple[NodeFacts, ...]) -> None:
        """The job goes on with more or with fewer nodes, which meet at node 0."""
        self._nodes, self._head_lives = nodes or self._nodes, True
        self._job = next_job(self._met.asked)
        self._start(self._job)

    def _start(self, job: JobSpec) -> None:
        with suppress(UsageError):  # no process can be started now: later, perhaps
            self._early = start_early(job, self._environ)

    @property
    def _has_lost_before(self) -> bool:
        """Whether the job goes on from a loss of node 0."""
        cluster = self._met.asked.cluster
        return cluster is not None and bool(cluster.lost_at)

    def pids(self) -> frozenset[int]:
        """Processes that do not end with the ranks."""
        early = () if self._early is None else (self._early.forkserver.pid,)
        return self._starter.spared.union(early)

    def lost(self, parts: RunParts, newest: int, patience_s: float) -> Continuation | None:
        """What is known, now that the ranks have ended; ``None``: the step is not saved.

        Args:
            parts: of the run that is over.
            newest: the newest step that a rank here had committed when it ended.
            patience_s: until ranks elsewhere must have saved it.
        """
        assert self._job is not None
        assert self._job.cluster is not None
        spec, reached = self._met.prepared.spec, max(self._reached, newest)
        saved = saved_step(parts.kept.present, spec, reached, patience_s)
        if saved is None and self._has_lost_before:  # a moment ago: it has just begun anew
            saved = saved_step(parts.kept.present, spec, spec.dump.resume_step)
            if saved is not None and (steps := reached - saved.step) > 0:
                self._console.say(
                    f"{steps} step{'s' if steps > 1 else ''} after step {saved.step} lost"
                )
        if saved is None:
            self._console.say(f"the job does not go on by itself: step {reached} is not saved")
            return None
        is_recent = time.monotonic() < self._begun_s + spec.replace.node_wait_s + SURE_S
        is_haunted = is_recent and self._met.settings.get("is_haunted") is True
        saved = saved._replace(attempt=self._attempt, is_haunted=is_haunted)
        cluster = self._job.cluster
        lost_at = cluster.lost_at if self._head_lives else (*cluster.lost_at, saved.step)
        job = self._job._replace(cluster=cluster._replace(lost_at=lost_at))
        met = self._met
        if (kept := self._starter.kept()) is not None:
            try:
                self._early = hand_on(job, self._ignited, kept)
            except UsageError:
                kept.forget()  # then it ends with this run
        return Continuation(
            job,
            self._nodes,
            saved,
            met.door,
            self._early,
            self._is_silent,
            met.token,
            term=self._term,
        )

    def call_off(self) -> None:
        """Nothing follows."""
        if self._early is not None:
            if (pid := self._early.forkserver.pid) > 0:  # while it imports it would outlive msrun
                signal_group_or_process(pid)
            self._early.forkserver.forget()
            self._early.hooks_listener.close()
        elif (kept := self._starter.kept()) is not None:
            kept.forget()
        if self._met.door is not None:
            self._met.door.close()
