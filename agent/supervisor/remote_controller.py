"""The controller, as a node sees it that is not the controller's: a line to that node."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import NamedTuple

from agent.arrivals.successors import HEAD
from agent.arrivals.takeover import SuccessorWatch
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health.heartbeats import MANY_NODES, Heartbeats
from agent.health.mute_controller import MuteController
from agent.hooks.rank_links import Said
from agent.launch.scheduler_watch import SchedulerWatch, may_train_on
from agent.machine.loop_calls import until_closed
from agent.nodes.checkpoint_copy import CheckpointFetcher, CheckpointPlace
from agent.nodes.codec import pack_event, unpack_action
from agent.nodes.join import JoinedNode
from agent.nodes.line import LIMIT_S, MUTE, Loss, LossKind, plain_address
from agent.nodes.link import NodeLink
from agent.nodes.messages import StillThere
from agent.nodes.run_messages import (
    BudgetKnown,
    CheckpointKnown,
    Ended,
    Fact,
    ForHooks,
    JobKnown,
    LogAsked,
    LogRead,
    NodeFacts,
    NodesKnown,
    Order,
    ResumeFrom,
    ShownStatus,
    SweptNode,
    TakeMemory,
    TermHeard,
    TermKnown,
    ToldAgain,
    ToRank,
    ToRanks,
    Wake,
    unpack_said,
)
from agent.nodes.tls import PLAIN, Security
from agent.rank_logs.node_logs import NodeLogs
from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.seat.records import NO_TERM
from agent.spec.spent_budget import ToldBudget
from agent.spread.keeper import MemoryKeeper
from agent.supervisor.head import Deputy
from agent.supervisor.hooks_relay import HooksRelay
from agent.supervisor.job_view import Holders, JobView
from agent.supervisor.supervisor import Supervisor
from agent.text.wording import duration
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

SAVE_S = 1800.0  # for ranks that save by themselves; as the forkserver gives them on one node
KILL_S = 30.0  # for killed ranks to be gone: a device may keep one for good
BRING_S = 1500.0  # for a checkpoint to come here: a rank waits longer for the answer
LONG_S = 3.0  # a replacement takes less, as a rule, and does not share the line with copies then
ELSEWHERE_S = 60.0  # for ranks of other nodes to notice that one here died, and to save
LOST = "a rank is lost, and no scheduler is there"
ASKED = "it is asked for, and no scheduler is there"
FAILED_EXIT = 1
TRAINS = {JobState.RUNNING, JobState.HOLDING}  # ranks hold a step that others would save


class _Unsettled(NamedTuple):
    """Another node has taken the part of the lost one, whose ranks are not replaced yet."""

    loss: Loss  # of the line to the lost one
    head: int  # its place
    attempt: int  # that the ranks were in


Look = Callable[
    [int, Callable[[JoinedNode], object], Callable[[str, bool], object]], SchedulerWatch
]
"""Begins to look for the controller's msrun, for ranks in this attempt; takes what takes the line
to the new one, and what takes why they cannot train on."""


class RemoteController:
    """What happens here goes to the controller's node, what it orders is done."""

    def __init__(
        self,
        link: NodeLink,
        hooks: HooksRelay,
        logs: NodeLogs,
        evidence: Callable[[Sequence[Worker]], list[dict[str, object]]],
        show_status: Callable[[dict[str, object]], None],
        say: Callable[[str], None],
        grace_s: float,
        host: str,
        lost: Callable[[Loss, int, bool], bool],
        look: Look | None = None,
        successors: Deputy | None = None,
        nodes: tuple[NodeFacts, ...] = (),
        head: int = 0,
        node_rank: int = 0,
        security: Security = PLAIN,
        keep: int = 0,
        complete: Callable[[CompleteCheckpoint], object] = lambda _: None,
        spent: Callable[[ToldBudget], object] = lambda _: None,
        patience: Callable[[], float] = lambda: inf,
    ) -> None:
        """Take the parts; nothing is heard before :meth:`begin`.

        Args:
            hooks: of the ranks of this node.
            logs: the same, and questions for others.
            evidence: finds what ended workers left, as JSON.
            show_status: writes the state of the whole job for those who ask on this node.
            say: prints one sentence for people.
            grace_s: for ranks to exit, if the controller's node is gone.
            lost: called once that node is lost, with why, the newest step of a rank here, and
                whether ranks here save their state: whether this node takes part in what follows.
            look: begins to look for that node's msrun if it has ended. ``None``: ranks do not
                train without it.
            successors: finds another controller, if that node has ranks, and they are lost with it.
            nodes: those that take part.
            head: the place of the controller's.
            node_rank: that of this one.
            security: of connections to it.
            keep: how many checkpoints stay beside one that was copied; 0: all.
            complete: takes each checkpoint of the job that is complete.
            spent: takes what the job has used up of its budgets, as that becomes more.
            patience: how many times the limit the controller's msrun may say nothing.
        """
        self._look = look
        self._successors = successors
        self._unsettled: _Unsettled | None = None
        self._seeks = False  # whether ranks wait for another one
        self._succeeded_at = -1  # the newest step of a rank here as that happened last
        # while ranks train without it, or wait for another one
        self._alone: tuple[Loss, SchedulerWatch | SuccessorWatch] | None = None
        self._security = security
        self._keep = keep
        self._complete = complete
        self._spent = spent
        self._patience = patience
        self._link = link
        self._hooks = hooks
        self._logs = logs
        self._evidence = evidence
        self._show_status = show_status
        self._shown: dict[str, object] = {}  # the newest
        self._shown_step = 0
        self._say = say
        self._grace_s = grace_s
        self._host = host
        self._take_part = lost
        self._node_rank = node_rank
        self._beats = Heartbeats(self._tell_beats, self._is_rare, lambda: link.limit_s)
        self._is_asked = False  # somebody wants the job to end
        self._is_hurried = False  # somebody wants the ranks, which save by themselves, to end
        self.view = JobView()
        self.ending: Ended | None = None
        """How the job ended; ``None``: it has not."""
        self.best_step = 0
        """The newest step that a rank of the job has committed in any attempt, as far as known."""
        self.goes_on = False
        """Whether the job goes on as another one: the controller's node is lost, or says so."""
        self.patience_s = 0.0
        """Until the step must be saved by which it goes on: ranks elsewhere may be at it."""
        self.nodes = nodes
        """Those that take part."""
        self.head = head
        """The place of the controller's node among them."""
        self.has_run = False
        """Whether all ranks have trained since this node has its place."""
        self.term = NO_TERM
        """Of the controller's seat, as the store has it; empty: that does not count."""

    def attach(self, loop: asyncio.AbstractEventLoop, node: Supervisor) -> None:
        """Act on ``node``, in ``loop``."""
        self._loop = loop
        self._node = node
        call_soon = until_closed(loop.call_soon_threadsafe)
        written = self._hooks.writes.here
        self._memory = MemoryKeeper(
            self._host,
            call_soon,
            self._link.send,
            self._tell_came,
            self._hooks.ranks,
            written,
            self._security,
        )
        self._hooks.as_here = self._memory.as_here
        self._hooks.bring_memory = self._memory.bring
        self._mute = MuteController(
            self._link,
            self._say,
            self._lose_mute,
            self._patience,
            lambda: self.nodes[self.head] if self.nodes else None,
            self._link.limit_s or LIMIT_S,
        )
        self._checkpoints = CheckpointFetcher(call_soon, self._security, self._say, self._keep)

    def begin(self) -> None:
        """The node is ready: hear what it is to do."""
        self._link.attach(self._loop, self._hear, self._lost)
        self._hooks.watch(self._mute.is_in_doubt)
        self._logs.attach(self._loop, self._link.send, lambda: self._link.is_open)
        self._beats.attach(self._loop)
        self._mute.attach(self._loop)

    def post(self, event: ev.Event) -> None:
        """Tell what happened; what follows from it will be ordered."""
        if self._link.is_open:
            self._is_asked |= isinstance(event, ev.StopRequested)  # perhaps nobody hears it
            self._link.send(Fact(pack_event(event)))
        elif self._alone is not None:
            self._hear_alone(event)
        elif isinstance(event, ev.StopRequested):
            self._hurry(is_now=event.is_now or self._is_hurried)
        elif isinstance(event, ev.WorkerExited | ev.StartFailed):
            if isinstance(event, ev.WorkerExited) and event.exit_code < 0:
                self._hooks.leave_pages((event.rank,), is_late=True)  # amid what it was to save
            if not self._node.living():
                self._finish()

    def ended(self, state: JobState, gone: tuple[Worker, ...]) -> None:  # noqa: ARG002
        """These workers are gone for good: tell what they left."""
        self._logs.rest()
        self._link.send(SweptNode(self.view.attempt, tuple(self._evidence(gone))))

    def close(self) -> None:
        """The job is over."""
        if self._alone is not None:
            self._stop_looking()
        self._mute.close()
        self._memory.forget()
        self._logs.close()
        self._link.close()

    def _tell_beats(self) -> bool:
        if is_open := self._link.is_open:
            self._hooks.tell_beats()
        return is_open

    def _is_rare(self) -> bool:
        return self.view.state.is_interrupted and len(self.nodes) > MANY_NODES

    def _lose_mute(self, why: str) -> None:
        self._link.give_up(MUTE._replace(why=why))

    def _know(self, message: JobKnown) -> None:
        state = JobState(message.state)
        self.view = JobView(state, *message[1:])
        self.has_run |= state is JobState.RUNNING
        was = self._unsettled
        if was is not None and state is JobState.RUNNING and message.attempt > was.attempt:
            self._unsettled = None
        self._beats.look()
        self._node.decided(self.view, Holders())

    def _hear(self, message: object) -> None:  # noqa: C901, PLR0912  a row for each kind
        match message:
            case JobKnown():
                self._know(message)
            case ToRank() | ToRanks() if self._memory.lacks() and _is_welcome(message):
                self._welcome(message)
            case _ if isinstance(message, ForHooks):
                self._hooks.hear(message)
            case NodesKnown():
                self.nodes = message.nodes
            case CheckpointKnown(path, step):
                if not self.view.is_apart:  # else it is on another disk, and never was here
                    self._complete(CompleteCheckpoint(path, step))
            case BudgetKnown():
                self._spent(message.spent)
            case TermKnown():
                self.term = message.term
                self._link.send(TermHeard(message.number))
            case Order():
                self._obey(unpack_action(message.action), message.port)
            case Wake():
                self._node.wake(message.rank)
            case StillThere():
                self._mute.hear()
            case TakeMemory():
                self._memory.take(message)
            case ResumeFrom():
                self._bring(message)
            case LogAsked() | LogRead():
                self._logs.hear(message)
            case ShownStatus():
                self._shown, self._shown_step = message.status, message.step
                self.best_step = max(self.best_step, message.step)
                self._show_status(message.status)
            case Ended():
                self.ending, self.goes_on = message, message.goes_on
                if message.state and self._shown:
                    self._show_status({**self._shown, "state": message.state})
                self._node.finish()
            case _:
                raise TypeError(f"not for a node: {message}")

    def _obey(self, action: do.Action, port: int) -> None:
        if port:
            self._node.starter.meet_at(port)
        if isinstance(action, do.ReplaceRanks):
            action = self._of_here(action)
            self._loop.call_later(LONG_S, self._complete_memory)
        if isinstance(action, do.ForgetMemory):
            self._memory.forget()
            self._hooks.writes.close()
        else:
            self._node.act(action)

    def _of_here(self, action: do.ReplaceRanks) -> do.ReplaceRanks:
        """All nodes are told alike who is new; who is not lives on."""
        ranks = {worker.rank for worker in self._node.workers()}
        new = tuple(rank for rank in action.newcomers if rank in ranks)
        return replace(action, newcomers=new, survivors=tuple(sorted(ranks.difference(new))))

    def _welcome(self, message: ToRank | ToRanks) -> None:
        """Welcome new ranks once the tensors are here, which were not to be read on this node."""
        attempt = self.view.attempt

        def answer(why: str) -> None:
            if attempt != self.view.attempt:
                return
            if not why:
                self._hooks.hear(message)
                return
            why = f"is on a node to which the state cannot be brought: {why}"
            all_here = tuple(worker.rank for worker in self._node.workers())
            ranks = (message.rank,) if isinstance(message, ToRank) else message.ranks or all_here
            for rank in ranks:
                self.post(ev.RankUnreachable(rank, attempt, why))

        self._memory.bring_own(answer)

    def _complete_memory(self) -> None:
        if self.view.state is not JobState.RUNNING:
            self._memory.complete()

    def _tell_came(self, inode: int, absent: tuple[int, ...]) -> None:
        """Tensors have come of the copy in memory that ranks know by this inode."""
        told = protocol.MemoryBrought(inode, absent=list(absent))
        for rank in self._hooks.ranks:
            self._hooks.tell(rank, told)

    def _bring(self, order: ResumeFrom) -> None:
        """Let a rank resume once this node has the checkpoint."""
        place = CheckpointPlace.read(order.place)
        assert place is not None
        late = f"the checkpoint {place.path} has not come to this node within {duration(BRING_S)}"
        is_answered = False

        def answer(why: str) -> None:
            nonlocal is_answered
            if is_answered or order.attempt != self.view.attempt:
                return
            is_answered = True
            timer.cancel()
            if why:
                self.post(ev.StartRefused(order.attempt, why, (order.rank,)))
            else:
                self._hooks.tell(order.rank, unpack_said(order.message))

        timer = self._loop.call_later(BRING_S, answer, late)
        self._checkpoints.have(place, self._host, order.patience_s, answer)

    def _lost(self, loss: Loss) -> None:
        """Without it nothing is decided; while nothing has to be, the ranks may go on."""
        self._mute.close()
        if self._beats.was_stopped:  # that node lives, and goes on without this one, or is done
            loss = loss._replace(kind=LossKind.GIVEN_UP)
        if self._unsettled is not None:  # what has befallen the one before counts
            loss, self.head, _ = self._unsettled
            self._unsettled = None
            self._forsake(loss)
            return
        is_asked = self.view.is_asked or self._is_asked
        is_running = self.view.state is JobState.RUNNING and bool(self._node.living())
        if self._successors is not None and self._await_successor(
            self._successors, loss, is_calm=is_running and not is_asked and self._hooks.may_wait
        ):
            return
        is_calm = is_running and self._hooks.are_calm
        if self._look is None or not may_train_on(loss, is_calm=is_calm, is_asked=is_asked):
            self._forsake(loss)
            return
        self._say(
            f"the scheduler {loss.why}: the ranks train on without it. To have them replaced if "
            "they die, start it again with the same command"
        )
        self._alone = loss, self._look(self.view.attempt, self._found, self._end_training)
        self._hooks.be_alone(self._disturbed)

    def _await_successor(self, successors: Deputy, loss: Loss, *, is_calm: bool) -> bool:
        """Another node may decide from now on; whether the ranks here wait for that."""
        reached = self._hooks.newest_step()
        if reached == self._succeeded_at:  # the step itself may be what kills the node
            return False
        if successors.why_not(loss, self.nodes, self.head, is_calm=is_calm):
            return False
        look = self.view.attempt, self.nodes, self.head, self._found, self._no_successor
        if (watch := successors.look(*look)) is None:
            return False
        self._succeeded_at = reached
        self._hooks.be_alone(self._disturbed, briefly=True)
        self._alone, self._seeks = (loss, watch), True
        return True

    def _no_successor(self, why: str, _certain: bool) -> None:
        if self._alone is not None:
            self._say(f"{why}: the nodes meet again")
            self._end_alone("")

    def _end_training(self, why: str, certain: bool) -> None:
        """The ranks cannot train on.

        Args:
            certain: it is not only that another worker's msrun has ended, which it may have done
                with the training: a rank that is in no step is let alone then.
        """
        if self._hooks.are_in_a_step or (certain and self._hooks.are_in_script):
            self._end_alone(why)

    def _disturbed(self, said: Said) -> None:
        """A rank has said what only the controller could answer."""
        if isinstance(said, protocol.ExitRequested):
            self._is_asked = True
        self._end_alone(ASKED if self._is_asked else LOST)

    def _hear_alone(self, event: ev.Event) -> None:
        """Something happens while the ranks train without the controller."""
        match event:
            case ev.StopRequested() | ev.ExitRequestedByFile():
                self._is_asked = True
                self._end_alone(ASKED)
            case ev.SignalReceived():
                ranks = tuple(self._node.living())
                self._node.act(do.SignalRanks(ranks, event.signum, "msrun has received it"))
            case ev.WorkerExited(exit_code=code) if code or not self._node.living():
                self._end_alone(LOST)
            case _:
                pass

    def _end_alone(self, why: str) -> None:
        """What follows takes a controller: what is known of the loss of the last one counts."""
        if self._alone is None:
            return
        if self._seeks:
            why = ""  # no other one but the loss of that node
        loss = self._stop_looking()
        self._hooks.be_alone(None)
        if not self._node.living() and not self._dead:
            self.ending = Ended(0, "every rank here exited with 0, and no scheduler was there")
            self._finish()
            return
        self._forsake(loss, why)

    @property
    def _dead(self) -> tuple[int, ...]:
        """Ranks of this node that did not come to their end."""
        return tuple(each.rank for each in self._node.workers() if each.exit_code)

    @property
    def _is_to_go_on(self) -> bool:
        """Whether something is left to do: not if every rank here has come to its end."""
        codes = [each.exit_code for each in self._node.workers()]
        return any(code != 0 for code in codes)

    def _stop_looking(self) -> Loss:
        assert self._alone is not None
        (loss, watch), self._alone = self._alone, None
        self._seeks = False
        watch.close()
        return loss

    def _found(self, joined: JoinedNode) -> None:
        """The scheduler was started again, and all workers are there: it decides from now on."""
        if self._alone is None:
            joined.line.connection.close()
            return
        loss = self._stop_looking()
        self._hooks.be_alone(None)
        self.nodes = joined.roster.nodes
        self._link.open(joined.line)
        with suppress(OSError):  # it is lost again, as will be heard
            host = plain_address(joined.line.connection.getpeername()[0])
            self._host = host
            self._memory.move(host)
            self._hooks.writes.move(host)
        self.begin()
        if HEAD in joined.settings:
            self._follow(loss, int(str(joined.settings[HEAD])), joined)
        else:
            self._say("the scheduler is there again")
        for worker in self._node.workers():
            started = ev.WorkerStarted(worker.rank, worker.attempt, worker.pid)
            self._link.send(Fact(pack_event(started)))
        self._hooks.say_again()
        for worker in self._node.workers():
            if worker.exit_code is not None:
                exited = ev.WorkerExited(worker.rank, worker.attempt, worker.exit_code)
                self._link.send(Fact(pack_event(exited)))
        self._link.send(ToldAgain())

    def _follow(self, loss: Loss, head: int, joined: JoinedNode) -> None:
        """Another node decides, where the ranks meet as well."""
        self._unsettled = _Unsettled(loss, self.head, self.view.attempt)
        self.head = head
        self._hooks.meets_at = self._host
        self._memory.is_controllers = self._node_rank == head
        self._node.starter.move(int(str(joined.settings["store_port"])), self._host)
        if self._node_rank != head:
            there = self.nodes[head]
            self._say(
                f"the controller's node {loss.why}: node {head} ({there.host}) has its part, and "
                "controls and reports the job; the ranks here live on"
            )

    def _forsake(self, loss: Loss, why: str = "") -> None:
        """End what runs here."""
        why = why or f"the controller's node {loss.why}"
        self.ending = Ended(FAILED_EXIT, why)
        self._node.settle()  # a rank may have died with it
        living = self._node.living()
        is_asked = self.view.is_asked or self._is_asked
        was, self.view = self.view.state, self.view._replace(state=JobState.STOPPING)
        is_proven = loss.kind is LossKind.PROOF
        told = self._hooks.forsake(why, is_proven=is_proven, memory=self._memory.path)
        saving = tuple(rank for rank in told if rank in living)
        # where nodes save into different folders, others would not find them, nor save without them
        is_read = self._hooks.may_save and not self.view.is_apart
        if is_read and self._is_to_go_on and (was.is_interrupted or was in TRAINS):
            self._hooks.leave_pages(self._dead, is_last=not saving)
        if not is_asked and self._is_to_go_on:
            # where no rank holds the step, others elsewhere do
            self.patience_s = 0.0 if saving else ELSEWHERE_S
            saves = bool(saving) or (self.view.has_hooks and self._hooks.may_save)
            reached = max(self._hooks.newest_step(), self._shown_step)
            self.best_step = max(self.best_step, self._succeeded_at, reached)
            self.goes_on = self._take_part(loss, reached, saves)
        if not living:
            self._finish()
            return
        self._node.act(do.CancelStarts(why, now=True))
        others = tuple(rank for rank in living if rank not in saving)
        if saving:
            # they hold from now on, so nothing is trained twice if others get their places
            self._say(f"{why}: the ranks of this node save their step by themselves, and end")
            self._loop.call_later(SAVE_S, self._kill, why)
        else:
            self._say(f"{why}: the ranks of this node are stopped")
        if others:
            is_urgent = loss.kind is not LossKind.PROOF  # others may soon be started instead
            signum = signal.SIGKILL if is_urgent else signal.SIGTERM
            self._node.act(do.SignalRanks(others, signum, why))
            self._loop.call_later(self._grace_s, self._kill, why, others)

    def _hurry(self, *, is_now: bool) -> None:
        """Whoever ends the nodes of a job one by one gives each some time to save."""
        self._is_hurried, self.goes_on, why = True, False, "it is asked for"
        if is_now:
            self._kill(why)
        else:
            self._say(f"the ranks of this node save their step, for {self._grace_s:g} s at most")
            self._loop.call_later(self._grace_s, self._kill, why)

    def _kill(self, why: str, ranks: Sequence[int] | None = None) -> None:
        """Kill these ranks, or all, if they live; all are given up after a while."""
        living = self._node.living()
        killed = tuple(rank for rank in living if ranks is None or rank in ranks)
        self._node.act(do.SignalRanks(killed, signal.SIGKILL, why))
        if killed == tuple(living):
            self._loop.call_later(KILL_S, self._finish)

    def _finish(self) -> None:
        self._node.finish()


def _is_welcome(message: ToRank | ToRanks) -> bool:
    return isinstance(unpack_said(message.message), protocol.Welcome)
