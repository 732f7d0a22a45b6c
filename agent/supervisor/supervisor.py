"""Acts on one node: turns what happens into events and the controller's actions into effects.

One asyncio loop, one thread. Signal handlers only enqueue; every worker's end arrives as SIGCHLD;
an idle job causes no wake-up. What to do is never decided here.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.accounting import ledger
from agent.accounting.account import Account
from agent.accounting.incident import Incident
from agent.accounting.summary import summary
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.events import renewed
from agent.controller.job import Job, first_job
from agent.controller.messages import ELAPSED
from agent.controller.replication import groups_to_copy, known_groups, why_no_holder
from agent.controller.restart_policy import why_not_saved
from agent.controller.states import JobState, RankState
from agent.notify.notice import notices
from agent.notify.notifier import Notifier
from agent.records.journal import Journal
from agent.records.worker_output import WorkerOutput
from agent.spec.job_spec import JobSpec
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.requests import Requests
from agent.supervisor.status import StatusPublisher
from agent.supervisor.step_times import StepTimes
from agent.text.ranges import format_ranges
from agent.text.tone import Tone
from agent.workers import processes
from agent.workers.replacements import Replacements
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error

SWEEP_S = 2.0  # for processes that workers left behind; SIGKILL needs milliseconds
KILLED_AT_EXIT = "was killed by SIGKILL on its way out, after the end of its script: all is done"
SLOW_START_S = 2.0  # after which a terminal shows for which ranks msrun waits
STILL_S = 10.0  # the same, again


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How a job ended, and the last attempt's workers."""

    state: JobState
    exit_code: int
    reason: str
    attempt: int
    workers: tuple[Worker, ...]
    saved: str | None = None  # the newest checkpoint folder, if any is known
    lost: str = ""  # why the newest step is not in it
    has_hooks: bool = False  # some rank's state could be saved
    gave_up: str = ""  # why restarts were left unused
    not_replaced: str = ""  # why no rank was replaced although replacing is on
    cost: str = ""  # what its failures cost, in one sentence

    @staticmethod
    def of(action: do.Finish, job: Job, workers: tuple[Worker, ...], account: Account) -> RunEnding:
        """The end of ``job`` that was decided."""
        was_to_replace = job.policy.replace.is_on and job.now.failure
        return RunEnding(
            state=action.state,
            exit_code=action.exit_code,
            reason=action.reason,
            attempt=job.attempt,
            workers=workers,
            saved=job.resume,
            lost=why_not_saved(job),
            has_hooks=job.has_hooks,
            gave_up=job.gave_up,
            not_replaced=job.now.not_replaced if was_to_replace else "",
            cost=summary(account, job),
        )


class Supervisor:
    """Runs one job on this node, from the first fork to the last process gone."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Callable[[int, bool, tuple[str, ...]], tuple[protocol.WorkerOrder, ...]],
        starter: Starter,
        hooks: HooksBridge,
        requests: Requests,
        output: WorkerOutput,
        journal: Journal,
        notifier: Notifier,
        say: Callable[[str], None],
        tell: Callable[[str, Tone], None],
        changed: Callable[[Job, tuple[Worker, ...], Account], None],
        attempt_ended: Callable[[JobState, tuple[Worker, ...]], None],
        last_words: Callable[[Worker], str],
        device_fault: Callable[[Worker], str],
        give_up_devices: Callable[[tuple[str, ...]], None],
    ) -> None:
        """Take the parts; nothing starts before :meth:`run`.

        Args:
            spec: the job.
            plan: the orders of an attempt, by its number, whether it resumes from a checkpoint,
                and the devices that its ranks see.
            starter: its forkserver was started already, and imports while the agent does.
            hooks: receives the messages of the ranks' hooks.
            requests: receives the requests to end the job.
            output: the workers' files and their view on the console.
            journal: what is written about the run.
            notifier: tells programs outside of it.
            say: prints one sentence for people.
            tell: prints one that is good or bad news.
            changed: takes the present state, and what failures cost, soon after it changed.
            attempt_ended: takes the workers of an attempt whose last process is gone, before the
                next attempt begins.
            last_words: reads the last line that a worker which exited wrote about its failure.
            device_fault: reads how the device of a worker which exited has failed, if it has.
            give_up_devices: remembers devices that no resume is to use again; may raise OSError.
        """
        self._spec = spec
        self._plan = plan
        self._starter = starter
        self._hooks = hooks
        self._requests = requests
        self._output = output
        self._journal = journal
        self._notifier = notifier
        self._say = say
        self._tell = tell
        self._changed = changed
        self._attempt_ended = attempt_ended
        self._last_words = last_words
        self._device_fault = device_fault
        self._give_up_devices = give_up_devices
        self._job = first_job(spec)
        self._account = Account()
        self._workers: dict[int, Worker] = {}
        self._ranks_by_pid: dict[int, int] = {}
        self._unclaimed: dict[int, int] = {}  # pid -> exit code: ended before it was announced
        self._events: deque[ev.Event] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        self._ended = 0
        self._lost: list[Worker] = []  # ranks whose replacements have not all joined
        self._replacements = Replacements(plan, starter, output, lambda: hooks.rehearses)
        self._unwanted: set[int] = set()  # pids forked for a finished attempt
        self._reminders: list[asyncio.TimerHandle] = []
        self._ending: RunEnding | None = None
        self._deciding = False
        self._bug: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_bug)
        self._publisher = StatusPublisher(self._loop, self._publish)
        self._step_times = StepTimes(journal, self._loop.time())

    def run(self) -> RunEnding:
        """Run the job to its end."""
        loop = self._loop
        loop.add_signal_handler(signal.SIGCHLD, self.settle)
        self._requests.attach(loop, self.post, lambda: self._job.attempt)
        self._hooks.attach(loop, self)
        try:
            self._starter.attach(loop, self._on_answer, self._refuse_start)
            self.post(ev.LaunchRequested())
            self.settle()  # a worker that was ordered early may have ended already
            self._show_awaited_in(SLOW_START_S, SLOW_START_S)
            if self._ending is None:
                loop.run_forever()
            if self._ending is None:
                raise RuntimeError("the supervisor stopped without an end") from self._bug
            return self._ending
        finally:
            self._end_processes()
            loop.close()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback is a bug: end everything rather than continue half blind."""
        self._bug = context.get("exception")
        loop.stop()

    # --- events in -----------------------------------------------------------------------------

    def announce(self) -> None:
        """Take in starts."""
        self._starter.receive()

    def settle(self) -> None:
        """Take in starts and deaths; a dead rank's group is signalled before its pid is free."""
        self._starter.receive()  # a worker may be announced and dead at once
        exited: list[Worker] = []
        for ended in processes.ended_children():
            rank = self._ranks_by_pid.pop(ended.pid, None)
            if ended.pid in self._unwanted:
                self._unwanted.remove(ended.pid)
            elif rank is not None:
                if ended.exit_code != 0:
                    processes.signal_group(ended.pid, signal.SIGKILL)
                exited.append(self._worker_ended(rank, ended.exit_code))
            elif self._starter.is_store(ended.pid):
                self._starter.on_store_exit(ended.exit_code)
            elif self._replacements.ended(ended.pid, ended.exit_code):
                continue
            elif self._job.having(RankState.PENDING) or self._replacements.is_awaited:
                self._unclaimed[ended.pid] = ended.exit_code
        for worker in exited:
            self._post_exit(worker)

    def _worker_ended(self, rank: int, exit_code: int) -> Worker:
        worker = self._workers[rank]
        worker.exit_code = exit_code
        worker.ended_at = time.time()
        self._ended += 1
        worker.order = self._ended
        return worker

    def _post_exit(self, worker: Worker) -> None:
        assert worker.exit_code is not None
        code, step = worker.exit_code, self._hooks.hear_out(worker.rank)
        by_itself = code > 0 or code == -signal.SIGKILL
        is_own = by_itself and not worker.was_stopped and self._job.has_hooks
        error = self._last_words(worker) if is_own else ""
        fault = self._device_fault(worker) if code and self._spec.devices.is_on else ""
        is_over = code == -signal.SIGKILL and self._hooks.has_finished(worker.rank)
        if is_over and self._job.state is JobState.RUNNING:
            self._say(f"rank {worker.rank} {KILLED_AT_EXIT}")
        self.post(
            ev.WorkerExited(
                worker.rank,
                worker.attempt,
                code,
                step,
                error,
                worker.amid,
                is_over=is_over,
                fault=fault,
            )
        )

    def worker(self, rank: int) -> Worker:
        """A rank of the present attempt."""
        return self._workers[rank]

    def protect(self, pid: int) -> None:
        """If the agent dies, ``pid`` gets its time to save."""
        self._starter.protect(pid)

    def watch(self, path: str) -> None:
        """A graceful exit may be asked for in this file."""
        self._requests.watch(path)

    def _on_answer(self, answer: protocol.Forked | protocol.ForkFailed) -> None:
        match answer:
            case protocol.Forked():
                self._on_forked(answer)
            case protocol.ForkFailed():
                self._on_fork_failed(answer)

    def _refuse_start(self, why: str) -> None:
        """A restart would meet the same; a replacement has its own time-out and next rung."""
        if self._job.state in {JobState.STARTING, JobState.RUNNING}:
            self.post(ev.StartRefused(self._job.attempt, why, ()))
        else:
            self._say(why)

    def _on_forked(self, message: protocol.Forked) -> None:
        if self._replacements.forked(message, self._unclaimed.get(message.pid)):
            self._unclaimed.pop(message.pid, None)
            return
        worker = self._workers[message.rank]
        if message.attempt != worker.attempt:
            self._unwanted.add(message.pid)
            processes.signal_group(message.pid, signal.SIGKILL)
            return
        worker.pid = message.pid
        worker.started_at = time.time()
        self._ranks_by_pid[message.pid] = message.rank
        self.post(ev.WorkerStarted(message.rank, message.attempt, message.pid))
        if message.pid in self._unclaimed:
            del self._ranks_by_pid[message.pid]
            self._post_exit(self._worker_ended(message.rank, self._unclaimed.pop(message.pid)))

    def _on_fork_failed(self, message: protocol.ForkFailed) -> None:
        if self._replacements.failed(message):
            return
        worker = self._workers[message.rank]
        if message.attempt != worker.attempt:
            return
        worker.why = message.why
        if worker.pid:  # it exists and says why it will exit: its exit is the event
            self._journal.event("WorkerSpoke", rank=message.rank, why=message.why)
            return
        self._ended += 1
        worker.order = self._ended
        worker.ended_at = time.time()
        self.post(ev.StartFailed(message.rank, message.attempt, message.why))

    def post(self, event: ev.Event) -> None:
        """Decide on an event and act; events that acting causes are decided afterwards."""
        self._events.append(event)
        if self._deciding:
            return
        self._deciding = True
        try:
            while self._events:
                self._decide(self._events.popleft())
        finally:
            self._deciding = False
        self._publisher.changed(self._job.state)

    def _publish(self) -> bool:
        self._hooks.refresh(self._workers)
        account = self._account
        if not self._job.state.is_end:
            account = account._replace(now_s=self._loop.time())
        if account.since_s is not None:
            self._step_times.note(self._workers.values(), account.now_s)
        self._changed(self._job, tuple(self._workers.values()), account)
        return self._hooks.is_needed and not self._job.state.is_end

    def _decide(self, event: ev.Event) -> None:
        before, decision = self._job, decide(self._job, event)
        self._job = decision.job
        known = self._account
        over = self._take_account(before, event, decision)
        for rank, state in self._job.ranks.items():
            if rank in self._workers and self._workers[rank].attempt == self._job.attempt:
                self._workers[rank].state = state
        if not isinstance(event, ev.DumpProgressed | protocol.Progress):  # a large dump makes many
            self._journal.event(type(event).__name__, **ev.fields(event), job=self._job.state.value)
        for action in decision.actions:
            name, fields = do.name_and_fields(action)
            self._journal.event(name, **fields)
            self._act(action)
        for incident in over:
            self._journal.event("IncidentOver", **incident.facts())
        for notice in notices(before, event, decision, known, self._account):
            self._notifier.tell(notice)
        is_cut = bool(self._job.since_restart.comparison.groups)
        self._hooks.decided(
            self._job.state,
            why_no_holder(self._job),
            alike=known_groups(self._job),
            is_cut=is_cut,
            to_copy=groups_to_copy(self._job),
        )
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

    # --- actions out ---------------------------------------------------------------------------

    def _act(self, action: do.Action) -> None:  # noqa: C901, PLR0912  a row for each kind of action
        match action:
            case do.StartAttempt():
                self._start_attempt(action)
            case do.CancelStarts():
                self._starter.cancel(action.reason, now=action.now)
            case do.SignalRanks():
                self._signal(action)
            case do.SetDeadline():
                self._set_deadline(action)
            case do.Sweep():
                self._sweep()
            case do.Finish():
                self._finish(action)
            case do.RefuseRanks():
                self._refuse(action)
            case do.PrepareRanks():
                if self._replacements.prepare(action, self._workers):
                    self._hooks.expect(action)
            case do.ReplaceRanks():
                self._replace(action)
            case do.GiveUpDevices():
                self._give_up(action)
            case do.WarmUp():
                self._starter.warm_up()
            case do.RemindReplaced():
                aged = ev.ReplacementAged()
                self._reminders.append(self._loop.call_later(action.after_s, self.post, aged))
            case do.Tell():
                self._hooks.act(action)
                if isinstance(action.message, protocol.GoOn):
                    self._examine_lost()
            case _:
                if isinstance(action, do.SaveRanks) and action.place != do.MEMORY:
                    self._replacements.clear()  # no rank is replaced, and memory may be short
                self._hooks.act(action)

    def _start_attempt(self, action: do.StartAttempt) -> None:
        orders = self._plan(action.attempt, action.resume is not None, action.devices)
        self._hooks.begin(action.attempt, action.resume or "")
        self._workers = {
            order.rank: Worker(
                order.rank, local_rank, action.attempt, resumes=action.resume is not None
            )
            for local_rank, order in enumerate(orders)
        }
        self._ended = 0
        self._output.begin(action.attempt, orders)
        self._starter.start(action.attempt, orders)

    def _give_up(self, action: do.GiveUpDevices) -> None:
        self._say(action.reason)
        try:
            self._give_up_devices(action.devices)
        except OSError as error:
            self._say(f"a resume of this run may use them again: {describe_os_error(error)}")

    def _replace(self, action: do.ReplaceRanks) -> None:
        """Survivors come first: they have more to do until all meet than newcomers have."""
        attempt = action.attempt
        for rank in action.survivors:
            self._workers[rank].attempt = attempt
        self._events = deque(renewed(event, attempt, action.survivors) for event in self._events)
        self._starter.renew(attempt, {self._workers[rank].pid for rank in action.survivors})
        self._hooks.renew(action, self._starter.port)
        self._lost += (self._workers[rank] for rank in action.newcomers)
        for worker in self._replacements.begin(action, self._workers):
            self._ranks_by_pid[worker.pid] = worker.rank
            self.post(ev.WorkerStarted(worker.rank, attempt, worker.pid))

    def _examine_lost(self) -> None:
        """Find out what the replaced ranks died of, while training continues."""
        gone, self._lost = tuple(self._lost), []
        if gone:
            self._attempt_ended(JobState.REPLACING, gone)

    def _signal(self, action: do.SignalRanks) -> None:
        stopping = self._job.state in {JobState.STOPPING, JobState.KILLING}
        for rank in action.ranks:
            worker = self._workers[rank]
            if worker.pid in self._ranks_by_pid:
                worker.signals.setdefault(action.signum, action.reason)
                is_news = stopping and not worker.is_released and not worker.hung
                worker.was_stopped = worker.was_stopped or is_news
                if stopping:
                    processes.signal_group(worker.pid, action.signum)
                else:  # for the rank, not for the programs it started
                    processes.signal_one(worker.pid, action.signum)

    def _refuse(self, action: do.RefuseRanks) -> None:
        """Each rank then writes the same into its log; people hear it once, from msrun."""
        self._output.hush()
        for rank in action.ranks:
            self._workers[rank].was_stopped = True
        self._hooks.act(action)

    def _set_deadline(self, action: do.SetDeadline) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if action.after_s is not None:
            passed = ev.DeadlinePassed(action.state, action.attempt)
            self._deadline = self._loop.call_later(action.after_s, self.post, passed)

    def _sweep(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._starter.end_attempt()
        self._replacements.clear()
        self._hooks.end_attempt()
        killed = processes.end_adopted(self._starter.spared | self._notifier.pids, SWEEP_S)
        if killed:
            self._journal.event("LeftoversKilled", pids=killed)
        self._unclaimed.clear()
        self._unwanted.clear()
        gone, self._lost = tuple(self._lost), []
        self._attempt_ended(self._job.state, (*gone, *self._workers.values()))

    def _finish(self, action: do.Finish) -> None:
        workers = tuple(self._workers.values())
        self._ending = RunEnding.of(action, self._job, workers, self._account)
        self._loop.stop()

    def _show_awaited_in(self, delay_s: float, waited_s: float) -> None:
        timer = self._loop.call_later(delay_s, self._show_awaited, waited_s)
        self._reminders.append(timer)

    def _show_awaited(self, waited_s: float) -> None:
        awaited = self._job.having(RankState.PENDING)
        if not awaited or self._job.state is not JobState.STARTING:
            return
        doing = "starting" if self._starter.is_ready else "importing torch and other modules for"
        ranks = f"rank{'s' if len(awaited) > 1 else ''} {format_ranges(awaited)}"
        self._output.progress(f"{doing} {ranks} ({waited_s:.0f} s)")
        self._show_awaited_in(STILL_S, waited_s + STILL_S)

    def _end_processes(self) -> None:
        """Nothing of the job outlives this call but what the kernel cannot kill."""
        for timer in self._reminders:
            timer.cancel()
        self._starter.close()
        self._hooks.close()
        self._requests.close()
        self._loop.remove_signal_handler(signal.SIGCHLD)
        processes.end_adopted(self._notifier.pids, SWEEP_S)
