"""Finds ranks that a signal has stopped where the hang detection does not look, or that never end.

A rank that trains is watched by its status page. One that joins a new process group has no pace
yet, and may take any time for imports; but a stopped one never comes, so it is given up. One that
has finished and may exit is needed by nobody: it is continued, and if its end takes long for
another reason, people are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health.stall import STOPPED
from agent.hooks.rank_links import Timer
from agent.hooks.rank_processes import RankProcesses
from agent.hooks.services import Services
from agent.text.wording import listed
from agent.workers.worker import Worker

LOOK_S = 1.0
LOOKS = 3  # in a row at which a rank is stopped, until something is done
LONG_LOOKS = 60  # at which a rank that may exit is still there, until people are told
LATE_S = 0.5  # a look that is so late says nothing: perhaps no process could run
JOINS = "is stopped by a signal, and the other ranks wait for it to join them"


class StoppedRanks:
    """Watches all ranks while lost ones are replaced, and finished ones until they have exited."""

    def __init__(
        self,
        ranks: Iterable[int],
        processes: RankProcesses,
        worker: Callable[[int], Worker],
        finished: AbstractSet[int],
        wake: Callable[[int], None],
        services: Services,
    ) -> None:
        """Watch nothing yet.

        Args:
            worker: a rank's, in the present attempt.
            finished: ranks that may exit, because their training is over; it changes.
            wake: sends SIGCONT to a rank.
        """
        self._ranks = tuple(ranks)
        self._processes = processes
        self._worker = worker
        self._finished = finished
        self._wake = wake
        self._services = services
        self._loop = services.loop
        self._state = JobState.NEW
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._looks: dict[tuple[int, int], int] = {}  # rank and pid -> looks at which it stood
        self._exiting: dict[int, int] = {}  # rank -> looks at which it had finished
        self._is_slow_exit_said = False

    def watch(self, state: JobState) -> None:
        """The job is in this state."""
        if state is not self._state:
            self._state = state
            self._looks.clear()
            self._exiting.clear()
        is_needed = bool(self._ranks) and (
            state is JobState.REPLACING or (state is JobState.RUNNING and bool(self._finished))
        )
        if is_needed and self._timer is None:
            self._set_timer()
        elif not is_needed and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self._due_s = self._loop.time() + LOOK_S
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        is_late = self._loop.time() - self._due_s > LATE_S
        self._set_timer()
        workers = [self._worker(rank) for rank in self._ranks]
        alive = {(each.rank, each.pid): each for each in workers if each.is_alive}
        stopped = [each for each in alive if self._processes.use(*each)[0] == STOPPED]
        is_late = is_late or not self._processes.are_known(rank for rank, _ in stopped)
        if is_late or len(stopped) == len(self._ranks):  # if all are, a person did that
            self._looks.clear()
            return
        self._looks = {each: self._looks.get(each, 0) + 1 for each in stopped}
        for each in [each for each, count in self._looks.items() if count >= LOOKS]:
            if self._state is JobState.REPLACING:
                self._looks.pop(each, None)
                self._give_up(alive[each])  # this may end the watch
            elif each[0] in self._finished:
                self._looks.pop(each, None)
                self._continue(alive[each])
        if self._state is JobState.RUNNING:
            self._note_exiting(sorted(rank for rank, _ in alive if rank in self._finished))

    def _give_up(self, worker: Worker) -> None:
        worker.hung = JOINS
        self._services.post(ev.RankUnreachable(worker.rank, worker.attempt, JOINS))

    def _continue(self, worker: Worker) -> None:
        why = f"rank {worker.rank} is stopped by a signal on its way out: msrun sends it SIGCONT"
        self._services.journal.event("ExitContinued", rank=worker.rank, reason=why)
        self._services.say(why)
        self._wake(worker.rank)

    def _note_exiting(self, exiting: Sequence[int]) -> None:
        self._exiting = {rank: self._exiting.get(rank, 0) + 1 for rank in exiting}
        slow = [rank for rank, count in self._exiting.items() if count >= LONG_LOOKS]
        if slow and not self._is_slow_exit_said:
            self._is_slow_exit_said = True
            ago, pid = f"{LONG_LOOKS * LOOK_S:.0f} s ago", self._worker(slow[0]).pid
            where = "" if self._processes.are_here(slow[:1]) else " on its node"
            self._services.say(
                f"{listed(slow)} finished training {ago}, but still exists: `py-spy dump --pid "
                f"{pid}`{where} shows what its exit waits for"
            )
