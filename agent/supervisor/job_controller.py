"""Decides for the whole job: events of all nodes in, decisions out to all nodes.

The decisions are those of ``agent.controller``, which has no clock and no I/O. Here are the queue
of events, the deadlines, what is written about the job, and what people are told.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby, takewhile
from typing import Protocol, cast

from agent.accounting import ledger
from agent.accounting.account import Account
from agent.accounting.incident import Incident
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import Answer, absorb, decide, in_rows
from agent.controller.events import renewed
from agent.controller.job import NEVER, Job, first_job
from agent.controller.messages import ELAPSED
from agent.controller.replaceable import why_never
from agent.controller.replication import groups_to_copy, known_groups, why_no_holder
from agent.controller.states import JobState, RankState
from agent.failure.ending import RunEnding
from agent.health.step_times import StepTimes
from agent.notify.notice import notices
from agent.notify.notifier import Notifier
from agent.ranks.parts import Parts
from agent.records.journal import Journal
from agent.spec.job_spec import JobSpec
from agent.spec.spent_budget import SpentBudget
from agent.supervisor.job_view import Holders, JobView
from agent.supervisor.status import StatusPublisher
from agent.text.tone import Tone
from agent.workers.worker import Worker
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error


class NodePort(Protocol):
    """A node, as far as the controller needs it."""

    def act(self, action: do.Action) -> None:
        """Carry out what concerns the ranks of this node."""

    def decided(self, view: JobView, holders: Holders) -> None:
        """Know what became of the job by the newest decision, which was carried out."""

    def finish(self) -> None:
        """The job is over."""

    def catch_up(self) -> None:
        """Take in what ranks and nodes have said by now, and their ends."""

    def refresh(self) -> bool:
        """Note in the workers how far they are; whether that changes by itself."""

    def workers(self) -> tuple[Worker, ...]:
        """The present attempt's workers of this node."""

    def worker(self, rank: int) -> Worker:
        """One of these."""

    @property
    def is_swept(self) -> bool:
        """Whether it has done what the last sweep ordered; if not, it calls ``go_on`` then."""


class JobController:
    """Runs one job, from its launch to its end."""

    def __init__(
        self,
        spec: JobSpec,
        journal: Journal,
        notifier: Notifier,
        say: Callable[[str], None],
        tell: Callable[[str, Tone], None],
        changed: Callable[[Job, tuple[Worker, ...] | None, Account], None],
        attempt_ended: Callable[[JobState, tuple[Worker, ...]], None],
        give_up_devices: Callable[[tuple[str, ...]], None],
    ) -> None:
        """Take the parts; nothing begins before :meth:`begin`.

        Args:
            journal: what is written about the run.
            notifier: tells programs outside of it.
            say: prints one sentence for people.
            tell: prints one that is good or bad news.
            changed: takes the present state, and what failures cost, soon after it changed;
                of very many workers now and then only: ``None``.
            attempt_ended: takes the workers of an attempt whose last process is gone, before the
                next attempt begins.
            give_up_devices: remembers devices that no resume is to use again; may raise OSError.
        """
        self._journal = journal
        self._notifier = notifier
        self._say = say
        self._tell = tell
        self._changed = changed
        self._attempt_ended = attempt_ended
        self._give_up_devices = give_up_devices
        self._job = first_job(spec)
        self._account = Account(before=spec.spent)
        self._events: deque[ev.Event] = deque()
        self._deciding = False
        self.is_retired = False
        """Whether it decides nothing any more, though the job goes on."""
        self._is_due = False  # events wait for the next turn of the loop
        self._skips = self._barren = 0  # events that are not taken in rows, now and the last time
        self._left: Iterator[None] | None = None  # of a decision that waits for a sweep
        self._gone: tuple[JobState, tuple[Worker, ...]] | None = None  # not examined yet
        self._deadline: asyncio.TimerHandle | None = None
        self._reminders: list[asyncio.TimerHandle] = []
        self._period_s = spec.policy.replace.period_s
        self._replaced_at_s = deque(spec.spent.replaced_at_s)  # of those that still count
        self._ending: RunEnding | None = None

    def attach(self, loop: asyncio.AbstractEventLoop, node: NodePort) -> None:
        """Decide in ``loop``, for the ranks of ``node``, be it one or all."""
        self._loop = loop
        self._node = node
        self._publisher = StatusPublisher(loop, self._publish, self._publish_state)
        self._step_times = StepTimes(self._journal, loop.time())
        for at_s in self._replaced_at_s:  # under another controller
            self._reminders.append(loop.call_at(at_s + self._period_s, self._age))

    def begin(self) -> None:
        """Start every rank."""
        self.post(ev.LaunchRequested())

    @property
    def ending(self) -> RunEnding:
        """How the job ended; it must have."""
        assert self._ending is not None
        return self._ending

    @property
    def has_ended(self) -> bool:
        """Whether it is known how the job ended."""
        return self._ending is not None

    @property
    def view(self) -> JobView:
        """What nodes know of the job, as of the newest decision."""
        job = self._job
        return JobView(
            job.state,
            job.attempt,
            has_hooks=job.has_hooks,
            is_asked=bool(job.stop.why) and not job.stop.is_resize,
            is_apart=bool(job.apart),
        )

    @property
    def spent(self) -> SpentBudget:
        """What the job has used up of its budgets, under earlier controllers as well."""
        job = self._job
        return SpentBudget(job.restarts, job.replaced_in_all, tuple(self._replaced_at_s))

    @property
    def is_to_end(self) -> bool:
        """Whether somebody has asked for the end of the job, by a signal or a file."""
        return self._job.stop.is_to_end

    @property
    def why_never_replaced(self) -> str:
        """Why no rank can be replaced, whatever befalls it; empty: it can."""
        return why_never(self._job)

    def retire(self) -> None:
        """Decide nothing any more: the nodes do as if this controller were lost."""
        self.is_retired = True
        self._cancel_deadline()
        for timer in self._reminders:
            timer.cancel()

    # --- events in -----------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        """Decide on an event and act; events that acting causes are decided afterwards."""
        self._events.append(event)
        if not (self._deciding or self.is_retired):
            self._decide_all()

    def post_soon(self, event: ev.Event) -> None:
        """The same in the next turn of the loop, or with the next event that cannot wait.

        What thousands of ranks answer at about the same time is decided on together then.
        """
        self._events.append(event)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.decide_now)

    def decide_now(self) -> None:
        """Decide on what was to be decided soon."""
        self._is_due = False
        if self._events and not (self._deciding or self.is_retired):
            self._decide_all()

    def go_on(self) -> None:
        """All nodes have done what a sweep ordered."""
        if self._left is not None:
            self._decide_all()

    def _decide_all(self) -> None:
        self._deciding = True
        try:
            while self._events or self._left is not None:
                self._left = self._left or self._decide(self._next_event())
                for _ in self._left:
                    if not self._node.is_swept:
                        return  # what follows must not begin yet
                self._left = None
        finally:
            self._deciding = self._left is not None
        self._publisher.changed(self._job.state)

    def _next_event(self) -> ev.Event:
        """The next one from which something may follow; answers before it are taken at once."""
        if self._skips:
            self._skips -= 1
            return self._events.popleft()
        row = list(takewhile(lambda event: isinstance(event, Answer), self._events))
        if len(row) < 2:  # noqa: PLR2004
            return self._events.popleft()
        for _ in row:
            self._events.popleft()
        answers = in_rows(cast("list[Answer]", row))
        left = self._absorb(answers)
        # where nothing can be taken, it is not tried with each: that would be quadratic
        self._barren = 0 if len(left) < len(answers) else 2 * self._barren + 1
        self._skips = self._barren
        self._events.extendleft(reversed(left))
        return self._events.popleft()

    def _absorb(self, answers: list[Answer]) -> list[Answer]:
        """Take answers, but for the last one; those that are left."""
        at = 0
        for _, of_kind in groupby(answers[:-1], type):
            row, before = list(of_kind), self._job
            self._job, count = absorb(before, row)
            self._note(before, row[:count])
            at += count
            if count < len(row):
                break
        return answers[at:]

    def _note(self, before: Job, answers: list[Answer]) -> None:
        alike: dict[str, tuple[Answer, list[int]]] = {}
        for _, row in groupby(answers, _but_its_rank):  # to spell each takes long
            same = list(row)
            of_all = same[0]._replace(rank=NEVER)
            alike.setdefault(repr(of_all), (of_all, []))[1].extend(one.rank for one in same)
        for answer, ranks in alike.values():
            self._take_account(before, answer, Decision(self._job))
            about = {name: value for name, value in ev.fields(answer).items() if name != "rank"}
            kind, state = type(answer).__name__, self._job.state.value
            self._journal.of_ranks(kind, ranks, **about, job=state)

    def ended(self, state: JobState, gone: tuple[Worker, ...]) -> None:
        """These workers are gone for good; what they left can be examined."""
        self._gone = state, gone
        if self._node.is_swept:
            self._examine()

    def _examine(self) -> None:
        if self._gone is not None:
            (state, gone), self._gone = self._gone, None
            self._attempt_ended(state, gone)

    def _account_now(self) -> Account:
        is_over = self._job.state.is_end
        return self._account if is_over else self._account._replace(now_s=self._loop.time())

    def _publish_state(self) -> None:
        self._changed(self._job, None, self._account_now())

    def _publish(self) -> bool:
        if self.is_retired:
            return False
        changes_by_itself = self._node.refresh()
        workers, account = self._node.workers(), self._account_now()
        if account.since_s is not None:
            self._step_times.note(workers, account.now_s)
        self._changed(self._job, workers, account)
        return changes_by_itself and not self._job.state.is_end

    def _decide(self, event: ev.Event) -> Iterator[None]:
        """Decide on an event and act; a step of it ends where nodes may have to be awaited."""
        before, decision = self._job, decide(self._job, event)
        self._job = decision.job
        # as of before it is ordered: nodes are told of both, and the order may be the last word
        counted = [each for each in decision.actions if isinstance(each, do.RemindReplaced)]
        self._replaced_at_s.extend(self._loop.time() for _ in counted)
        known = self._account
        over = self._take_account(before, event, decision)
        for rank, state in self._job.ranks.since(before.ranks):
            if state is not RankState.PENDING:  # its worker is only made by what follows
                self._node.worker(rank).state = state
        is_figure = isinstance(event, protocol.NotesMeasured) and not decision.actions
        # a large dump makes many, and so does a long training
        if not (is_figure or isinstance(event, ev.DumpProgressed | protocol.Progress)):
            self._journal.event(type(event).__name__, **ev.fields(event), job=self._job.state.value)
        for action in decision.actions:
            name, fields = do.name_and_fields(action)
            self._journal.event(name, **fields)
            self._act(action)
            if isinstance(action, do.Sweep):
                yield
                self._examine()
        for incident in over:
            self._journal.event("IncidentOver", **incident.facts())
        for notice in notices(before, event, decision, known, self._account):
            self._notifier.tell(notice)
        self._node.decided(self.view, self._holders())
        if decision.say:
            after = "".join(f" after {one.lost_s:.1f} s" for one in over if one.lost_s is not None)
            self._tell(decision.say.replace(ELAPSED, after), decision.tone)

    def _take_account(
        self, before: Job, event: ev.Event, decision: Decision
    ) -> tuple[Incident, ...]:
        """Note what the decision means for training; the incidents that are over now."""
        known, now_s = self._account, self._loop.time()
        self._account = ledger.after(known, before, event, decision, now_s, time.time())
        count = self._account.over - known.over
        return self._account.recent[-count:] if count else ()

    def _holders(self) -> Holders:
        job, alike = self._job, known_groups(self._job)
        known = job.since_restart.comparison
        return Holders(
            why_no_holder(job),
            alike=alike,
            apart=job.apart,
            is_cut=bool(known.groups),
            to_copy=groups_to_copy(job),
            parts=known.parts if alike and known.parts.are_shared else Parts(),
        )

    # --- actions out ---------------------------------------------------------------------------

    def _act(self, action: do.Action) -> None:
        match action:
            case do.SetDeadline():
                self._set_deadline(action)
            case do.RemindReplaced():
                self._reminders.append(self._loop.call_later(action.after_s, self._age))
            case do.GiveUpDevices():
                self._give_up(action)
            case do.Finish():
                self._ending = RunEnding.of(action, self._job, self._account)
                for timer in self._reminders:
                    timer.cancel()
                self._node.finish()
            case do.Sweep():
                self._cancel_deadline()
                self._node.act(action)
            case do.ReplaceRanks():
                now = (renewed(event, action.attempt, action.survivors) for event in self._events)
                self._events = deque(now)
                self._node.act(action)
            case _:
                self._node.act(action)

    def _age(self) -> None:
        self._replaced_at_s.popleft()
        self.post(ev.ReplacementAged())

    def _set_deadline(self, action: do.SetDeadline) -> None:
        self._cancel_deadline()
        if action.after_s is not None:
            passed = ev.DeadlinePassed(action.state, action.attempt)
            self._deadline = self._loop.call_later(action.after_s, self._on_deadline, passed)

    def _on_deadline(self, passed: ev.DeadlinePassed) -> None:
        """Judge nobody for an answer that lies unread: of thousands that takes seconds to read.

        What came meanwhile may have set another deadline.
        """
        due = self._deadline
        self._node.catch_up()
        if due is not None and self._deadline is due:
            self.post(passed)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self, action: do.GiveUpDevices) -> None:
        self._say(action.reason)
        try:
            self._give_up_devices(action.devices)
        except OSError as error:
            self._say(f"a resume of this run may use them again: {describe_os_error(error)}")


def _but_its_rank(answer: Answer) -> tuple[object, ...]:
    return answer[1:]
