"""Processes in the place of dead ones; most come to life before it is decided to replace those.

While the survivors write the checkpoint in memory, newcomers start, import, and build what the
script builds, up to where they ask what to go on from; there they wait. ReplaceRanks takes them in.
If it never comes they end with the attempt, and nobody has heard of them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping

from agent.controller import actions as do
from agent.records.worker_output import WorkerOutput
from agent.workers import processes
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract import protocol
from worker_hooks.contract.env import rejoined


class Replacements:
    """Those that wait for an attempt that has not begun, and how they get into it."""

    def __init__(
        self,
        plan: Callable[[int, bool], tuple[protocol.WorkerOrder, ...]],
        starter: Starter,
        output: WorkerOutput,
    ) -> None:
        """As the supervisor has them; nobody waits yet."""
        self._plan = plan
        self._starter = starter
        self._output = output
        self._workers: dict[int, Worker] = {}
        self._ordered: dict[int, protocol.WorkerOrder] = {}
        self._attempt = -1

    def prepare(self, action: do.PrepareRanks, workers: Mapping[int, Worker]) -> bool:
        """Order them; whether they can be started now.

        Args:
            action: who, and for which attempt.
            workers: of the present attempt.
        """
        self._dismiss()
        port = self._starter.reserve(action.attempt)
        if not port:
            return False
        orders = self._orders(action.attempt, action.ranks, port)
        made = self._output.make_ahead(orders)
        self._attempt = action.attempt
        self._ordered = {order.rank: order for order in orders}
        self._workers = {
            rank: Worker(rank, workers[rank].local_rank, action.attempt)
            for rank in (order.rank for order in made)
        }
        self._starter.order_ahead(made)
        return True

    def begin(self, action: do.ReplaceRanks, workers: dict[int, Worker]) -> list[Worker]:
        """Put them into the place of the dead; the rest is ordered. The starter was renewed.

        Args:
            action: the decision.
            workers: of the attempt; newcomers come into it.

        Returns:
            Those that exist already.
        """
        attempt = action.attempt
        orders = self._orders(attempt, action.newcomers, self._starter.port)
        waiting = {rank: self._take(rank, attempt) for rank in action.newcomers}
        self._dismiss()
        for rank, worker in waiting.items():
            workers[rank].is_replaced = True
            workers[rank] = worker or Worker(rank, workers[rank].local_rank, attempt)
        self._output.make(attempt, orders)
        self._starter.add(tuple(order for order in orders if waiting[order.rank] is None))
        self._output.add(attempt, orders)
        return [worker for worker in waiting.values() if worker is not None and worker.pid]

    def _orders(
        self, attempt: int, ranks: Collection[int], port: int
    ) -> tuple[protocol.WorkerOrder, ...]:
        there = rejoined(attempt, port)
        return tuple(
            order._replace(environ=order.environ | there)
            for order in self._plan(attempt, True)
            if order.rank in ranks
        )

    @property
    def is_awaited(self) -> bool:
        """Whether the forkserver has yet to say what became of one."""
        return any(not worker.pid for worker in self._workers.values())

    def forked(self, message: protocol.Forked, exit_code: int | None) -> bool:
        """Take in that one exists; whether it is one of these.

        Args:
            message: the forkserver's.
            exit_code: it has ended already.
        """
        worker = self._workers.get(message.rank)
        if worker is None or message.attempt != self._attempt:
            return False
        worker.pid, worker.started_at = message.pid, time.time()
        worker.exit_code = exit_code
        return True

    def failed(self, message: protocol.ForkFailed) -> bool:
        """Take in that one could not start, or why it ends; whether it is one of these."""
        if message.attempt != self._attempt or message.rank not in self._workers:
            return False
        if not self._workers[message.rank].pid:
            del self._workers[message.rank]
        return True

    def ended(self, pid: int, exit_code: int) -> bool:
        """Take in that a child is dead; whether it is one of these."""
        for worker in self._workers.values():
            if worker.pid == pid:
                worker.exit_code = exit_code
                processes.signal_group(pid, signal.SIGKILL)  # it is not reaped yet
                return True
        return False

    def _take(self, rank: int, attempt: int) -> Worker | None:
        """One that is alive, or about to be, for the attempt that begins."""
        worker = self._workers.pop(rank, None)
        if worker is None or attempt != self._attempt or worker.exit_code is not None:
            return None
        del self._ordered[rank]
        return worker

    def clear(self) -> None:
        """The attempt is over; whoever sweeps its processes reaps these, too."""
        self._dismiss()
        self._output.forget_ahead()

    def _dismiss(self) -> None:
        for worker in self._workers.values():
            if worker.pid and worker.exit_code is None:
                processes.signal_group(worker.pid, signal.SIGKILL)
        self._output.discard(tuple(self._ordered.values()))
        self._workers, self._ordered = {}, {}
        self._attempt = -1
