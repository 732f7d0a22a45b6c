"""Another node, as the controller's node knows it: its ranks' processes, and the line to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.events import renewed
from agent.failure.evidence import Evidence
from agent.failure.evidence_json import as_heard, from_json
from agent.health.mute import MUTE_S, is_mute
from agent.nodes.alike import Once, said_by
from agent.nodes.checkpoint_copy import CheckpointPlace
from agent.nodes.codec import pack_action, unpack_event
from agent.nodes.line import Loss
from agent.nodes.link import NodeLink
from agent.nodes.messages import NodeMessage
from agent.nodes.run_messages import (
    Beats,
    CopyProgressed,
    CopyWritten,
    Ended,
    Fact,
    FolderMarked,
    ForLogs,
    FromRank,
    FromRanks,
    JobKnown,
    MemoryTaken,
    NodeFacts,
    NodesKnown,
    Order,
    PageNews,
    PageSeen,
    PagesKept,
    PartKept,
    RankUnlinked,
    ResumeFrom,
    SaveFar,
    SaveHere,
    ShownStatus,
    SweptNode,
    TakeMemory,
    TermHeard,
    TermKnown,
    ToldAgain,
    ToRank,
    ToRanks,
    UpdatesCleared,
    UpdatesReady,
    Wake,
    unpack_said,
)
from agent.seat.rights import TellTerm
from agent.spread.node_writes import not_written
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.job_view import JobView
from agent.text.wording import ranged, worker_named
from agent.workers.worker import Worker
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.storage.manifest import is_in_memory

if TYPE_CHECKING:
    from agent.hooks.page_copies import Copied
    from agent.rank_logs.relay import LogRelay

UNKNOWN_PID = -1  # of a rank that this msrun has not started
UNKNOWN_END = -signal.SIGKILL  # of a rank whose node is gone: nobody saw it end
FINISHED = "had come to the end of the script, and may have exited: nothing of it is missing"


class JobPort(Protocol):
    """Who is told of what happens on a node."""

    def post(self, event: ev.Event) -> None:
        """Decide on an event."""

    def next_end(self) -> int:
        """The number of one more worker's end, among those of all nodes."""

    def far_order(self, rank: int, save: protocol.Save) -> SaveFar:
        """How a rank of another node writes to the controller's memory; may raise OSError."""

    def here_order(self, node: int, ranks: tuple[int, ...], save: protocol.Save) -> SaveHere | None:
        """How ranks of another node write to that node's memory as well, if they are to."""

    @property
    def rank(self) -> int:
        """The place of the controller's node."""

    @property
    def packed(self) -> Callable[[protocol.Message], dict[str, object]]:
        """Makes JSON of a message for ranks."""

    def swept(self) -> None:
        """A node has no process of the attempt any more."""

    def told_again(self, node: RemoteNode) -> None:
        """A node whose ranks trained already has told all that is true of them."""

    def offer(self, path: str, told: Callable[[CheckpointPlace | None], object]) -> None:
        """``told`` takes where a checkpoint on this node's disk is to be had."""

    @property
    def seen_s(self) -> float:
        """How long what was saved on one node may be invisible on another, if they share it."""

    def part_kept(self, node: int, kept: PartKept) -> None:
        """A node has a file of a state, which others may fetch."""

    def memory_taken(self, node: int, path: str, why_not: str) -> None:
        """A node has the checkpoint in memory, or has not because of ``why_not``."""

    def copy_written(self, node: int, answer: CopyWritten) -> None:
        """A node has written what its ranks had copied, or has not."""

    def term_heard(self, node: NodeFacts, number: int) -> None:
        """A node knows which term counts, as it was told."""

    logs: LogRelay
    """Questions about logs of ranks, and answers, from node to node."""


class RemoteNode:
    """The ranks of one other node."""

    def __init__(
        self,
        facts: NodeFacts,
        ranks: range,
        link: NodeLink,
        hooks: HooksBridge,
        *,
        is_here: bool = False,
    ) -> None:
        """Take the parts; nothing is heard before :meth:`attach`.

        Args:
            facts: who it is.
            ranks: its ranks.
            link: to it.
            hooks: of all ranks.
            is_here: its msrun is this process, which has taken node 0's part.
        """
        self.is_here = is_here
        self.facts = facts
        self.ranks = ranks
        self.workers: dict[int, Worker] = {}
        """Of the present attempt."""
        self.evidence: tuple[Evidence, ...] = ()
        """What it found of the ends of the last attempt that was swept."""
        self.is_swept = True
        """Whether no process is left that a sweep was ordered for."""
        self.was_heard = False
        """Whether it has said anything in this job, or another node has its place."""
        self._link = link
        self._hooks = hooks
        self._known: JobView | None = None
        self._renewed: tuple[int, frozenset[int]] = (0, frozenset())  # by a replacement: attempt
        self._waiting: Order | None = None
        self._memory: set[str] = set()  # of which there is a copy there: paths here
        self.lost_why = ""
        """Why it is gone; empty: it is there."""
        self._sweeping = -1  # the attempt that was known to it when the last sweep was ordered
        self._heard_at: dict[int, tuple[float, int]] = {}  # rank -> of its end: when, and which

    @property
    def name(self) -> str:
        """The node, for people."""
        return f"{self.place} ({self.facts.host})"

    @property
    def place(self) -> str:
        """The same without its host, which another one may take."""
        return worker_named(self.facts.name) or f"node {self.facts.rank}"

    @property
    def line(self) -> NodeLink:
        """The present one."""
        return self._link

    @property
    def is_there(self) -> bool:
        """Whether it can be told anything."""
        return self._link.is_open

    def renew(self, facts: NodeFacts, link: NodeLink) -> None:
        """Another node has its place; see :meth:`attach`."""
        self.facts, self.was_heard = facts, True
        self._link = link
        self._known = None
        self._memory = set()
        self.lost_why = ""

    def go_on(self, view: JobView) -> None:
        """Order what was ordered while nobody was here, or before the memory had come."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None or self._known is None:  # else it hears of it with the next order
            self.know(view)
        if waiting is not None:
            self._link.send(waiting)

    def has_memory(self, path: str) -> bool:
        """Whether it has a copy of this checkpoint in memory."""
        return path in self._memory

    def awaited(self) -> list[Worker]:
        """Ranks that are to be started on this node, which is not there."""
        return [each for each in self.workers.values() if not each.pid and each.ended_at is None]

    def attach(self, loop: Any, job: JobPort, lost: Callable[[RemoteNode, Loss], None]) -> None:
        """Listen on ``loop``."""
        self._job = job
        if self._link.is_open:
            self._link.attach(loop, self._hear, lambda loss: lost(self, loss))

    def catch_up(self) -> None:
        """Hear what it has said by now."""
        self._link.catch_up()

    def know(self, view: JobView) -> None:
        """Tell it what became of the job, if that is new to it."""
        if view != self._known:
            self._known = view
            self._link.send(_known(view))

    def keep_page(self, message: Copied) -> None:
        """Have it keep what ranks of this node have, or have said."""
        self._link.send(message)

    def clear(self, message: UpdatesCleared) -> None:
        """Let its ranks make their updates."""
        if self.is_there:
            self._link.send(message)

    def is_in_doubt(self) -> bool:
        """Whether it may be lost, and does not count as that yet; something is said after this."""
        return not self.lost_why and (self._link.is_in_doubt() or is_mute(self, MUTE_S))

    def know_nodes(self, nodes: tuple[NodeFacts, ...]) -> None:
        """Tell it who takes part."""
        self._link.send(NodesKnown(nodes))

    def know_term(self, told: TellTerm) -> None:
        """Tell it which term of the seat counts."""
        self._link.send(TermKnown(told.term, told.number))

    def adopt(self, action: do.StartAttempt) -> None:
        """Its ranks train already, in this attempt; it will tell more."""
        self._begin(action)
        for worker in self.workers.values():
            worker.pid, worker.started_at = UNKNOWN_PID, time.time()
            self._job.post(ev.WorkerStarted(worker.rank, worker.attempt, worker.pid))

    def act(self, action: do.Action, view: JobView) -> None:
        """Order what concerns the processes of this node; of ranks, only this node's."""
        self.know(view)
        match action:
            case do.StartAttempt():
                self._begin(action)
                if not self._link.is_open:
                    self._waiting = _order(action)
            case do.RefuseRanks():
                refused = _ranks(action)
                for worker in self.workers.values():
                    worker.was_stopped |= worker.rank in refused
            case do.Sweep():
                self.is_swept, self._sweeping = not self._link.is_open, view.attempt
            case _:
                pass
        self._link.send(_order(action))

    def _begin(self, action: do.StartAttempt) -> None:
        resumes = action.resume is not None
        self.workers = {
            rank: Worker(rank, local_rank, action.attempt, resumes=resumes)
            for local_rank, rank in enumerate(self.ranks)
        }
        self.evidence = ()
        self._heard_at = {}
        self._renewed = 0, frozenset()

    def prepare(self, action: do.PrepareRanks, port: int, view: JobView) -> None:
        """Order early starts of ranks, all of this node, which would meet at ``port``."""
        self.know(view)
        self._link.send(Order(pack_action(action), port))

    def replace(
        self,
        action: do.ReplaceRanks,
        survivors: tuple[int, ...],
        newcomers: tuple[int, ...],
        order: Order,
        view: JobView,
    ) -> None:
        """Order what a replacement means for this node's ranks.

        New ranks are not started before the checkpoint that they resume from has come.

        Args:
            action: for all ranks.
            survivors: of this node.
            newcomers: of this node.
            order: the same to all nodes, as :func:`replacement_order`.
            view: the job's.
        """
        for rank in survivors:
            self.workers[rank].attempt = action.attempt
        for rank in newcomers:
            gone = self.workers[rank]
            gone.is_replaced = True
            new = Worker(rank, gone.local_rank, action.attempt, resumes=True)
            self.workers[rank] = new
        self._renewed = action.attempt, frozenset(survivors)
        self.know(view)
        if newcomers and not self.has_memory(action.path):
            self._waiting = order
        else:
            self._link.send(order)

    def wake(self, rank: int) -> None:
        """Order that SIGCONT is sent to a rank."""
        self._link.send(Wake(rank))

    def share_memory(self, path: str) -> None:
        """The node has the checkpoint, as this process has it."""
        self._memory = {path}

    def take_memory(self, order: TakeMemory) -> None:
        """Order it to fetch a checkpoint in memory."""
        self._memory = set()
        self._link.send(order)

    def pass_on(self, message: NodeMessage) -> None:
        """Tell it what others have made for it."""
        self._link.send(message)

    def tell(self, ranks: tuple[int, ...], message: protocol.Message) -> None:
        """Send a message to ranks, unless it means nothing to another node's.

        That node knows where its copy of a checkpoint in memory is.
        """
        match message:
            case protocol.PeerPages():
                return
            case _ if self.is_here:
                pass
            case protocol.Save(is_quick=True):
                if self._is_to_memory(ranks, message):
                    return
            case protocol.Rejoin(path=path) | protocol.Welcome(resume=path):
                if self._is_elsewhere(ranks, message, path):
                    return
            case _:
                pass
        packed = self._job.packed(message)
        if len(ranks) == len(self.ranks):
            self._link.send(_to_all(packed))
        elif len(ranks) > 1:
            self._link.send(ToRanks(ranks, packed))
        else:
            self._link.send(ToRank(ranks[0], packed))

    def _is_elsewhere(
        self, ranks: tuple[int, ...], message: protocol.Rejoin | protocol.Welcome, path: str
    ) -> bool:
        """Whether these ranks cannot be told yet, or never, as the checkpoint is not there."""
        if not path or path in self._memory:
            return False
        attempts = [(rank, self.workers[rank].attempt) for rank in ranks]
        if is_in_memory(Path(path)):
            why = "is on a node that has no copy of the checkpoint in memory"
            for rank, attempt in attempts:
                self._job.post(ev.RankUnreachable(rank, attempt, why))
            return True
        if isinstance(message, protocol.Welcome):
            for rank, attempt in attempts:
                self._job.offer(path, partial(self._welcome, rank, attempt, message))
            return True
        return False

    def _welcome(
        self, rank: int, attempt: int, message: protocol.Welcome, place: CheckpointPlace | None
    ) -> None:
        """Have a rank resume once the checkpoint is on its node."""
        if self._present(rank, attempt) is None:
            return
        packed = self._job.packed(message)
        if place is None:  # it is for the ranks to say what is wrong with it
            self._link.send(ToRank(rank, packed))
        else:
            self._link.send(ResumeFrom(rank, attempt, packed, place.told(), self._job.seen_s))

    def _is_to_memory(self, ranks: tuple[int, ...], save: protocol.Save) -> bool:
        """Whether these ranks write to memory: the controller's is here, the ranks are not."""
        if not save.parts:
            order = self._job.here_order(self.facts.rank, ranks, save)
            if order is not None:
                self._link.send(order)
            return order is not None
        for rank in ranks:
            try:
                self._link.send(self._job.far_order(rank, save))
            except OSError as error:  # no descriptor is left
                attempt, why = self.workers[rank].attempt, describe_os_error(error)
                self._job.post(not_written(rank, attempt, save, why))
        return True

    def show(self, status: dict[str, object], step: int) -> None:
        """Tell it the state of the whole job, and the newest step of any rank."""
        self._link.send(ShownStatus(status, step))

    def end(self, ended: Ended, timeout_s: float) -> None:
        """The job is over: its msrun ends, too."""
        self._link.send(ended)
        if not self.is_here:  # else it hears that in this loop
            self._link.drain(timeout_s)

    def forsake(self) -> None:
        """It is to do as if this controller were lost."""
        self._link.close()

    def give_up(self, why: str, *, is_lost: bool) -> Iterator[ev.Event]:
        """No rank is started here any more of those that wait for a node, or for the memory.

        Args:
            is_lost: no other node has come in the place of this one.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None and not is_lost:
            return
        for worker in self.awaited():
            worker.ended_at, worker.why = time.time(), why
            yield ev.StartFailed(worker.rank, worker.attempt, why, lost=why if is_lost else "")

    def lose(self, why: str, say: Callable[[str], None]) -> None:
        """The node is lost, and with it its ranks.

        Args:
            say: prints one sentence for people.
        """
        self.lost_why = why
        self._waiting = None
        self._memory = set()  # went with it: what is ordered from now on is for the next node
        over = [
            rank
            for rank, worker in self.workers.items()
            if worker.exit_code is None and self._hooks.has_finished(rank)
        ]
        if over:
            say(f"{ranged(over)} {FINISHED}")
        for worker in tuple(self.workers.values()):
            if worker.exit_code is None and worker.ended_at is None:
                self._job.post(self._lost(worker, why, is_over=worker.rank in over))

    def _lost(self, worker: Worker, why: str, *, is_over: bool) -> ev.Event:
        if not worker.pid:
            worker.ended_at, worker.why = time.time(), why
            return ev.StartFailed(worker.rank, worker.attempt, why, lost=why)
        self._note_end(worker, UNKNOWN_END)
        step = self._hooks.hear_out(worker.rank)
        return ev.WorkerExited(
            worker.rank, worker.attempt, UNKNOWN_END, step, is_over=is_over, lost=why
        )

    # --- what it says ---------------------------------------------------------------------------

    def _hear(self, message: object) -> None:  # noqa: C901, PLR0912  a row for each kind
        self.was_heard = True
        match message:
            case Beats():  # of thousands of nodes each second
                self._hooks.mirror_beats(*message.read())
            case Fact():
                self._on_event(unpack_event(message.event))
            case FromRank():
                said: Any = unpack_said(message.message)
                self._hooks.hear_relayed(said)
            case FromRanks():
                for said in said_by(message, self.ranks):
                    self._hooks.hear_relayed(said)
            case PageSeen():
                self._hooks.mirror(*message.read())
            case PageNews():
                self._hooks.mirror_news(*message.read())
            case UpdatesReady():
                self._hooks.updates_ready(self.facts.rank, message)
            case PagesKept():
                self._hooks.updates_ready(self._job.rank, message)
            case RankUnlinked():
                self._hooks.lost_elsewhere(message.rank, message.attempt)
            case FolderMarked():
                self._hooks.folder_marked(message, self.name)
            case SweptNode():
                self._on_swept(message)
            case TermHeard():
                self._job.term_heard(self.facts, message.number)
            case ToldAgain():
                self._job.told_again(self)
            case PartKept():
                self._job.part_kept(self.facts.rank, message)
            case MemoryTaken():
                if not message.why_not:
                    self._memory.add(message.path)
                self._job.memory_taken(self.facts.rank, message.path, message.why_not)
            case CopyProgressed():
                self._job.post(ev.DumpProgressed(message.dump_id))
            case CopyWritten():
                self._job.copy_written(self.facts.rank, message)
            case _ if isinstance(message, ForLogs):
                self._job.logs.hear_from(self, self.facts.rank, message)
            case _:
                raise TypeError(f"not for the controller's node: {message}")

    def _on_event(self, event: ev.Event) -> None:
        attempt, survivors = self._renewed
        if getattr(event, "attempt", attempt) == attempt - 1:  # it did not know of the new one
            event = renewed(event, attempt, survivors)
        match event:
            case ev.WorkerStarted() if worker := self._present(event.rank, event.attempt):
                worker.pid, worker.started_at = event.pid, time.time()
            case ev.StartFailed() if worker := self._present(event.rank, event.attempt):
                worker.why = event.why
                worker.ended_at, worker.order = time.time(), self._job.next_end()
            case ev.WorkerExited() if worker := self._present(event.rank, event.attempt):
                self._note_end(worker, event.exit_code)
                step = self._hooks.hear_out(event.rank)
                is_over = event.exit_code == -signal.SIGKILL and self._hooks.has_finished(
                    event.rank
                )
                event = ev.WorkerExited(
                    event.rank,
                    event.attempt,
                    event.exit_code,
                    step,
                    event.error,
                    worker.amid,
                    is_over=is_over,
                    fault=event.fault,
                )
            case _:
                pass
        self._job.post(event)

    def _present(self, rank: int, attempt: int) -> Worker | None:
        worker = self.workers.get(rank)
        return worker if worker is not None and worker.attempt == attempt else None

    def _note_end(self, worker: Worker, exit_code: int) -> None:
        worker.exit_code = exit_code
        worker.ended_at, worker.order = time.time(), self._job.next_end()
        self._heard_at[worker.rank] = worker.ended_at, worker.order

    def _on_swept(self, message: SweptNode) -> None:
        if message.attempt != self._sweeping:
            return  # it was given up, and is late
        found = []
        for each in message.evidence:
            evidence = from_json(each)
            if evidence.end.rank in self._heard_at:
                found.append(as_heard(evidence, *self._heard_at[evidence.end.rank]))
        self.evidence = tuple(found)
        self.is_swept = True
        self._job.swept()


def replacement_order(action: do.ReplaceRanks, port: int) -> Order:
    """What all nodes are told of a replacement: who is new. All others of a node live on there."""
    return Order(pack_action(replace(action, survivors=())), port)


@lru_cache(maxsize=1)
def _known(view: JobView) -> JobKnown:
    return JobKnown(view.state.value, *view[1:])


def _order_of(action: do.Action) -> Order:
    return Order(pack_action(action))


def _to_all_of(packed: dict[str, object]) -> ToRanks:
    return ToRanks((), packed)


def _refused(action: do.RefuseRanks) -> frozenset[int]:
    return frozenset(action.ranks)


# the same for all nodes
_order, _ranks, _to_all = Once(_order_of), Once(_refused), Once(_to_all_of)
