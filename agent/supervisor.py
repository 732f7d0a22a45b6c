"""Acts on one node: turns what happens into events and the controller's actions into effects.

One asyncio loop, one thread. Signal handlers only enqueue; every worker's end arrives as SIGCHLD;
an idle job causes no wake-up. What to do is never decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from agent import events as ev
from agent import worker as processes
from agent.controller import Job, Rules, decide
from agent.forkserver import Forkserver
from agent.journal import Journal
from agent.output import Output
from agent.spec import JobSpec
from agent.state import JobState, RankState
from agent.store import Store
from agent.worker import Worker
from worker_hooks import protocol

SWEEP_S = 2.0  # for processes that workers left behind; SIGKILL needs milliseconds
SLOW_START_S = 2.0  # after that a terminal is told who is awaited
FORKSERVER_DEATHS = 5  # after so many, starts fail instead of being tried again
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended, and the last attempt's workers."""

    state: JobState
    exit_code: int
    reason: str
    attempt: int
    workers: tuple[Worker, ...]


class Supervisor:
    """Runs one job on this node, from the first fork to the last process gone."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Callable[[int], tuple[protocol.WorkerOrder, ...]],
        forkserver: Forkserver,
        cold: Callable[[], Forkserver],
        listener: socket.socket,
        output: Output,
        journal: Journal,
        say: Callable[[str], None],
        changed: Callable[[Job, tuple[Worker, ...]], None],
        attempt_ended: Callable[[JobState, tuple[Worker, ...]], None],
    ) -> None:
        """Take the parts; nothing starts before :meth:`run`.

        Args:
            spec: the job.
            plan: the orders of an attempt.
            forkserver: started already, so that it imports while the agent does, too.
            cold: makes a forkserver that preloads nothing, for when warmth is no use.
            listener: the socket on MASTER_PORT.
            output: the workers' files and their view on the console.
            journal: what is written about the run.
            say: tells people one sentence.
            changed: told whenever the present state changed.
            attempt_ended: told when an attempt's last process is gone, before the next begins.
        """
        self._spec = spec
        self._plan = plan
        self._forkserver = forkserver
        self._cold = cold
        self._output = output
        self._journal = journal
        self._say = say
        self._changed = changed
        self._attempt_ended = attempt_ended
        self._job = Job(
            Rules(
                ranks=tuple(spec.node_rank * spec.nproc + i for i in range(spec.nproc)),
                max_restarts=spec.max_restarts,
                start_s=spec.timeouts.start_s,
                grace_s=spec.timeouts.grace_s,
                kill_s=spec.timeouts.kill_s,
            )
        )
        self._workers: dict[int, Worker] = {}
        self._ranks_by_pid: dict[int, int] = {}
        self._unclaimed: dict[int, int] = {}  # pid -> exit code: ended before it was announced
        self._events: deque[ev.Event] = deque()
        self._orders: tuple[protocol.WorkerOrder, ...] = ()  # waiting for forkserver or store
        self._forkserver_deaths = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._ended = 0
        self._ending: Ending | None = None
        self._deciding = False
        self._loop = asyncio.new_event_loop()
        self._store = Store(listener, self._loop, self._on_knock)

    def run(self) -> Ending:
        """Run the job to its end."""
        loop = self._loop
        self._listen_to_signals()
        try:
            self._watch_forkserver()
            self._post(ev.LaunchRequested())
            slow = loop.call_later(SLOW_START_S, self._say_who_is_awaited)
            if self._ending is None:
                loop.run_forever()
            slow.cancel()
            assert self._ending is not None
            return self._ending
        finally:
            self._end_processes()
            loop.close()

    # --- events in -----------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        self._loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        for name in self._spec.signals:
            signum = getattr(signal, name)
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup: it asked to outlive its terminal
            self._loop.add_signal_handler(signum, self._on_stop_signal, signum)
        for signum in PASSED_ON:
            if signum.name not in self._spec.signals:
                self._loop.add_signal_handler(signum, self._on_passed_signal, signum)

    def _on_stop_signal(self, signum: int) -> None:
        self._post(ev.StopRequested(signum))

    def _on_passed_signal(self, signum: int) -> None:
        self._post(ev.SignalReceived(signum))

    def _on_child(self) -> None:
        """Some children are dead: their groups are signalled before their pids are given back."""
        self._hear_forkserver()  # a worker may be announced and dead at once
        exited: list[ev.Event] = []
        for ended in processes.ended_children():
            rank = self._ranks_by_pid.pop(ended.pid, None)
            if rank is not None:
                if ended.exit_code != 0:
                    processes.signal_group(ended.pid, signal.SIGKILL)
                exited.append(self._worker_ended(rank, ended.exit_code))
            elif ended.pid == self._store.pid:
                self._journal.event("StoreHostExited", exit_code=ended.exit_code)
                self._store.on_exit()
            elif ended.pid != self._forkserver.pid:
                self._unclaimed[ended.pid] = ended.exit_code
        for event in exited:
            self._post(event)

    def _worker_ended(self, rank: int, exit_code: int) -> ev.Event:
        worker = self._workers[rank]
        worker.exit_code = exit_code
        worker.ended_at = time.time()
        self._ended += 1
        worker.order = self._ended
        return ev.WorkerExited(rank, worker.attempt, exit_code)

    def _hear_forkserver(self) -> None:
        if self._forkserver.link is not None and not self._forkserver.hear(self._on_message):
            self._on_forkserver_gone()

    def _on_message(self, message: protocol.Message) -> None:
        match message:
            case protocol.Ready():
                self._journal.event("ForkserverReady", **asdict(message))
                if message.problem:
                    self._replace_forkserver(message.problem)
                else:
                    self._send_orders()
            case protocol.Forked():
                self._on_forked(message)
            case protocol.ForkFailed():
                self._on_fork_failed(message)
            case protocol.StoreForked():
                self._journal.event("StoreForked", **asdict(message))
                self._store.on_forked(message)
                self._send_orders()
            case _:
                raise protocol.ProtocolError(f"not for an agent: {message}")

    def _on_forked(self, message: protocol.Forked) -> None:
        worker = self._workers[message.rank]
        worker.pid = message.pid
        worker.started_at = time.time()
        self._ranks_by_pid[message.pid] = message.rank
        self._post(ev.WorkerStarted(message.rank, message.attempt, message.pid))
        if message.pid in self._unclaimed:
            del self._ranks_by_pid[message.pid]
            self._post(self._worker_ended(message.rank, self._unclaimed.pop(message.pid)))

    def _on_fork_failed(self, message: protocol.ForkFailed) -> None:
        worker = self._workers[message.rank]
        worker.why = message.why
        if worker.pid:  # it exists and says why it will leave: its exit is the event
            self._journal.event("WorkerSpoke", rank=message.rank, why=message.why)
            return
        self._ended += 1
        worker.order = self._ended
        worker.ended_at = time.time()
        self._post(ev.StartFailed(message.rank, message.attempt, message.why))

    def _post(self, event: ev.Event) -> None:
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
        self._changed(self._job, tuple(self._workers.values()))

    def _decide(self, event: ev.Event) -> None:
        before = self._job.state
        decision = decide(self._job, event)
        self._job = decision.job
        for rank, state in self._job.ranks.items():
            if rank in self._workers and self._workers[rank].attempt == self._job.attempt:
                self._workers[rank].state = state
        self._journal.event(
            type(event).__name__,
            **asdict(event),
            state=self._job.state.value if self._job.state is not before else before.value,
        )
        for action in decision.actions:
            self._journal.event(type(action).__name__, **asdict(action))
            self._act(action)
        if before is JobState.STARTING and self._job.state is JobState.RUNNING:
            self._forkserver_may_warm_up()

    # --- actions out ---------------------------------------------------------------------------

    def _act(self, action: ev.Action) -> None:
        match action:
            case ev.StartAttempt():
                self._start_attempt(action)
            case ev.CancelStarts():
                self._cancel_starts(action.reason)
            case ev.SignalRanks():
                self._signal(action)
            case ev.SetDeadline():
                self._set_deadline(action)
            case ev.Sweep():
                self._sweep()
            case ev.Finish():
                self._finish(action)

    def _start_attempt(self, action: ev.StartAttempt) -> None:
        if action.attempt > 0:
            self._say(action.reason)
        self._orders = self._plan(action.attempt)
        self._workers = {
            order.rank: Worker(order.rank, local_rank, action.attempt)
            for local_rank, order in enumerate(self._orders)
        }
        self._ended = 0
        self._output.begin(action.attempt, self._orders)
        self._store.begin()
        self._send_orders()

    def _send_orders(self) -> None:
        """Order the waiting workers, once the forkserver is ready and no old store can answer."""
        if not self._orders or not self._forkserver.ready or self._store.is_changing:
            return
        orders, self._orders = self._orders, ()
        with contextlib.suppress(OSError):  # it is gone: its link says so and the orders are owed
            self._forkserver.order(self._job.attempt, orders)

    def _cancel_starts(self, reason: str) -> None:
        cancelled, self._orders = self._orders, ()
        for order in cancelled:
            why = f"called off: {reason}"
            self._on_fork_failed(protocol.ForkFailed(order.rank, self._job.attempt, why))

    def _signal(self, action: ev.SignalRanks) -> None:
        stopping = self._job.state in {JobState.STOPPING, JobState.KILLING}
        for rank in action.ranks:
            worker = self._workers[rank]
            if worker.pid in self._ranks_by_pid:
                worker.told = worker.told or stopping
                processes.signal_group(worker.pid, action.signum)

    def _set_deadline(self, action: ev.SetDeadline) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if action.after_s is not None:
            passed = ev.DeadlinePassed(action.state, action.attempt)
            self._deadline = self._loop.call_later(action.after_s, self._post, passed)

    def _sweep(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._store.end()
        spared = frozenset({self._forkserver.pid} if self._forkserver.link is not None else ())
        killed = processes.end_adopted(spared, SWEEP_S)
        if killed:
            self._journal.event("LeftoversKilled", pids=killed)
        self._unclaimed.clear()
        self._attempt_ended(self._job.state, tuple(self._workers.values()))

    def _finish(self, action: ev.Finish) -> None:
        workers = tuple(self._workers.values())
        self._ending = Ending(
            action.state, action.exit_code, action.reason, self._job.attempt, workers
        )
        self._loop.stop()

    # --- forkserver and store ------------------------------------------------------------------

    def _watch_forkserver(self) -> None:
        assert self._forkserver.link is not None
        self._loop.add_reader(self._forkserver.link.fileno(), self._hear_forkserver)

    def _on_forkserver_gone(self) -> None:
        """Its link closed: whoever it had not forked yet is forked by the next one."""
        assert self._forkserver.link is not None
        self._loop.remove_reader(self._forkserver.link.fileno())
        owed = {rank for rank, _ in self._forkserver.forget()}
        self._journal.event("ForkserverExited", owed=sorted(owed))
        self._store.on_forkserver_gone()
        if self._ending is not None:
            return
        again = tuple(order for order in self._plan(self._job.attempt) if order.rank in owed)
        self._orders += again
        self._forkserver_deaths += 1
        was_warming = not self._forkserver.ready and self._forkserver.warmth is not None
        if was_warming or self._forkserver_deaths > 1:
            self._forkserver = self._cold()
        self._restart_forkserver("the forkserver died")

    def _replace_forkserver(self, problem: str) -> None:
        """Its warmth cannot be used: a cold one takes over."""
        self._say(f"workers start cold: {problem}")
        assert self._forkserver.link is not None
        self._loop.remove_reader(self._forkserver.link.fileno())
        os.kill(self._forkserver.pid, signal.SIGKILL)
        self._forkserver.forget()
        self._forkserver = self._cold()
        self._restart_forkserver(problem)

    def _restart_forkserver(self, why: str) -> None:
        try:
            if self._forkserver_deaths > FORKSERVER_DEATHS:
                raise OSError(0, f"{why}, {self._forkserver_deaths} times")
            self._forkserver.start()
        except OSError as error:
            failed, self._orders = self._orders, ()
            for order in failed:
                reason = f"no forkserver: {error.strerror}"
                self._on_fork_failed(protocol.ForkFailed(order.rank, self._job.attempt, reason))
        else:
            self._journal.event("ForkserverStarted", pid=self._forkserver.pid, reason=why)
            self._watch_forkserver()

    def _forkserver_may_warm_up(self) -> None:
        if self._spec.max_restarts > 0:
            with contextlib.suppress(OSError):  # gone: its link says so
                self._forkserver.warm_up()

    def _on_knock(self) -> None:
        """The first worker of an attempt connects to MASTER_PORT."""
        try:
            self._forkserver.order_store(self._job.attempt, self._store.listener)
        except OSError:
            self._store.on_forkserver_gone()

    def _say_who_is_awaited(self) -> None:
        awaited = self._job.having(RankState.PENDING)
        if awaited and self._job.state is JobState.STARTING:
            doing = "" if self._forkserver.ready else "; the forkserver is still importing"
            self._output.progress(f"waiting for {len(awaited)} of {len(self._workers)} ranks{doing}")

    def _end_processes(self) -> None:
        """Nothing of the job outlives this call but what the kernel cannot kill."""
        self._forkserver.forget()
        for signum in (*map(signal.Signals.__getitem__, self._spec.signals), *PASSED_ON):
            with contextlib.suppress(ValueError, RuntimeError):
                self._loop.remove_signal_handler(signum)
        self._loop.remove_signal_handler(signal.SIGCHLD)
        processes.end_adopted(frozenset(), SWEEP_S)
