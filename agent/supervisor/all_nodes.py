"""All nodes of a job, for the controller as if they were one: its own, and the others.

What concerns the state of ranks is done on the controller's node for all ranks, through their
links; what concerns processes on the node where they run.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

from agent.arrivals.doorkeeper import Doorkeeper, RunningJob
from agent.arrivals.going_on import GoingOn
from agent.arrivals.job_size import SizeJudge
from agent.arrivals.late import LateGuests, NodePlace
from agent.arrivals.leaving import farewell
from agent.arrivals.places import LostPlaces
from agent.arrivals.resize import Resize
from agent.arrivals.spent_teller import SpentTeller
from agent.arrivals.store_relay import Store
from agent.arrivals.successors import swapped
from agent.arrivals.withheld import WithheldFailures
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import Answer
from agent.controller.states import JobState
from agent.failure.evidence import Evidence
from agent.health.mute import MuteNodes
from agent.health.signs_of_life import SignsOfLife
from agent.health.unheard import UnheardNodes
from agent.launch.meeting import Met, program_digest
from agent.machine.loop_calls import until_closed
from agent.nodes.alike import Once
from agent.nodes.checkpoint_copy import SEEN_S
from agent.nodes.line import CLOSED, Line, Loss, LossKind
from agent.nodes.link import NodeLink
from agent.nodes.messages import Join, Refused, Spare
from agent.nodes.run_messages import CheckpointKnown, NodeFacts, PagesLeft, pack_said
from agent.rank_logs.reading import LogReader
from agent.rank_logs.relay import LogRelay
from agent.ranks.homes import Homes
from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.seat.job_seat import tenure_of
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.job_controller import JobController
from agent.supervisor.job_view import ControllersNode, Holders, JobView
from agent.supervisor.nodes_memory import NodesMemory
from agent.supervisor.remote_node import RemoteNode, replacement_order
from agent.supervisor.status import MOST_SHOWN, ShownNodes
from agent.text.wording import duration
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

FENCE_S = 2.0  # behind the limit of a node's silence: it has noticed the same by half of that
SWEEP_S = 10.0  # until a node has swept, and told what it found
TELL_S = 10.0  # until nodes whose ranks train already have told what these hold
GARBAGE = 50_000  # objects, some megabytes, before cycles of them are looked for
CLOSE_S = 5.0  # until all nodes have heard that the job is over


class AllNodes:
    """The methods are those of a node and, for hooks, those of an agent."""

    def __init__(
        self,
        own: ControllersNode,
        others: Sequence[RemoteNode],
        hooks: HooksBridge,
        controller: JobController,
        met: Met,
        say: Callable[[str], None],
        door: LateGuests | None = None,
        reader: LogReader | None = None,
    ) -> None:
        """Take the nodes; nothing is heard of the others before :meth:`attach`.

        Args:
            say: prints one sentence for people.
            door: answers whoever comes; ``None``: nobody has come yet.
            reader: of the logs of this node's ranks; ``None``: it is another node's.
        """
        assert met.door is not None
        self.met = met
        limit_s = met.prepared.spec.silence_s
        self._door = door or LateGuests(met.door, met.version, met.token, met.security, limit_s)
        self._withheld = WithheldFailures(self._decide_on)
        self.post = self._withheld.post
        """Decide on an event; of what is lost not before all have told what they have."""
        self._adopts = met.prepared.spec.adopted is not None  # ranks that train already
        self._wait_s = met.prepared.spec.replace.node_wait_s
        self._places = LostPlaces(len(met.roster.nodes), self._wait_s)
        self._waits: dict[int, asyncio.TimerHandle] = {}  # until no node is awaited in a place
        self._said: set[int] = set()  # of those places
        self._next: RemoteNode | None = None  # takes node 0's part if that is lost
        self.packed = Once(pack_said)  # makes JSON of a message for ranks
        self._known: JobView | None = None  # to all nodes
        self._say, self._own, self._hooks = say, own, hooks
        self._others = tuple(others)
        self._mute = MuteNodes(self._others, say, self._lose_mute, self._is_calm, limit_s)
        self._watches = (
            UnheardNodes(self._others, say, limit_s),
            self._mute,
            SignsOfLife(self._others, self._door.tell_spares),
        )
        self._by_rank = {node.facts.rank: node for node in others}
        self._node_of = Homes((node, node.ranks) for node in others)
        self._controller = controller
        home, spec = self._node_of.get, met.prepared.spec
        self.logs = LogRelay(home, spec.world_size, self._by_rank, spec.node_rank, reader)
        """Of ranks, for who asks on any node."""
        self._late: asyncio.TimerHandle | None = None
        self._held: list[tuple[Sequence[int], protocol.Message]] | None = None  # as one begins
        hooks.relay(self._tell)
        if self._others:
            of = (node.rank for node in met.roster.nodes if node.nproc)
            hooks.clear_over(of, self._others)
        cluster = met.prepared.spec.cluster
        assert cluster is not None
        resize = Resize(cluster.least, cluster.nnodes, len(met.roster.nodes))
        self._size = SizeJudge(resize, self._places, say, resumes=spec.dump.resume is not None)
        tenure = tenure_of(met.asked, spec.saves_as, len(met.roster.nodes), met.held, say)
        self.going_on = GoingOn(self._places, tenure, self._door.seat, self._give_up_all)
        self.term_heard = self.going_on.knows
        self.complete: CompleteCheckpoint | None = None  # the newest
        job = RunningJob(
            spec, program_digest(spec), met.settings, hooks.newest_step, self._end, say
        )
        self._doorkeeper = Doorkeeper(job, met.roster.nodes, self._places, resize)
        self._view, self._holders = JobView(), Holders()
        self._spent = SpentTeller(lambda: controller.spent, self._others, own.loop.time)
        call_soon = until_closed(own.loop.call_soon_threadsafe)
        memory = self._memory = NodesMemory(
            self._others, hooks, controller, call_soon, met.security, say, spec.world_size
        )
        # what nodes say of their memory, and how their ranks write to it; see JobPort
        self.far_order, self.here_order = memory.far_order, memory.here_order
        self.memory_taken, self.copy_written = memory.taken, memory.copy_written
        self.offer, self.part_kept = memory.offer, memory.kept

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen to the others on ``loop``."""
        self._loop = loop
        if self.met.prepared.spec.world_size > MOST_SHOWN:
            gc.set_threshold(GARBAGE)  # else what thousands of ranks are is looked at all the time
        self._shown = ShownNodes(loop, self._others)
        self._door.attach(loop, self._judge, self._admit)
        self._door.store = Store(
            lambda: self._own.starter.port,
            lambda: self._doorkeeper.addresses,
            self._say,
        )
        for node in self._others:
            node.attach(loop, self, self._on_lost)
        self.logs.attach(loop)
        self.going_on.attach(loop, self._by_rank)
        for watch in self._watches:
            watch.attach(loop)
        self._choose_next()

    # --- a node, for the controller -------------------------------------------------------------

    def act(self, action: do.Action) -> None:
        """Carry out a decision on all nodes."""
        match action:
            case do.PrepareRanks():
                self._prepare(action)
            case do.ReplaceRanks():
                self._replace(action)
            case do.SignalRanks():
                here, elsewhere = self._node_of.split(action.ranks)
                for node, ranks in elsewhere.items():
                    node.act(replace(action, ranks=ranks), self._controller.view)
                self._own.act(replace(action, ranks=here))
            case do.Sweep() | do.ForgetMemory():
                self._memory.forget()  # it is freed with the attempt
                self._order_all(action)
                if isinstance(action, do.Sweep) and not self.is_swept:
                    self._late = self._loop.call_later(SWEEP_S, self._give_up_sweeps)
                self._own.act(action)
                self.logs.rest()
            case do.CancelStarts():
                self._order_all(action)
                self._cancel(action)
                self._own.act(action)
            case do.SaveRanks():
                self._memory.save(action)
                self._own.act(action)
            case do.StartAttempt() | do.RefuseRanks() | do.WarmUp():
                self._order_all(action)
                self._own.act(action)
            case _:  # of the ranks' state
                self._own.act(action)

    def _order_all(self, action: do.Action) -> None:
        self._spent.tell()
        if self._adopts and isinstance(action, do.StartAttempt):
            self._adopts = False
            there = [node for node in self._others if node.is_there]
            self._withheld.begin(there, self._lose_absent)
            self._loop.call_later(TELL_S, self._give_up_told)
            for node in self._others:
                node.adopt(action)
            return
        if isinstance(action, do.StartAttempt):
            self._memory.begin()
        for node in self._others:
            node.act(action, self._controller.view)
        self._give_up_unawaited()
        self._say_awaited()

    def _give_up_unawaited(self) -> None:
        """No rank starts on a node that is lost, and for which no other one is awaited."""
        for node in self._others:
            if node.lost_why and node.facts.rank not in self._places.vacant:
                for event in node.give_up(node.lost_why, is_lost=True):
                    self._controller.post(event)

    def _cancel(self, action: do.CancelStarts) -> None:
        for node in self._others:
            for event in node.give_up(f"called off: {action.reason}", is_lost=False):
                self._controller.post(event)

    def _prepare(self, action: do.PrepareRanks) -> None:
        here, elsewhere = self._node_of.split(action.ranks)
        if here:
            self._own.act(replace(action, ranks=here))
            port = self._own.starter.reserved_port
        else:
            port = self._own.starter.reserve(action.attempt)
        for node, ranks in elsewhere.items() if port else ():
            node.prepare(replace(action, ranks=ranks), port, self._controller.view)

    def _replace(self, action: do.ReplaceRanks) -> None:
        """Each node begins the attempt before its ranks are told to rejoin."""
        self._held = []
        self._spent.tell()
        self._own.act(action)
        old, new = (self._node_of.split(each)[1] for each in (action.survivors, action.newcomers))
        view, told = self._controller.view, replacement_order(action, self._own.starter.port)
        for node in self._others:
            node.replace(action, old.get(node, ()), new.get(node, ()), told, view)
            if node.is_there:
                self._memory.bring(node)
        self._give_up_unawaited()
        self._say_awaited()
        held, self._held = self._held, None
        for ranks, message in held:
            self._tell(ranks, message)

    def decided(self, view: JobView, holders: Holders) -> None:
        """Know what became of the job by the newest decision, which was carried out."""
        self._view, self._holders = view, holders
        if view.is_news_to(self._known):
            self._known = view
            for node in self._others:
                node.know(view)
        self._own.decided(view, holders)
        self._grow()

    def catch_up(self) -> None:
        """Take in what all ranks and nodes have said by now."""
        self._own.catch_up()
        for node in self._others:
            node.catch_up()

    def refresh(self) -> bool:
        """Note in the workers how far they are; whether that changes by itself."""
        return self._own.refresh_of({each.rank: each for each in self.workers()})

    def workers(self) -> tuple[Worker, ...]:
        """The present attempt's, by rank."""
        others = (worker for node in self._others for worker in node.workers.values())
        return tuple(sorted((*self._own.workers(), *others), key=lambda worker: worker.rank))

    @property
    def is_swept(self) -> bool:
        """Whether every node has done what the last sweep ordered."""
        return all(node.is_swept for node in self._others)

    def evidence(self) -> tuple[Evidence, ...]:
        """What the other nodes found of the ends of the last attempt."""
        return tuple(found for node in self._others for found in node.evidence)

    def show(self, status: dict[str, object]) -> None:
        """Tell the others the state of the whole job."""
        self._shown.show(status)

    def know_checkpoint(self, done: CompleteCheckpoint) -> None:
        """A checkpoint is complete: no node begins from an older one."""
        self.complete = done
        for node in self._others:
            node.pass_on(CheckpointKnown(*done))

    def finish(self) -> None:
        """The job is over."""
        self._size.settle(self._there, self._door.waiting)
        ending, goes_on = self._controller.ending, self.goes_on_with
        self._size.say_ended(ending, goes_on, self._place_of)
        over = Refused(f"the job is over: {ending.reason}", ending.exit_code)
        self._door.close(None if goes_on or self.going_on.gives_way(ending) else over)
        leaves = bool(self.farewell)
        if leaves and self.met.door is not None:
            self.met.door.close()  # before the others knock there
        is_done, goes_on_here = ending.state is JobState.SUCCEEDED, bool(goes_on) and not leaves
        self.going_on.close(goes_on=goes_on_here, is_done=is_done, saved=ending.saved or "")
        self._stop_watching()
        self._memory.close()
        self.logs.close()
        if self.met.checkpoint is not None:
            self.met.checkpoint.close()
        end_s = self._loop.time() + CLOSE_S
        for node in self._others:
            left_s = max(0.0, end_s - self._loop.time())
            node.end(self._size.ended(ending, node.facts.rank, goes_on), left_s)
        self._own.finish()

    def _stop_watching(self) -> None:
        for timer in self._waits.values():
            timer.cancel()
        for watch in self._watches:
            watch.close()

    # --- what the others say --------------------------------------------------------------------

    def swept(self) -> None:
        """A node has no process of the attempt any more."""
        if self.is_swept:
            if self._late is not None:
                self._late.cancel()
                self._late = None
            self._controller.go_on()

    def _give_up_sweeps(self) -> None:
        self.catch_up()
        if self.is_swept:
            return
        self._late = None
        for node in self._others:
            node.is_swept = True
        self._controller.go_on()

    @property
    def rank(self) -> int:
        """The place of the controller's node."""
        return self.met.prepared.spec.node_rank

    def next_end(self) -> int:
        """The number of one more worker's end, among those of all nodes."""
        return self._own.next_end()

    def _on_lost(self, node: RemoteNode, loss: Loss) -> None:
        """A node that is only silent may be alive: it has ended its ranks by then, too."""
        if self._mute.was_stopped:  # so it may have given this node up, and go on with others
            loss = Loss(LossKind.SILENCE, f"{loss.why} while this one was stopped")
        if loss.kind is LossKind.SILENCE:
            self._say(f"{node.name} is silent: its msrun {loss.why}")
            self._loop.call_later(max(0.0, FENCE_S - loss.over_s), self._lose, node, loss)
        else:
            self._lose(node, loss)

    def _is_calm(self) -> bool:
        return self._view.state is JobState.RUNNING

    def _lose_mute(self, node: RemoteNode, why: str) -> None:
        """It does not know of it, so there is nothing in which it would come before others."""
        node.line.give_up(Loss(LossKind.SILENCE, why, FENCE_S))

    def _lose(self, node: RemoteNode, loss: Loss) -> None:
        doing = "is gone" if loss.kind is LossKind.PROOF else "is silent"
        why = f"{node.name} {doing}: its msrun {loss.why}"
        if loss.kind is LossKind.PROOF:  # silence was said before
            self._say(why)
        is_silent = loss.kind is LossKind.SILENCE
        if self._wait_s:  # before the decision, which may be to start ranks there
            rank = node.facts.rank
            now_s, was_heard = self._loop.time(), node.was_heard
            self._places.lose(rank, now_s, is_silent=is_silent, was_heard=was_heard)
            self._waits[rank] = self._loop.call_later(self._wait_s, self._give_up, node)
        node.lose(why, self._say)
        self.told_again(node)
        has_hooks = self._controller.view.has_hooks
        self.going_on.lost(node.facts, has_hooks=has_hooks, is_silent=is_silent)
        self._say_awaited()
        self._choose_next()
        node.is_swept = True
        self.swept()
        self._memory.lose(node, why)
        self.logs.lose(node)
        self._door.seat()

    def _choose_next(self) -> None:
        """The node that would take this one's part keeps copies of what its ranks alone have."""
        others = (node for node in self._others if node.is_there and not node.is_here)
        there = next(others, None)
        if there is not self._next:
            if self._next is not None:
                self._next.pass_on(PagesLeft())  # what stands still there must not be saved
            self._next = there
            self._hooks.copy_pages(None if there is None else there.keep_page)

    @property
    def seen_s(self) -> float:
        """How long what was saved here may be invisible on other nodes, if they share it."""
        return 0.0 if self._holders.apart else SEEN_S

    # --- another node in the place of a lost one ------------------------------------------------

    def _judge(self, join: Join, address: str) -> NodePlace | Spare | Refused:
        answer = self._doorkeeper.judge(join, address)
        if isinstance(answer, Spare):
            self._loop.call_soon(self._grow)  # once it waits
        return answer

    def _end(self, why: str) -> None:
        """Other nodes go on from a later step."""
        node = self.met.prepared.spec.node_rank
        self._controller.post(ev.StopRequested(signal.SIGTERM, why, node=node))

    def _grow(self) -> None:
        """Have the step saved, with which the job goes on with the nodes that wait, if it can."""
        about = self._view, self._holders, self._hooks.newest_step
        if (request := self._size.grown(self._door.waiting, *about)) is not None:
            self._controller.post(request)

    def _leave(self, request: ev.StopRequested) -> None:
        """A node is asked to end: it leaves, or the whole job stops."""
        about = self.nodes, self._there, self._door.waiting, self._controller.view, self._holders
        is_to_end = self._controller.is_to_end
        if (judged := self._size.judged(request, *about, is_to_end=is_to_end)) is not None:
            self._controller.post(judged)
            return
        ranks, why = tuple(self.met.roster.ranks(request.node)), "its node leaves at once"
        self.act(do.SignalRanks(ranks, signal.SIGKILL, why))

    @property
    def goes_on_with(self) -> int:
        """The nodes with which the job goes on as another one; 0: it does not."""
        ending, out = self._controller.ending, self.going_on.gives_way(self._controller.ending)
        return 0 if out else self._size.goes_on_with(ending, self._place_of)

    @property
    def farewell(self) -> str:
        """What this node says if the job goes on without it; empty: it does not."""
        leaves = self.rank in self._size.resize.leaving and self.goes_on_with
        return farewell(leaves, self._controller.ending.saved or "") if leaves else ""

    @property
    def staying(self) -> int:
        """How many nodes do not leave; those that are lost count, as they may go on elsewhere."""
        return len(self.nodes) - len(self._size.resize.leaving)

    @property
    def _there(self) -> set[int]:
        """The places of nodes that are."""
        return {self.rank, *(node.facts.rank for node in self._others if node.is_there)}

    def _place_of(self, rank: int) -> int:
        node = self._node_of.get(rank)
        return self.rank if node is None else node.facts.rank

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """Those that take part."""
        return tuple(self._doorkeeper.facts)

    def _admit(self, rank: int, line: Line) -> None:
        self._waits.pop(rank).cancel()
        self._places.settle(rank)
        self._said.discard(rank)
        node = self._by_rank[rank]
        node.renew(self._doorkeeper.facts[rank], NodeLink(line))
        self._known = None
        node.attach(self._loop, self, self._on_lost)
        self.going_on.came(node.facts)
        self._choose_next()
        self._say(f"{node.name} has come in the place of the lost one")
        facts = tuple(self._doorkeeper.facts)
        for other in self._others:
            if other is not node:
                other.know_nodes(facts)
        self._door.tell_spares(Spare(swapped(facts, self.rank)))
        if not self._memory.bring(node):
            node.go_on(self._controller.view)
        self._spent.came(node)
        if self.complete is not None:
            node.pass_on(CheckpointKnown(*self.complete))

    def _say_awaited(self) -> None:
        """Say for which lost nodes' places the job waits."""
        for node in self._others:
            rank = node.facts.rank
            is_awaited = rank in self._places.vacant and rank not in self._said
            if is_awaited and node.awaited():
                self._said.add(rank)
                self._say(
                    f"waiting {duration(self._wait_s)} at most for another {node.place}: start "
                    "msrun again, there or elsewhere, with the same command"
                )

    def _give_up_all(self, why: str) -> None:
        """Other nodes may go on without this one: then it must not, too."""
        self._say(f"{why}: no other node is awaited")
        for node in self._others:
            if (timer := self._waits.get(node.facts.rank)) is not None:
                timer.cancel()
                self._give_up(node, why)

    def _give_up(self, node: RemoteNode, why: str = "") -> None:
        del self._waits[node.facts.rank]
        self._places.settle(node.facts.rank)
        if not why:
            why = f"no node came in the place of {node.name} within {duration(self._wait_s)}"
            left = 1 + sum(other.is_there for other in self._others)
            may_shrink = self._view.has_hooks and not self._places.is_in_doubt
            if may_shrink and (said := self._size.resize.shrink(left, self._holders.apart)):
                why = f"{why}: {said}"
        for event in node.give_up(why, is_lost=True):
            self._controller.post(event)

    def _tell(self, ranks: Sequence[int], message: protocol.Message) -> None:
        if self._held is not None:
            self._held.append((ranks, message))
            return
        for node, theirs in self._node_of.split(ranks)[1].items():
            node.tell(theirs, message)

    # --- an agent, for the hooks ----------------------------------------------------------------

    def _decide_on(self, event: ev.Event) -> None:
        if isinstance(event, ev.StopRequested) and event.leaves:
            self._leave(event)
        elif isinstance(event, Answer) and event.rank in self._node_of:
            self._controller.post_soon(event)
        else:
            self._controller.post(event)

    def is_vacant(self, rank: int) -> bool:
        """Whether another node is awaited in this place."""
        return rank in self._places.vacant

    def told_again(self, node: RemoteNode) -> None:
        """A node whose ranks trained already has told all that is true of them."""
        self._withheld.told(node)

    def _lose_absent(self) -> None:
        """All have told: what was lost with the last controller's node is lost now."""
        absent = [node for node in self._others if not (node.is_there or node.lost_why)]
        self._controller.decide_now()
        if absent and (why := self._controller.why_never_replaced):
            self.resign(f"no rank can be replaced ({why})")
            return
        for node in absent:
            self._lose(node, CLOSED)

    def resign(self, why: str) -> None:
        """Decide nothing any more: the ranks save their step, and the nodes meet again."""
        self._say(f"{why}: the ranks of all nodes save their step, and begin again from there")
        self._controller.retire()
        self._door.close(None)
        self._stop_watching()
        self._memory.close()
        self._own.finish()
        for node in self._others:
            node.forsake()

    def _give_up_told(self) -> None:
        self.catch_up()
        self._withheld.release()

    def announce(self) -> None:
        """Take in every start that has happened already; other nodes tell theirs in order."""
        self._own.announce()

    def settle(self) -> None:
        """Take in every start and death that has happened already."""
        self._own.settle()

    def worker(self, rank: int) -> Worker:
        """A rank of the present attempt."""
        node = self._node_of.get(rank)
        return self._own.worker(rank) if node is None else node.workers[rank]

    def protect(self, pid: int) -> None:
        """If this msrun dies, a rank of this node gets its time to save."""
        self._own.protect(pid)

    def wake(self, rank: int) -> None:
        """Send SIGCONT to a rank."""
        node = self._node_of.get(rank)
        if node is None:
            self._own.wake(rank)
        else:
            node.wake(rank)

    def watch(self, path: str) -> None:
        """A graceful exit may be asked for in this file."""
        self._own.watch(path)
