"""The controller's promises, checked at every step of a simulated schedule.

Kept in the plainest way, not in the controller's: what it was told so far, and what a person who saw it
all would expect. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL, SIGUSR1, SIGUSR2
from typing import TYPE_CHECKING, Any, NoReturn

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import Job
from agent.controller.states import JobState
from support.simulator.copies import CopyWatch
from support.simulator.dump_promises import BUSY, DumpWatch
from support.simulator.exit_promises import ExitWatch
from support.simulator.kept import KeptWatch
from support.simulator.kinds import is_order
from support.simulator.memory_promises import completed
from support.simulator.replace_promises import ReplaceWatch
from support.simulator.same import SameWatch
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.node import Node

ENDING = (JobState.STOPPING, JobState.KILLING)
WAITING = (JobState.STARTING, JobState.HOLDING, *BUSY, JobState.REPLACING, *ENDING)
LONGEST_ATTEMPT_S = 100.0  # starting and living; grace and kill come on top
LONGEST_DUMP = 10.0  # times the patience, for each rank


class BrokenPromiseError(AssertionError):
    """The controller broke a promise; `simulate(seed)` shows it again."""


class Watch:
    """The promises, checked at every step."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.starts = 0
        self.attempt = -1
        self.told_to_stop = False  # this attempt's ranks, by anyone
        self.state_since = 0.0
        self.waited_s = 0.0  # in the state before this one
        self.first_failed: int | None = None
        self.is_first_raised = False
        self.was_frozen = False  # this attempt's ranks, or told to write
        self.running: set[int] = set()  # ranks the controller was told are alive
        self.exits: dict[int, int] = {}
        self.heard_of: set[int] = set()  # ranks whose start was answered
        self.finish: do.Finish | None = None
        self.actions: Sequence[do.Action] = ()  # the answer to what was heard last
        self.dump = DumpWatch(self)
        self.stop = ExitWatch(self)
        self.replacing = ReplaceWatch(self)
        self.same = SameWatch(self)
        self.copies = CopyWatch(self)
        self.kept = KeptWatch(self)
        self.event: ev.Event | None = None

    def broken(self, promise: str) -> NoReturn:
        story = self.node.story
        raise BrokenPromiseError(
            f"simulate({story.seed}) at {self.node.now:.3f} s: {promise}\n  policy: {story.policy}\n"
            + "\n".join(f"  {each}" for each in (*story.events[-8:], *story.actions[-8:]))
        )

    def heard(self, before: Job, event: ev.Event, actions: Sequence[do.Action]) -> None:
        """Keep, in the plainest way, what the controller must now know."""
        if self.finish is not None:
            if self.node.job != before:
                self.broken("something changed after the end")
            return
        self.actions, self.event = actions, event
        is_old = getattr(event, "attempt", self.attempt) != self.attempt
        if is_old and (actions or self.node.job != before):
            self.broken(f"{event} of another attempt than {self.attempt} changes something")
        self.dump.heard(before, event)
        self.heard_of_rank(before, event)
        self.same.heard(before, event, actions)
        self.stop.heard(before, event, actions)
        self.replacing.heard(before, event, actions)
        self.copies.heard(before, event)
        self.kept.heard(before, event)
        completed(self.dump, event)
        self.moved(before.state, self.node.job.state)
        self.left_out(before, event, actions)

    def heard_of_rank(self, before: Job, event: ev.Event) -> None:
        match event:
            case protocol.Raised() if event.rank in self.dump.held:
                if self.first_failed is None and not self.told_to_stop:
                    self.first_failed, self.is_first_raised = event.rank, True
            case ev.WorkerStarted() if self.is_news(event, self.heard_of):
                self.heard_of.add(event.rank)
                self.running.add(event.rank)
            case ev.StartFailed() if self.is_news(event, self.heard_of):
                self.heard_of.add(event.rank)
                self.failed(event.rank)
            case ev.RankHung() if before != self.node.job:
                self.failed(event.rank)
            case ev.WorkerExited() if self.is_news(event, self.exits):
                self.running.discard(event.rank)
                self.exits[event.rank] = event.exit_code
                self.copies.lost(event)
                if event.exit_code != 0 and event.rank not in self.replacing.killed:
                    self.failed(event.rank, may_have_raised=event.rank in self.dump.held)

    def left_out(self, before: Job, event: ev.Event, actions: Sequence[do.Action]) -> None:
        """Nobody is forgotten: whoever exists when the job is stopped or killed hears of it."""
        now = self.node.job.state
        if now not in ENDING:
            return
        entered = now is not before.state
        expected = self.running if entered else set()
        if isinstance(event, ev.WorkerStarted) and before != self.node.job:
            expected = {event.rank}
        heard = {
            rank
            for each in actions
            if isinstance(each, do.SignalRanks | do.RefuseRanks)
            or is_order(each, protocol.Release | protocol.Leave)
            for rank in each.ranks
        }
        missed = expected - heard
        if missed:
            self.broken(f"ranks {sorted(missed)} do not hear that the job is {now.value}")
        awaited = len(self.heard_of) < len(self.node.policy.ranks)
        called_off = any(isinstance(each, do.CancelStarts) for each in actions)
        if entered and now is JobState.STOPPING and awaited and not called_off:
            self.broken("starts go on while the job is stopping")

    def is_news(self, event: Any, known: Any) -> bool:
        return event.attempt == self.attempt and event.rank not in known

    def failed(self, rank: int, may_have_raised: bool = False) -> None:
        """The first is to blame; but an exception may be a consequence of a death not known yet."""
        overrules = self.is_first_raised and not may_have_raised
        if (self.first_failed is None or overrules) and not self.told_to_stop:
            self.first_failed, self.is_first_raised = rank, False

    def moved(self, old: JobState, new: JobState) -> None:
        if old is new:
            return
        waited_s = self.node.now - self.state_since
        orders = 1 + (self.dump.again is not None)
        if old is JobState.FREEZING and waited_s > orders * self.node.policy.dump.answer_s + 1e-6:
            self.broken(f"frozen for {waited_s} s")
        self.was_frozen = self.was_frozen or new in BUSY
        if new in ENDING:
            self.told_to_stop = True
            closes = any(isinstance(each, do.AbandonDump) for each in self.actions)
            if self.dump.open and not closes:
                self.broken(f"{new} while a dump is open")
        is_early = waited_s < self.stop.patience_s - 1e-6 and not self.stop.is_now
        if new is JobState.KILLING and is_early:
            self.broken(f"killed after {waited_s} s of grace")
        self.waited_s, self.state_since = self.node.now - self.state_since, self.node.now

    def ordered(self, action: do.Action) -> None:
        if self.finish is not None:
            self.broken(f"{action} after the end")
        self.stop.ordered(action)
        self.dump.ordered(action)
        self.replacing.ordered(action)
        match action:
            case do.StartAttempt():
                self.dump.start(action)
                self.start(action)
            case do.SignalRanks():
                self.signal(action)
            case do.CancelStarts():
                if len(self.heard_of) == len(self.node.policy.ranks):
                    self.broken("starts are called off, but none is awaited")
            case do.SetDeadline():
                job = self.node.job
                if (action.state, action.attempt) != (job.state, job.attempt):
                    self.broken(f"{action} does not belong to {job.state} of {job.attempt}")
                if action.state not in WAITING and action.after_s is not None:
                    self.broken(f"{action}: nothing is awaited there")
            case do.Finish():
                self.finish = action
                self.end(action)
                self.dump.end(action)

    def start(self, action: do.StartAttempt) -> None:
        if action.attempt != self.attempt + 1:
            self.broken(f"attempt {action.attempt} begins after {self.attempt}")
        if self.starts > self.node.policy.max_restarts:
            self.broken("the restart budget is exceeded")
        if self.stop.is_asked:
            self.broken("an attempt begins after a stop was asked for")
        if self.node.alive() or self.node.owed:
            self.broken("an attempt begins while ranks of an earlier one are alive")
        self.starts += 1
        self.attempt = action.attempt
        self.replacing.begin()
        self.same.begin()
        self.copies.begin()
        self.kept.restart()
        self.told_to_stop = self.was_frozen = False
        self.first_failed = None
        self.is_first_raised = False
        self.running.clear()
        self.exits.clear()
        self.heard_of.clear()

    def begin_round(self, action: do.ReplaceRanks) -> None:
        """Newcomers are awaited, the others live on."""
        self.attempt = action.attempt
        self.kept.begin()
        self.is_first_raised = False
        for rank in action.newcomers:
            self.exits.pop(rank, None)
            self.heard_of.discard(rank)
        self.same.begin_round(action)
        self.dump.begin_round()

    def went_on(self) -> None:
        """All train again: the next failure is another one."""
        self.first_failed, self.was_frozen = None, False
        self.stop.has_failed = False

    def signal(self, action: do.SignalRanks) -> None:
        dead = set(action.ranks) - self.running
        if dead or not action.ranks:
            self.broken(f"ranks {sorted(dead)} are not alive, yet: {action}")
        state = self.node.job.state
        if action.signum not in {SIGKILL, SIGUSR1, SIGUSR2} and self.dump.held & {*action.ranks}:
            self.broken(f"{action}: a rank that is held would not leave with its own code")
        if action.signum == SIGKILL and state is not JobState.KILLING:
            self.check_kill(action)
        if state is JobState.KILLING and action.signum not in {SIGKILL, SIGUSR1, SIGUSR2}:
            self.broken(f"signal {action.signum} while {state}")

    def check_kill(self, action: do.SignalRanks) -> None:
        """Without a request or a vain wait only those that hang, or are in a round's way."""
        is_hung = isinstance(self.event, ev.RankHung) and action.ranks == (self.event.rank,)
        is_round = self.node.job.state is JobState.REPLACING
        if self.node.job.state is JobState.STOPPING and self.kept.may_kill(action):
            return
        if not is_hung and not (is_round and set(action.ranks) <= self.replacing.gone):
            self.broken(f"{action} while {self.node.job.state}")

    def end(self, finish: do.Finish) -> None:
        """The exit code is what a person would say who saw it all."""
        ranks = self.node.policy.ranks
        first = self.first_failed
        succeeded = len(self.exits) == len(ranks) and not any(self.exits.values())
        stuck = len(self.exits.keys() | (self.heard_of - self.running)) < len(ranks)
        if succeeded and not (self.told_to_stop or self.was_frozen) and first is None:
            expected = (JobState.SUCCEEDED, 0)
        elif stuck or not self.stop.is_asked:
            expected = (JobState.FAILED, 2 if self.dump.is_refused and not stuck else 1)
        else:
            expected = (JobState.STOPPED, self.stop.exit_code())
        if (finish.state, finish.exit_code) != expected or finish.state is not self.node.job.state:
            self.broken(f"{finish}, but what happened is {expected}")
        if stuck and (not self.told_to_stop or "cannot be killed" not in finish.reason):
            self.broken(f"{finish} while ranks are alive")
        if stuck and self.waited_s < self.node.policy.timeouts.kill_s - 1e-6:
            self.broken(f"{finish} only {self.waited_s} s after SIGKILL")
        blamed = first is None or finish.reason.startswith(f"rank {first} ")
        blamed = blamed or finish.reason.startswith("after the replacement of ")
        if finish.state is JobState.FAILED and not blamed:
            self.broken(f"{finish} does not blame rank {first}, the first that failed")

    def over(self) -> None:
        """Nothing will happen any more."""
        policy = self.node.policy
        ended_at = self.node.story.ended_at
        if self.finish is None or ended_at is None:
            self.broken(f"the job waits for ever in {self.node.job.state}")
            return
        self.dump.over()
        dump_s = 2 * policy.dump.answer_s + LONGEST_DUMP * len(policy.ranks) * policy.dump.stall_s
        exit_s = 2 * max(policy.timeouts.exit_s, policy.timeouts.asked_exit_s)
        attempt_s = (
            LONGEST_ATTEMPT_S + dump_s + exit_s + policy.timeouts.grace_s + policy.timeouts.kill_s
        )
        round_s = policy.replace.rejoin_s + policy.replace.join_s + 3 * policy.timeouts.kill_s
        more_s = self.replacing.rounds * (attempt_s + round_s)
        if ended_at > attempt_s * (policy.max_restarts + 1) + more_s:
            self.broken(f"the end took {ended_at} s")
