"""Acts on one node: turns what happens into events and the controller's actions into effects.

One asyncio loop, one thread. Signal handlers only enqueue; every worker's end arrives as SIGCHLD;
an idle job causes no wake-up. What to do is never decided here, but by whoever is at the
``ControllerPort``.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.records.journal import Journal
from agent.records.worker_output import WorkerOutput
from agent.spec.job_spec import JobSpec
from agent.supervisor.job_view import AgentPort, ControllerPort, Holders, JobView
from agent.supervisor.requests import Requests
from agent.text.ranges import format_ranges
from agent.workers import processes
from agent.workers.replacements import Replacements
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from agent.shadows.shadows import Shadows
    from agent.supervisor.hooks_bridge import HooksBridge
    from agent.supervisor.hooks_relay import HooksRelay

SWEEP_S = 2.0  # for processes that workers left behind; SIGKILL needs milliseconds
KILLED_AT_EXIT = "was killed by SIGKILL on its way out, after the end of its script: all is done"
KEPT_BY = (-signal.SIGKILL, -signal.SIGTERM)
SLOW_START_S = 2.0  # after which a terminal shows for which ranks msrun waits
STILL_S = 10.0  # the same, again


class Supervisor:
    """Runs a job's ranks on this node, from the first fork to the last process gone."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Callable[[int, bool, tuple[str, ...]], tuple[protocol.WorkerOrder, ...]],
        starter: Starter,
        hooks: HooksBridge | HooksRelay,
        requests: Requests,
        output: WorkerOutput,
        journal: Journal,
        say: Callable[[str], None],
        last_words: Callable[[Worker], str],
        device_fault: Callable[[Worker], str],
        spared: Callable[[], frozenset[int]],
        shadows: Shadows | None = None,
    ) -> None:
        """Take the parts; nothing starts before :meth:`run`.

        Args:
            plan: the orders of an attempt, by its number, whether it resumes from a checkpoint,
                and the devices that its ranks see.
            starter: its forkserver was started already, and imports while the agent does.
            hooks: receives the messages of the ranks' hooks.
            requests: receives the requests to end the job.
            output: the workers' files and their view on the console.
            journal: what is written about the run.
            say: prints one sentence for people.
            last_words: reads the last line that a worker which exited wrote about its failure.
            device_fault: reads how the device of a worker which exited has failed, if it has.
            spared: children that are no workers, nor left by any.
            shadows: sleeping copies of the ranks, if there are any.
        """
        self._spec = spec
        self._plan = plan
        self.starter = starter
        self._hooks = hooks
        self._requests = requests
        self._output = output
        self._journal = journal
        self._say = say
        self._last_words = last_words
        self._device_fault = device_fault
        self._spared = spared
        self._shadows = shadows
        self._workers: dict[int, Worker] = {}
        self._ranks_by_pid: dict[int, int] = {}
        self._unclaimed: dict[int, int] = {}  # pid -> exit code: ended before it was announced
        self._ended = 0
        self._lost: list[Worker] = []  # ranks whose replacements have not all joined
        self._replacements = Replacements(plan, starter, output)
        self._unwanted: set[int] = set()  # pids forked for a finished attempt
        self._awaiting: asyncio.TimerHandle | None = None
        self._is_over = False
        self._bug: BaseException | None = None
        self.loop = asyncio.new_event_loop()
        """The one loop of this process."""
        self.loop.set_exception_handler(self._on_bug)

    def run(self, controller: ControllerPort, agent: AgentPort | None = None) -> None:
        """Act for this controller until the job is over.

        Args:
            agent: what the hooks talk to, if they are those of all nodes' ranks.
        """
        loop, self._controller = self.loop, controller
        loop.add_signal_handler(signal.SIGCHLD, self.settle)
        listener = agent or self
        self._requests.attach(loop, listener.post, lambda: controller.view.attempt)
        self._hooks.attach(loop, listener)
        try:
            self.starter.attach(loop, self._on_answer, self._refuse_start)
            if self._shadows is not None:
                self._shadows.attach(
                    loop, self._on_answer, self.post, lambda: controller.view.attempt
                )
            controller.begin()
            self.settle()  # a worker that was ordered early may have ended already
            self._show_awaited_in(SLOW_START_S, SLOW_START_S)
            if not self._is_over:
                loop.run_forever()
            if not self._is_over:
                raise RuntimeError("the supervisor stopped without an end") from self._bug
        finally:
            self._end_processes()
            loop.close()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback is a bug: end everything rather than continue half blind."""
        self._bug = context.get("exception")
        loop.stop()

    # --- events in -----------------------------------------------------------------------------

    def watch(self, path: str) -> None:
        """A graceful exit may be asked for in this file."""
        self._requests.watch(path)

    def announce(self) -> None:
        """Take in starts."""
        self.starter.receive()

    def settle(self) -> None:
        """Take in starts and deaths; a dead rank's group is signalled before its pid is free."""
        self.starter.receive()  # a worker may be announced and dead at once
        exited: list[Worker] = []
        for ended in processes.ended_children():
            rank = self._ranks_by_pid.pop(ended.pid, None)
            if ended.pid in self._unwanted:
                self._unwanted.remove(ended.pid)
            elif rank is not None:
                if ended.exit_code != 0:
                    processes.signal_group(ended.pid, signal.SIGKILL)
                exited.append(self._worker_ended(rank, ended.exit_code))
            elif self.starter.is_store(ended.pid):
                self.starter.on_store_exit(ended.exit_code)
            elif self._replacements.ended(ended.pid, ended.exit_code):
                continue
            elif self._awaited or self._replacements.is_awaited:
                self._unclaimed[ended.pid] = ended.exit_code
        for worker in exited:
            self._post_exit(worker)

    def _worker_ended(self, rank: int, exit_code: int) -> Worker:
        worker = self._workers[rank]
        worker.exit_code = exit_code
        worker.ended_at = time.time()
        worker.order = self.next_end()
        return worker

    def _post_exit(self, worker: Worker) -> None:
        assert worker.exit_code is not None
        code, step = worker.exit_code, self._hooks.hear_out(worker.rank)
        # who ends otherwise may have freed its memory before
        kept = self._hooks.kept_steps(worker.rank) if code in KEPT_BY else ()
        step = max((step or 0, *kept)) if kept else step
        view = self._controller.view
        by_itself = code > 0 or code == -signal.SIGKILL
        is_own = by_itself and not worker.was_stopped and view.has_hooks
        error = self._last_words(worker) if is_own else ""
        fault = self._device_fault(worker) if code and self._spec.devices.is_on else ""
        is_over = code == -signal.SIGKILL and self._hooks.has_finished(worker.rank)
        if is_over and view.state is JobState.RUNNING:
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
                kept=kept,
            )
        )

    def worker(self, rank: int) -> Worker:
        """A rank of the present attempt."""
        return self._workers[rank]

    def wake(self, rank: int) -> None:
        """Send SIGCONT to a rank and what it has started."""
        worker = self._workers.get(rank)
        if worker is not None and worker.pid in self._ranks_by_pid:  # another node's word is old
            processes.signal_group(worker.pid, signal.SIGCONT)

    def protect(self, pid: int) -> None:
        """If the agent dies, ``pid`` gets its time to save."""
        self.starter.protect(pid)

    def _on_answer(self, answer: protocol.Forked | protocol.ForkFailed) -> None:
        match answer:
            case protocol.Forked():
                self._on_forked(answer)
            case protocol.ForkFailed():
                self._on_fork_failed(answer)

    def _refuse_start(self, why: str) -> None:
        """A restart would meet the same; a replacement has its own time-out and next rung."""
        view = self._controller.view
        if view.state in {JobState.STARTING, JobState.RUNNING}:
            self.post(ev.StartRefused(view.attempt, why, ()))
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
        worker.order = self.next_end()
        worker.ended_at = time.time()
        self.post(ev.StartFailed(message.rank, message.attempt, message.why))

    def post(self, event: ev.Event) -> None:
        """Have the controller decide on an event."""
        self._controller.post(event)

    # --- actions out ---------------------------------------------------------------------------

    def act(self, action: do.Action) -> None:  # noqa: C901, PLR0912  a row for each kind of action
        """Carry out what concerns the ranks of this node."""
        match action:
            case do.StartAttempt():
                self._start_attempt(action)
            case do.CancelStarts():
                self.starter.cancel(action.reason, now=action.now)
                if self._shadows is not None:
                    self._shadows.cancel(action.reason)
            case do.SignalRanks():
                self._signal(action)
            case do.Sweep():
                self._sweep()
            case do.RefuseRanks():
                self._refuse(action)
            case do.PrepareRanks():
                if self._replacements.prepare(action, self._workers):
                    self._hooks.expect(action)
            case do.ReplaceRanks():
                self._replace(action)
            case do.WarmUp():
                self.starter.warm_up()
            case do.Tell():
                self._hooks.act(action)
                if isinstance(action.message, protocol.GoOn):
                    self._examine_lost()
            case do.SetDeadline() | do.Finish() | do.GiveUpDevices() | do.RemindReplaced():
                raise TypeError(f"not for a node: {action}")
            case _:
                if isinstance(action, do.SaveRanks) and action.place != do.MEMORY:
                    self._replacements.clear()  # no rank is replaced, and memory may be short
                self._hooks.act(action)

    def decided(self, view: JobView, holders: Holders) -> None:
        """Know what became of the job by the newest decision, which was carried out."""
        self._hooks.decided(view.state, holders)

    def catch_up(self) -> None:
        """Take in what ranks have said by now, and their ends."""
        self._hooks.catch_up()
        self.settle()

    def refresh(self) -> bool:
        """Note in the workers how far they are; whether that changes by itself."""
        return self.refresh_of(self._workers)

    def refresh_of(self, workers: Mapping[int, Worker]) -> bool:
        """The same of workers of all nodes, by rank, whose pages are copied to this one."""
        self._hooks.refresh(workers)
        return self._hooks.is_needed

    def workers(self) -> tuple[Worker, ...]:
        """The present attempt's, by local rank."""
        return tuple(self._workers.values())

    def stand_in(self) -> None:
        """Know that the ranks here have ended on another node, whose place this one has."""
        for local_rank, rank in enumerate(self._spec.ranks_here):
            worker = Worker(rank, local_rank, attempt=0)
            worker.ended_at = time.time()
            self._workers[rank] = worker

    def living(self) -> tuple[int, ...]:
        """The ranks that have a process."""
        return tuple(self._ranks_by_pid.values())

    @property
    def is_swept(self) -> bool:
        """Whether the last sweep is over: always, as it waits."""
        return True

    def next_end(self) -> int:
        """The number of one more worker's end in the attempt."""
        self._ended += 1
        return self._ended

    def finish(self) -> None:
        """The job is over."""
        self._is_over = True
        self.loop.stop()

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
        is_woken = self._shadows is not None and action.shadow >= 0
        self.starter.start(action.attempt, () if is_woken else orders)
        if self._shadows is not None and is_woken:
            self._shadows.wake(action.attempt, orders, self.starter.port)
        elif self._shadows is not None:
            self._shadows.forget()

    def _replace(self, action: do.ReplaceRanks) -> None:
        """Survivors come first: they have more to do until all meet than newcomers have."""
        attempt, here = action.attempt, self._workers.keys()
        survivors = [self._workers[rank] for rank in action.survivors if rank in here]
        newcomers = tuple(rank for rank in action.newcomers if rank in here)
        for worker in survivors:
            worker.attempt = attempt
        self.starter.renew(attempt, {worker.pid for worker in survivors})
        self._hooks.renew(action, self.starter.port)
        self._lost += (self._workers[rank] for rank in newcomers)
        of_ours = replace(action, newcomers=newcomers)
        for worker in self._replacements.begin(of_ours, self._workers):
            self._ranks_by_pid[worker.pid] = worker.rank
            self.post(ev.WorkerStarted(worker.rank, attempt, worker.pid))

    def _examine_lost(self) -> None:
        """Find out what the replaced ranks died of, while training continues."""
        gone, self._lost = tuple(self._lost), []
        if gone:
            self._controller.ended(JobState.REPLACING, gone)

    def _signal(self, action: do.SignalRanks) -> None:
        stopping = self._controller.view.state in {JobState.STOPPING, JobState.KILLING}
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
        for rank in self._workers.keys() & set(action.ranks):
            self._workers[rank].was_stopped = True
        self._hooks.act(action)

    def _sweep(self) -> None:
        self.starter.end_attempt()
        self._replacements.clear()
        keepers = self._hooks.keepers
        self._hooks.end_attempt()
        spared = self.starter.spared | self._spared()
        if self._shadows is not None:
            spared |= self._shadows.pids
        ended = processes.end_adopted(spared, SWEEP_S)
        if killed := [pid for pid in ended if pid not in keepers]:
            self._journal.event("LeftoversKilled", pids=killed)
        self._unclaimed.clear()
        self._unwanted.clear()
        gone, self._lost = tuple(self._lost), []
        self._controller.ended(self._controller.view.state, (*gone, *self._workers.values()))

    @property
    def _awaited(self) -> list[int]:
        """The ranks whose start was ordered, and of which nothing is known yet."""
        workers = self._workers.values()
        return [each.rank for each in workers if not each.pid and each.ended_at is None]

    def _show_awaited_in(self, delay_s: float, waited_s: float) -> None:
        self._awaiting = self.loop.call_later(delay_s, self._show_awaited, waited_s)

    def _show_awaited(self, waited_s: float) -> None:
        awaited = self._awaited
        if not awaited or self._controller.view.state is not JobState.STARTING:
            return
        doing = "starting" if self.starter.is_ready else "importing torch and other modules for"
        ranks = f"rank{'s' if len(awaited) > 1 else ''} {format_ranges(awaited)}"
        self._output.progress(f"{doing} {ranks} ({waited_s:.0f} s)")
        self._show_awaited_in(STILL_S, waited_s + STILL_S)

    def _end_processes(self) -> None:
        """Nothing of the job outlives this call but what the kernel cannot kill."""
        if self._awaiting is not None:
            self._awaiting.cancel()
        self.starter.close()
        if self._shadows is not None:
            self._shadows.close()
        self._hooks.close()
        self._requests.close()
        self.loop.remove_signal_handler(signal.SIGCHLD)
        processes.end_adopted(self._spared(), SWEEP_S)
