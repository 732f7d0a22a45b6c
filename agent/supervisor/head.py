"""The msrun of a node decides for all, as the one that did is lost, while ranks live on.

It reaches the ranks of its own node as it does those of all others, by a line: so nothing on this
node is another thing than it was. What was decided before is told again by the nodes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agent.accounting.account import Account
from agent.arrivals.late import LateGuests
from agent.arrivals.living_side import LivingSide
from agent.arrivals.successors import HEAD, Successors, Takeover, why_not_awaited
from agent.arrivals.takeover import AttemptClaim, SuccessorWatch, TakeoverDoor
from agent.controller import actions as do
from agent.controller.job import Job
from agent.failure.ending import RunEnding
from agent.failure.evidence import Evidence
from agent.hooks.listener import open_listener
from agent.launch.doors import Address, DoorWatch
from agent.launch.meeting import Met
from agent.machine import open_files
from agent.machine.file_thread import FileThread
from agent.nodes.join import JoinedNode
from agent.nodes.line import Line, Loss
from agent.nodes.link import NodeLink
from agent.nodes.messages import Begin, LivingRanks
from agent.nodes.roster import Roster
from agent.nodes.run_messages import NodeFacts
from agent.notify.notifier import Notifier
from agent.spec.console import Console
from agent.spec.job_spec import UsageError
from agent.supervisor.all_nodes import AllNodes
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.hooks_relay import HooksRelay
from agent.supervisor.job_controller import JobController
from agent.supervisor.job_view import Holders, JobView
from agent.supervisor.remote_node import RemoteNode
from agent.supervisor.run_parts import RunParts
from agent.supervisor.status import status
from agent.supervisor.supervisor import Supervisor
from agent.workers.master_port import listen_in_reserve
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract.left_pages import unclaim

LOOK_S = 0.5  # between two looks whether the lost node is started again
BACK = "node 0 is started again"
TAKES_PART = (
    "this node takes the part of node 0, which is lost: the ranks of the other nodes live on. To "
    "give a node to the job, start msrun there with --master-addr={} --master-port={} and without "
    "--node-rank"
)


class HeadNode:
    """What a controller does on its own node, where the ranks there are those of another one."""

    def __init__(self, here: Supervisor, starter: Starter, hooks: HooksBridge) -> None:
        """Take the parts.

        Args:
            here: runs the ranks of this machine, as another node.
            starter: theirs, which has the stores of all ranks.
            hooks: of all ranks.
        """
        self.loop: asyncio.AbstractEventLoop = here.loop
        self._here = here
        self.starter = starter
        self._hooks = hooks
        self._ended = 0
        self._swept: Callable[[], object] = lambda: None

    def attach(self, swept: Callable[[], object]) -> None:
        """``swept``: called when there is no process of an attempt on this node: at once."""
        self._swept = swept

    def act(self, action: do.Action) -> None:
        """Carry out what concerns the state of all ranks, and where they meet."""
        match action:
            case do.StartAttempt():
                self._ended = 0
                self._hooks.begin(action.attempt, action.resume or "")
            case do.ReplaceRanks():
                stay = (each for each in self._here.workers() if each.rank in action.survivors)
                self.starter.renew(action.attempt, {worker.pid for worker in stay})
                self._hooks.renew(action, self.starter.port)
            case do.Sweep():
                self._hooks.end_attempt()
                self._swept()
            case do.SignalRanks() | do.CancelStarts() | do.WarmUp() | do.PrepareRanks():
                pass  # of processes: none is here
            case do.SetDeadline() | do.Finish() | do.GiveUpDevices() | do.RemindReplaced():
                raise TypeError(f"not for a node: {action}")
            case _:
                self._hooks.act(action)

    def decided(self, view: JobView, holders: Holders) -> None:
        """Know what became of the job by the newest decision, which was carried out."""
        self._hooks.decided(view.state, holders)

    def catch_up(self) -> None:
        """Take in what the ranks of this machine have said by now; it comes by the line."""
        self._here.catch_up()

    def refresh_of(self, workers: Mapping[int, Worker]) -> bool:
        """Note in the workers of all nodes how far they are; whether that changes by itself."""
        self._hooks.refresh(workers)
        return self._hooks.is_needed

    def workers(self) -> tuple[Worker, ...]:
        """None."""
        return ()

    def worker(self, rank: int) -> Worker:
        """None: all are those of other nodes."""
        raise KeyError(rank)

    def next_end(self) -> int:
        """The number of one more worker's end in the attempt."""
        self._ended += 1
        return self._ended

    def announce(self) -> None:
        """All starts are told by lines."""

    def settle(self) -> None:
        """All deaths are told by lines."""

    def protect(self, pid: int) -> None:
        """The other node does so."""

    def wake(self, rank: int) -> None:
        """The other node does so."""

    def watch(self, path: str) -> None:
        """The other node does so."""

    def finish(self) -> None:
        """The job is over, or another one decides."""
        self._hooks.close()


class Head:
    """The controller of all nodes, in the msrun of one that has lost it."""

    def __init__(
        self,
        nodes: AllNodes,
        controller: JobController,
        hooks: HooksBridge,
        notifier: Notifier,
        lost: int,
        home: Address,
        places: tuple[str, ...],
        job: str,
    ) -> None:
        """Take the parts; nothing is decided before :meth:`begin`.

        Args:
            nodes: all.
            controller: decides.
            hooks: of all ranks.
            notifier: tells programs outside of it.
            lost: the place of the node that did.
            home: where that was met, and may be again.
            places: where ranks save.
            job: its id.
        """
        self._nodes = nodes
        self._controller = controller
        self._hooks = hooks
        self._notifier = notifier
        self._lost = lost
        self._claimed = places, job
        self._knocks = DoorWatch({lost: home})

    @property
    def pids(self) -> frozenset[int]:
        """Processes that no sweep may kill."""
        return self._notifier.pids

    @property
    def ending(self) -> RunEnding | None:
        """How the job ended; ``None``: others decide about that."""
        return self._controller.ending if self._controller.has_ended else None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Decide from now on."""
        self._loop = loop
        self._nodes.attach(loop)
        self._controller.attach(loop, self._nodes)
        self._hooks.attach(loop, self._nodes)
        self._controller.begin()
        self._look()

    def resign(self, why: str) -> None:
        """Decide nothing any more."""
        self._nodes.resign(why)

    def close(self) -> None:
        """The job is over."""
        self._knocks.close()
        self._notifier.close()
        places, job = self._claimed
        for place in places:
            with suppress(OSError):
                unclaim(Path(place), job)

    def _look(self) -> None:
        """Whoever starts node 0 again has the nodes meet there."""
        if self._controller.is_retired:
            return
        if self._nodes.is_vacant(self._lost) and self._knocks.look({self._lost}).open:
            self.resign(BACK)
            return
        self._loop.call_later(LOOK_S, self._look)


class _Search(NamedTuple):
    """What is known as node 0 is lost."""

    living: LivingRanks
    nodes: tuple[NodeFacts, ...]
    lost: int


class Deputy:
    """Finds another controller for the ranks of this node, and is one if it has to."""

    def __init__(
        self,
        met: Met,
        side: LivingSide,
        parts: RunParts,
        console: Console,
        relay: HooksRelay,
    ) -> None:
        """Take the parts.

        Args:
            met: how this node has met the others.
            side: what it brings along to meet them again.
            parts: of the run here.
            console: where people read.
            relay: the hooks of the ranks of this node.
        """
        self._met = met
        self._side = side
        self._parts = parts
        self._console = console
        self._relay = relay
        self.head: Head | None = None
        """That decides here; ``None``: none does."""

    @property
    def ended(self) -> RunEnding | None:
        """How the job ended, if it was controlled here."""
        head = self.head
        return None if head is None else head.ending

    @property
    def pids(self) -> frozenset[int]:
        """Processes of a controller here, which no sweep may kill."""
        return frozenset() if self.head is None else self.head.pids

    def attach(self, here: Supervisor) -> None:
        """``here``: runs the ranks of this node."""
        self._here = here

    def why_not(self, loss: Loss, nodes: tuple[NodeFacts, ...], lost: int, *, is_calm: bool) -> str:
        """Why the ranks here do not wait for another controller; empty: they do.

        Args:
            loss: of the line to the last one.
            nodes: of the job.
            lost: the place of the last one.
            is_calm: nothing that it has ordered is under way.
        """
        spec = self._met.prepared.spec
        assert spec.cluster is not None
        if not (spec.replace.node_wait_s and spec.dump.ttp and self._relay.notes_folders()):
            return "no other node is waited for, or nothing would be saved"
        if spec.cluster.store:
            return "the store says who decides"
        is_fixed = not spec.cluster.least
        own = spec.node_rank
        return why_not_awaited(loss, nodes, own, lost, is_calm=is_calm, is_fixed=is_fixed)

    def look(
        self,
        attempt: int,
        nodes: tuple[NodeFacts, ...],
        lost: int,
        found: Callable[[JoinedNode], object],
        too_late: Callable[[str, bool], object],
    ) -> SuccessorWatch | None:
        """Begin to look for it; ``None``: this node cannot.

        Args:
            attempt: that the ranks are in.
            nodes: of the job.
            lost: the place of the last one.
            found: takes the line to the one that decides from now on.
            too_late: takes why there is none, and that this is certain.
        """
        own = self._met.prepared.spec.node_rank
        living = self._side.living(attempt, self._relay.resume)
        search = _Search(living, nodes, lost)
        try:
            dial = self._side.dials(living)
        except UsageError:  # which was said
            return None
        return SuccessorWatch(
            Successors(own, lost, range(len(nodes))),
            own,
            _doors(nodes),
            dial,
            lambda: self._lead(search),
            self._here.loop,
            found,
            too_late,
        )

    def close(self) -> None:
        """The run is over."""
        if self.head is not None:
            self.head.close()

    def _lead(self, search: _Search) -> TakeoverDoor | None:
        """All others have to come to this node."""
        met, loop, own = self._met, self._here.loop, search.living.node_rank
        assert met.door is not None
        spec = met.prepared.spec
        # to each other node a line and a look whether it lives, and what each rank alone has
        open_files.allow_files(2 * spec.nnodes + spec.world_size)
        listener = listen_in_reserve(search.nodes[own].address)
        if listener is None:
            return None
        try:
            security = self._side.security()
            hooks_listener = open_listener(spec.record_id)
        except (UsageError, OSError) as error:
            listener.close()
            self._console.say(str(error))
            return None
        settings: dict[str, object] = {
            **{name: value for name, value in met.settings.items() if name != "checkpoint"},
            "store_port": int(listener.getsockname()[1]),
            "is_late": False,
            HEAD: own,
        }
        told = met._replace(security=security, settings=settings, roster=Roster(search.nodes))

        def gives_up() -> None:
            listener.close()
            hooks_listener.close()

        def decides(guests: LateGuests, lines: Mapping[int, Line]) -> None:
            self._parts.starter.take_stores(listener, search.nodes[own].address)
            self.head = self._head(search, told, hooks_listener, guests, lines)
            door = search.nodes[own]
            self._console.say(TAKES_PART.format(door.address, door.door))
            self.head.begin(loop)

        return TakeoverDoor(
            Takeover(search.living, search.lost, range(len(search.nodes))),
            LateGuests(met.door, met.version, met.token, security, met.prepared.spec.silence_s),
            Begin(search.nodes, settings),
            _doors(search.nodes),
            AttemptClaim(search.living.job, search.living.attempt, self._relay.places()),
            FileThread(loop.call_soon_threadsafe),
            loop,
            decides,
            gives_up,
            self._side.hear,
        )

    def _head(
        self,
        search: _Search,
        told: Met,
        hooks_listener: socket.socket,
        guests: LateGuests,
        lines: Mapping[int, Line],
    ) -> Head:
        parts, console, prepared = self._parts, self._console, told.prepared
        own, living = search.living.node_rank, search.living
        ranks = told.roster.ranks(own)
        spec = prepared.spec._replace(
            nproc=0,
            job_id="",
            run_id=told.asked.given_id or prepared.spec.record_id,
            adopted=self._side.adopted(living)._replace(near=ranks),
            spent=self._side.spent,
        )
        met = told._replace(prepared=prepared._replace(spec=spec, store_port=0), lines=lines)
        hooks = parts.bridge(spec, hooks_listener, console)
        facts = replace(parts.facts, spec=spec)
        notifier = Notifier(facts, console.say)

        def changed(job: Job, workers: tuple[Worker, ...] | None, account: Account) -> None:
            if workers is None:  # which the nodes write
                return
            notifier.changed(job, workers, account)
            nodes.show(status(facts, job, workers, account))

        def evidence() -> tuple[Evidence, ...]:
            return nodes.evidence()

        controller = parts.controller(spec, notifier, console, changed, evidence)
        head_node = HeadNode(self._here, parts.starter, hooks)
        head_node.attach(lambda: controller.ended(controller.view.state, ()))
        others = [
            RemoteNode(
                each,
                told.roster.ranks(each.rank),
                NodeLink(lines[each.rank]) if each.rank in lines else NodeLink.lost(),
                hooks,
                is_here=each.rank == own,
            )
            for each in search.nodes
        ]
        nodes = AllNodes(head_node, others, hooks, controller, met, console.say, guests)
        nodes.complete = parts.kept.present.complete
        parts.kept.tell = nodes.know_checkpoint
        home = self._side.home
        places = self._relay.places()
        return Head(nodes, controller, hooks, notifier, search.lost, home, places, living.job)


def _doors(nodes: tuple[NodeFacts, ...]) -> dict[int, Address]:
    return {each.rank: Address(each.address, each.door) for each in nodes}
