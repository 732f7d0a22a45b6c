"""Finds ranks that a signal has stopped while others wait for them to join.

A rank that trains is watched by its status page. One that joins a new process group has no pace
yet, and may take any time for imports; but a stopped one never comes. If all ranks are stopped, a
person did that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health.stall import STOPPED
from agent.hooks.rank_links import Timer
from agent.hooks.services import Services
from agent.machine.process_use import process_use
from agent.workers.worker import Worker

LOOK_S = 1.0
LOOKS = 3  # in a row at which a rank is stopped, until it is given up
LATE_S = 0.5  # a look that is so late says nothing: perhaps no process could run
WHY = "is stopped by a signal, and the other ranks wait for it to join them"


class JoinWatch:
    """Watches while lost ranks are replaced."""

    def __init__(
        self,
        ranks: Iterable[int],
        pid: Callable[[int], int],
        worker: Callable[[int], Worker],
        services: Services,
    ) -> None:
        """Watch nothing yet.

        Args:
            ranks: of this node.
            pid: the process at a rank's link; 0: there is none.
            worker: a rank's, in the present attempt.
            services: of the agent.
        """
        self._ranks = tuple(ranks)
        self._pid = pid
        self._worker = worker
        self._services = services
        self._loop = services.loop
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._looks: dict[tuple[int, int], int] = {}  # rank and pid -> looks at which it stood

    def watch(self, state: JobState) -> None:
        """The job is in this state."""
        if state is JobState.REPLACING and self._timer is None:
            self._set_timer()
        elif state is not JobState.REPLACING:
            self._looks.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _set_timer(self) -> None:
        self._due_s = self._loop.time() + LOOK_S
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        is_late = self._loop.time() - self._due_s > LATE_S
        self._set_timer()
        workers = [self._worker(rank) for rank in self._ranks]
        alive = {
            (each.rank, self._pid(each.rank) or each.pid): each
            for each in workers
            if each.pid and each.exit_code is None
        }
        stopped = [each for each in alive if process_use(each[1])[0] == STOPPED]
        if is_late or len(stopped) == len(self._ranks):
            self._looks.clear()
            return
        self._looks = {each: self._looks.get(each, 0) + 1 for each in stopped}
        for each in [each for each, count in self._looks.items() if count >= LOOKS]:
            self._looks.pop(each, None)  # what was posted may have ended the watch
            worker = alive[each]
            worker.hung = WHY
            self._services.post(ev.RankUnreachable(worker.rank, worker.attempt, WHY))
