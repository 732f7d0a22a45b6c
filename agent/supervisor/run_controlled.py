"""Runs the ranks of a node whose controller is on another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

from agent.arrivals.living_side import LivingSide
from agent.arrivals.places import SURE_S
from agent.arrivals.successors import HEAD, swapped
from agent.controller.states import JobState
from agent.failure.ending import RunEnding
from agent.failure.evidence_json import as_json
from agent.launch.doors import Address
from agent.launch.meeting import Continuation, Met
from agent.launch.prepare import Prepared, StartedForkserver, hand_on, start_early
from agent.launch.scheduler_watch import AloneWith, SchedulerWatch
from agent.launch.signals import is_asked_late
from agent.launch.succession import next_job, older_step, saved_step, why_over
from agent.nodes.join import JoinedNode
from agent.nodes.line import CALM, MUTE, VERY_CALM, Loss, LossKind
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import Ended, NodeFacts
from agent.rank_logs.node_logs import NodeLogs
from agent.spec.console import Console
from agent.spec.job_spec import JobSpec, UsageError
from agent.spec.spent_budget import SpentBudget
from agent.spread.node_writes import NodeWrites
from agent.supervisor.head import Deputy
from agent.supervisor.hooks_relay import HooksRelay
from agent.supervisor.remote_controller import FAILED_EXIT, RemoteController
from agent.supervisor.run_parts import RunParts, make_parts, report, take_apart
from agent.supervisor.supervisor import Supervisor
from agent.text.wording import ranged, worker_named
from agent.workers.master_port import is_loopback
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
    side = LivingSide(met, environ, console.say)
    nexts = NextJob(met, environ, console, parts.starter, ignited, lambda: side.spent)
    host = met.lines[0].connection.getpeername()[0]
    link = NodeLink(met.lines[0], met.prepared.spec.ranks_here)
    writes = NodeWrites(host, link.send, met.security)
    hooks = HooksRelay(spec, ignited.hooks_listener, parts.journal, parts.kept, link.send, writes)

    def evidence(workers: Sequence[Worker]) -> list[dict[str, object]]:
        return [as_json(each) for each in parts.post_mortem().evidence(workers)]

    shown = _ShownStatus(parts)
    place = int(str(met.settings.get(HEAD, 0)))
    head = met.roster.nodes[place]
    deputy = Deputy(met, side, parts, console, hooks)
    if not head.nproc:
        side.read()

    def look(
        attempt: int, found: Callable[[JoinedNode], object], too_late: Callable[[str, bool], object]
    ) -> SchedulerWatch:
        dial = partial(side.dials(side.living(attempt, hooks.resume)), side.home)
        doors = _doors_of(controller.nodes, spec.node_rank, is_near=is_loopback(host))
        at = AloneWith(dial, doors, hooks.notes_folders())
        return SchedulerWatch(at, supervisor.loop, found, too_late, console.say)

    supervisor = parts.supervisor(hooks, console.say, lambda: nexts.pids() | deputy.pids)
    controller = RemoteController(
        link,
        hooks,
        NodeLogs(parts.log_reader(supervisor)),
        evidence=evidence,
        show_status=shown.show,
        say=console.say,
        grace_s=spec.timeouts.grace_s,
        host=host,
        lost=lambda *about: nexts.begin(controller, *about),
        look=None if head.nproc else look,
        successors=deputy if head.nproc else None,
        nodes=met.roster.nodes,
        head=place,
        node_rank=spec.node_rank,
        security=met.security,
        keep=spec.dump.keep,
        complete=parts.kept.know,
        spent=side.hear,
        patience=lambda: nexts.patience(controller, supervisor),
    )
    node_0 = f"node {place} ({head.host})" if head.nproc else f"the scheduler ({head.host})"
    console.say(_introduced(prepared, met.roster.nodes[spec.node_rank].name, node_0))
    controller.attach(supervisor.loop, supervisor)
    deputy.attach(supervisor)
    if prepared.is_late:
        supervisor.stand_in()
    supervisor.run(controller)
    controller.close()
    parts.finish_output(console.say)
    deputy.close()
    if deputy.ended is not None:
        nexts.call_off()
        return _reported(deputy.ended, prepared, ignited, parts, environ, console, met), None
    ending = controller.ending
    lost = nexts.behind(controller, parts, hooks.newest_step())
    hooks.forget_pages()
    untold = "the controller's node did not say how the job ended"
    code, reason = (FAILED_EXIT, untold) if ending is None else ending[:2]
    if controller.head != place:  # another node has taken its part
        node_0 = f"node {controller.head} ({controller.nodes[controller.head].host})"
    if lost is None:
        _say_ended(ending, code, reason, node_0, console)
    parts.journal.log(f"exit {code}: {reason}")
    if lost is not None:
        shown.show_meeting(reason)
    parts.journal.close()
    take_apart(prepared, ignited)
    if lost is None:
        nexts.call_off()
        return code, None
    return code, lost._replace(past=parts.kept)


def _say_ended(ending: Ended | None, code: int, reason: str, node_0: str, console: Console) -> None:
    """The run is over, and nothing follows here."""
    if ending is not None and ending.has_left:
        console.say(reason)
    elif code:
        console.say(f"the job {_what_befell(ending)}, see the report of {node_0}: {reason}")


def _what_befell(ending: Ended | None) -> str:
    """What a job that did not succeed came to, as a verb phrase."""
    is_stopped = ending is not None and ending.state == JobState.STOPPED.value
    return "was stopped" if is_stopped else "has failed"


def _introduced(prepared: Prepared, name: str, node_0: str) -> str:
    """Which node this is; ``name``: of its worker; ``node_0``: who controls it."""
    spec = prepared.spec
    own = worker_named(name) or f"node {spec.node_rank} of {spec.nnodes}"
    where = ", in the place of a lost one" if prepared.is_late else ""
    return (
        f"this is {own}{where}, with {ranged(spec.ranks_here)} of {spec.world_size}; "
        f"the job is controlled and reported by {node_0}"
    )


def _reported(
    ending: RunEnding,
    prepared: Prepared,
    ignited: StartedForkserver,
    parts: RunParts,
    environ: Mapping[str, str],
    console: Console,
    met: Met,
) -> int:
    """The job is over, and was controlled here: report it; the exit code."""
    address = met.roster.nodes[prepared.spec.node_rank].address
    report(ending, prepared, parts, environ, console, address)
    parts.journal.log(f"exit {ending.exit_code}: {ending.reason}")
    parts.journal.close()
    take_apart(prepared, ignited)
    return ending.exit_code


def _doors_of(nodes: tuple[NodeFacts, ...], own: int, *, is_near: bool) -> Mapping[int, Address]:
    """Where the other workers' msruns listen; ``is_near``: all may be on this machine."""
    return {
        each.rank: Address(each.address, each.door)
        for each in nodes
        # else a loopback address means another machine
        if each.door and each.rank not in {0, own} and (is_near or not is_loopback(each.address))
    }


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
        spent: Callable[[], SpentBudget] = SpentBudget,
    ) -> None:
        """Nothing is lost yet; ``spent``: what the job has used up of its budgets."""
        self._starter = starter
        self._spent = spent
        self._ignited = ignited
        self._met = met
        self._environ = environ
        self._console = console
        self._nodes = met.roster.nodes
        self._reached = self._best = self._attempt = 0
        self._may_be_set_back = False  # the job may begin again from an older step
        self._spec = met.prepared.spec  # with the place that this node has as they meet
        self._job: JobSpec | None = None
        self._early: StartedForkserver | None = None
        self._is_silent = self._is_mute = self._is_spare = False
        self._is_loss = True  # of node 0: else it gathers the others, or has left
        self._without_first = self._stay = 0
        self._term = ""
        self._begun_s = time.monotonic()

    def begin(self, controller: RemoteController, loss: Loss, reached: int, saves: bool) -> bool:
        """The controller's node is lost; whether this node may take part in what follows.

        Args:
            controller: as this node knew it; its node may have taken node 0's part.
            loss: of the line to it.
            reached: the newest step that a rank here has committed.
            saves: ranks here save their state.
        """
        spec, head, term = self._met.prepared.spec, controller.head, controller.term
        if self._met.prepared.is_late and not controller.has_run and (head or not saves):
            # it is lost before this node, a spare one till then, had joined: that waits again
            self._nodes, self._is_spare = controller.nodes, True
            self._job = next_job(self._met.asked)
            return self._met.door is not None
        self._reached, self._attempt, self._term = reached, controller.view.attempt, term
        if not (saves or self._has_lost_before):
            return False
        self._nodes, self._spec = self._as_they_meet(controller)
        spec = self._spec
        self._is_silent = loss.kind is not LossKind.PROOF
        self._is_mute = loss.kind is LossKind.MUTE
        # as with any other node; what a lost one has on a disk of its own nobody else sees
        is_allowed = self._spent().restarts < self._met.prepared.spec.max_restarts
        self._may_be_set_back = is_allowed and not controller.view.is_apart
        self._best = controller.best_step
        if why := why_over(spec, self._nodes, loss, reached, term):
            self._console.say(f"no node takes the part of node 0: {why}")
            return False
        self._job = next_job(self._met.asked)
        if head:
            lost = self._nodes[0]
            self._job = self._job._replace(master_addr=lost.address, master_port=lost.door)
        if not self._starter.keep():
            self._start(self._job)
        return True

    def _as_they_meet(self, controller: RemoteController) -> tuple[tuple[NodeFacts, ...], JobSpec]:
        """The nodes, and the job as this one takes part: all count the controller's as node 0."""
        spec, head = self._met.prepared.spec, controller.head
        place = {0: head, head: 0}.get(spec.node_rank, spec.node_rank)
        return swapped(controller.nodes or self._nodes, head), spec._replace(node_rank=place)

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
        if self._is_spare and self._job is not None:
            met = self._met
            return Continuation(self._job, self._nodes, None, met.door, None, token=met.token)
        if controller.ending is not None and controller.ending.goes_on:
            self.follow(controller.nodes, controller.ending.without_first)
        return self.lost(parts, newest, controller.patience_s)

    def follow(self, nodes: tuple[NodeFacts, ...], without_first: int = 0, stay: int = 0) -> None:
        """The job goes on with more or with fewer nodes, which meet at node 0.

        Args:
            nodes: those that took part.
            without_first: node 0 has left: so many meet at the first of the others.
            stay: on node 0: so many of them do not leave, and may go on elsewhere if they are lost.
        """
        self._nodes, self._without_first = nodes or self._nodes, without_first
        self._stay = stay
        self._is_loss = False
        self._job = next_job(self._met.asked)
        self._start(self._job)

    def beside(self, nodes: tuple[NodeFacts, ...], own: int) -> Continuation | None:
        """What follows on the node that has controlled the job if others may go on without it.

        They go on from what they have saved, so it waits for a place as a node that is new.

        Args:
            nodes: of the job.
            own: its place among them.

        Returns:
            ``None``: nobody can find the others, or this node has no ranks.
        """
        first, *others = swapped(nodes, own)
        door, home = self._met.door, next((node for node in others if node.door), None)
        if door is None or not first.nproc or home is None:
            return None
        job = next_job(self._met.asked)
        assert job.cluster is not None
        # not where the nodes met first, which may be here
        job = job._replace(cluster=job.cluster._replace(home=(home.address, home.door)))
        self._start(job)
        nodes = first._replace(door=0), *others  # nobody looks for itself
        return Continuation(job, nodes, None, door, self._early, token=self._met.token)

    def patience(self, controller: RemoteController, node: Supervisor) -> float:
        """How many times ``--node-timeout`` the controller's msrun may say nothing.

        Args:
            controller: as this node knows it.
            node: this one.
        """
        dead = any(worker.exit_code for worker in node.workers())
        if not (dead or (controller.view.has_hooks and node.living())):
            return inf  # nothing would be saved, and nobody waits for it
        nodes, spec = self._as_they_meet(controller)
        is_over = why_over(spec, nodes, MUTE, -1, controller.term)
        return VERY_CALM if is_over or not controller.view.has_hooks else CALM

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
        spec, reached = self._spec, max(self._reached, newest)
        # where no step was made none is at it
        patience_s = 0.0 if self._may_be_set_back and not reached else patience_s
        saved = saved_step(parts.kept.present, spec, reached, patience_s)
        if saved is None and self._has_lost_before:  # a moment ago: it has just begun anew
            saved = saved_step(parts.kept.present, spec, spec.dump.resume_step)
            if saved is not None and (steps := reached - saved.step) > 0:
                self._console.say(
                    f"{steps} step{'s' if steps > 1 else ''} after step {saved.step} lost"
                )
        is_set_back = saved is None and self._may_be_set_back and not is_asked_late()
        if is_set_back:
            best = max(reached, self._best)
            saved = older_step(parts.kept.present, spec, best, self._console.say)
        if saved is None:
            self._console.say(f"the job does not go on by itself: step {reached} is not saved")
            return None
        is_recent = time.monotonic() < self._begun_s + spec.replace.node_wait_s + SURE_S
        is_haunted = is_recent and self._met.settings.get("is_haunted") is True
        saved = saved._replace(attempt=self._attempt, is_haunted=is_haunted)
        saved = saved._replace(nodes=min(saved.nodes, self._stay or saved.nodes))
        cluster = self._job.cluster
        at = reached if is_set_back else saved.step
        lost_at = (*cluster.lost_at, at) if self._is_loss else cluster.lost_at
        spent = self._spent()
        spent = spent._replace(restarts=spent.restarts + is_set_back)
        job = self._job._replace(cluster=cluster._replace(lost_at=lost_at), spent=spent)
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
            self._is_mute,
            met.token,
            term=self._term,
            without_first=self._without_first,
        )

    def call_off(self) -> None:
        """Nothing follows."""
        if self._early is not None:
            self._early.call_off()
        elif (kept := self._starter.kept()) is not None:
            kept.forget()
        if self._met.door is not None:
            self._met.door.close()
