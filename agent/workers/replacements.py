"""Processes that replace dead ones; most are started before the replacement is decided.

While the survivors write the dump in memory, replacements start, import, and build what the script
builds, up to the point where they ask what to resume from; there they wait. ReplaceRanks makes them
part of the job. If it never comes they end with the attempt, and no rank has noticed them.
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
from worker_hooks.contract.env import REHEARSE, rejoined


class Replacements:
    """The prestarted workers of an attempt that has not begun."""

    def __init__(
        self,
        plan: Callable[[int, bool, tuple[str, ...]], tuple[protocol.WorkerOrder, ...]],
        starter: Starter,
        output: WorkerOutput,
    ) -> None:
        """Nothing is prestarted yet. ``plan``: orders for all ranks of an attempt."""
        self._plan = plan
        self._starter = starter
        self._output = output
        self._workers: dict[int, Worker] = {}
        self._ordered: dict[int, protocol.WorkerOrder] = {}
        self._attempt = -1

    def prepare(self, action: do.PrepareRanks, workers: Mapping[int, Worker]) -> bool:
        """Order replacements; whether they can be started now.

        ``action``: which ranks, and for which attempt.
        """
        self._dismiss()
        port = self._starter.reserve(action.attempt)
        if not port:
            return False
        orders = self._orders(action, action.ranks, port)
        made = self._output.make_next(orders)
        self._attempt = action.attempt
        self._ordered = {order.rank: order for order in orders}
        self._workers = {
            rank: Worker(rank, workers[rank].local_rank, action.attempt, resumes=True)
            for rank in (order.rank for order in made)
        }
        self._starter.prestart(made)
        return True

    def begin(self, action: do.ReplaceRanks, workers: dict[int, Worker]) -> list[Worker]:
        """Replace the dead workers: by prestarted ones, else by new ones. The starter was renewed.

        ``workers``: of the attempt; the replacements are put into it.

        Returns:
            The replacements that exist already.
        """
        attempt = action.attempt
        orders = self._orders(action, action.newcomers, self._starter.port)
        waiting = {rank: self._take(rank, attempt) for rank in action.newcomers}
        self._dismiss()
        for rank, worker in waiting.items():
            workers[rank].is_replaced = True
            local_rank = workers[rank].local_rank
            workers[rank] = worker or Worker(rank, local_rank, attempt, resumes=True)
        self._output.make(attempt, orders)
        self._starter.add(tuple(order for order in orders if waiting[order.rank] is None))
        self._output.add(attempt, orders)
        return [worker for worker in waiting.values() if worker is not None and worker.pid]

    def _orders(
        self, action: do.PrepareRanks | do.ReplaceRanks, ranks: Collection[int], port: int
    ) -> tuple[protocol.WorkerOrder, ...]:
        there = rejoined(action.attempt, port)
        if action.rehearses:
            there[REHEARSE] = "1"
        return tuple(
            order._replace(environ=order.environ | there)
            for order in self._plan(action.attempt, True, action.devices)
            if order.rank in ranks
        )

    @property
    def is_awaited(self) -> bool:
        """Whether the forkserver has not yet answered for one of them."""
        return any(not worker.pid for worker in self._workers.values())

    def forked(self, message: protocol.Forked, exit_code: int | None) -> bool:
        """Note that a worker exists; whether it is a prestarted one."""
        worker = self._workers.get(message.rank)
        if worker is None or message.attempt != self._attempt:
            return False
        worker.pid, worker.started_at = message.pid, time.time()
        worker.exit_code = exit_code
        return True

    def failed(self, message: protocol.ForkFailed) -> bool:
        """Note that a worker could not start, or why it ends; whether it is a prestarted one."""
        if message.attempt != self._attempt or message.rank not in self._workers:
            return False
        if not self._workers[message.rank].pid:
            del self._workers[message.rank]
        return True

    def ended(self, pid: int, exit_code: int) -> bool:
        """Note that a child is dead; whether it is a prestarted worker."""
        for worker in self._workers.values():
            if worker.pid == pid:
                worker.exit_code = exit_code
                processes.signal_group(pid, signal.SIGKILL)  # it is not reaped yet
                return True
        return False

    def _take(self, rank: int, attempt: int) -> Worker | None:
        """The prestarted worker of a rank, if it is alive or about to be, for this attempt."""
        worker = self._workers.pop(rank, None)
        if worker is None or attempt != self._attempt or worker.exit_code is not None:
            return None
        del self._ordered[rank]
        return worker

    def clear(self) -> None:
        """The attempt is over; the sweep of its processes also reaps the prestarted ones."""
        self._dismiss()
        self._output.close_next()

    def _dismiss(self) -> None:
        for worker in self._workers.values():
            if worker.is_alive:
                processes.signal_group(worker.pid, signal.SIGKILL)
        self._output.discard(tuple(self._ordered.values()))
        self._workers, self._ordered = {}, {}
        self._attempt = -1
