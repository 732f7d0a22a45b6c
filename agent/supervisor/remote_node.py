"""Another node, as the controller's node knows it: its ranks' processes, and the line to it."""

from __future__ import annotations

import signal
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from agent.controller import actions as do
from agent.controller import events as ev
from agent.failure.evidence import Evidence
from agent.failure.evidence_json import as_heard, from_json
from agent.nodes.codec import pack_action, unpack_event
from agent.nodes.line import Loss
from agent.nodes.link import NodeLink
from agent.nodes.messages import NodeFacts
from agent.nodes.run_messages import (
    Beats,
    Ended,
    Fact,
    FolderMarked,
    FromRank,
    JobKnown,
    Order,
    PageSeen,
    RankUnlinked,
    ShownStatus,
    SweptNode,
    ToRank,
    pack_said,
    unpack_said,
)
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.job_view import JobView
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

UNKNOWN_END = -signal.SIGKILL  # of a rank whose node is gone: nobody saw it end


class JobPort(Protocol):
    """Who is told of what happens on a node."""

    def post(self, event: ev.Event) -> None:
        """Decide on an event."""

    def next_end(self) -> int:
        """The number of one more worker's end, among those of all nodes."""

    def swept(self) -> None:
        """A node has no process of the attempt any more."""


class RemoteNode:
    """The ranks of one other node."""

    def __init__(self, facts: NodeFacts, ranks: range, link: NodeLink, hooks: HooksBridge) -> None:
        """Take the parts; nothing is heard before :meth:`attach`.

        Args:
            facts: who it is.
            ranks: its ranks.
            link: to it.
            hooks: of all ranks.
        """
        self.facts = facts
        self.ranks = ranks
        self.workers: dict[int, Worker] = {}
        """Of the present attempt."""
        self.evidence: tuple[Evidence, ...] = ()
        """What it found of the ends of the last attempt that was swept."""
        self.is_swept = True
        """Whether no process is left that a sweep was ordered for."""
        self._link = link
        self._hooks = hooks
        self._known: JobView | None = None
        self._heard_at: dict[int, tuple[float, int]] = {}  # rank -> of its end: when, and which

    @property
    def name(self) -> str:
        """The node, for people."""
        return f"node {self.facts.rank} ({self.facts.host})"

    @property
    def is_there(self) -> bool:
        """Whether it can be told anything."""
        return self._link.is_open

    def attach(self, loop: Any, job: JobPort, lost: Callable[[RemoteNode, Loss], None]) -> None:
        """Listen on ``loop``."""
        self._job = job
        self._link.attach(loop, self._hear, lambda loss: lost(self, loss))

    def know(self, view: JobView) -> None:
        """Tell it what became of the job, if that is new to it."""
        if view != self._known:
            self._known = view
            self._link.send(JobKnown(view.state.value, view.attempt, view.has_hooks))

    def act(self, action: do.Action, view: JobView) -> None:
        """Order what concerns the processes of this node."""
        self.know(view)
        match action:
            case do.StartAttempt():
                self._begin(action)
            case do.SignalRanks():
                ranks = tuple(rank for rank in action.ranks if rank in self.ranks)
                if not ranks:
                    return
                action = do.SignalRanks(ranks, action.signum, action.reason)
            case do.RefuseRanks():
                for rank in action.ranks:
                    if rank in self.workers:
                        self.workers[rank].was_stopped = True
            case do.Sweep():
                self.is_swept = not self._link.is_open
            case _:
                pass
        self._link.send(Order(pack_action(action)))

    def _begin(self, action: do.StartAttempt) -> None:
        resumes = action.resume is not None
        self.workers = {
            rank: Worker(rank, local_rank, action.attempt, resumes=resumes)
            for local_rank, rank in enumerate(self.ranks)
        }
        self.evidence = ()
        self._heard_at = {}

    def tell(self, rank: int, message: protocol.Message) -> None:
        """Send a message to a rank, unless it means nothing to another node's."""
        if not isinstance(message, protocol.Replicated | protocol.PeerPages):
            self._link.send(ToRank(rank, pack_said(message)))

    def show(self, status: dict[str, object]) -> None:
        """Tell it the state of the whole job."""
        self._link.send(ShownStatus(status))

    def end(self, exit_code: int, reason: str, timeout_s: float) -> None:
        """The job is over: its msrun ends, too."""
        self._link.send(Ended(exit_code, reason))
        self._link.drain(timeout_s)

    def lost_events(self, why: str) -> Iterator[ev.Event]:
        """What the loss of this node means for its ranks."""
        for worker in tuple(self.workers.values()):
            if worker.exit_code is None and worker.ended_at is None:
                if not worker.pid:
                    worker.ended_at, worker.why = time.time(), why
                    yield ev.StartFailed(worker.rank, worker.attempt, why)
                    continue
                self._note_end(worker, UNKNOWN_END)
                step = self._hooks.hear_out(worker.rank)
                yield ev.WorkerExited(worker.rank, worker.attempt, UNKNOWN_END, step, lost=why)

    # --- what it says ---------------------------------------------------------------------------

    def _hear(self, message: object) -> None:
        match message:
            case Fact():
                self._on_event(unpack_event(message.event))
            case FromRank():
                said: Any = unpack_said(message.message)
                self._hooks.hear_relayed(said, b64decode(message.page))
            case PageSeen():
                self._hooks.mirror(message.rank, message.attempt, b64decode(message.page))
            case RankUnlinked():
                self._hooks.lost_elsewhere(message.rank, message.attempt)
            case FolderMarked():
                self._hooks.folder_marked(message, self.name)
            case Beats():
                for rank, beat in message.beats.items():
                    self._hooks.mirror_beat(int(rank), b64decode(beat))
            case SweptNode():
                self._on_swept(message)
            case _:
                raise TypeError(f"not for the controller's node: {message}")

    def _on_event(self, event: ev.Event) -> None:
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
        found = []
        for each in message.evidence:
            evidence = from_json(each)
            if evidence.end.rank in self._heard_at:
                found.append(as_heard(evidence, *self._heard_at[evidence.end.rank]))
        self.evidence = tuple(found)
        self.is_swept = True
        self._job.swept()
