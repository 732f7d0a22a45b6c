"""Ranks that want to exit by themselves: each may, unless a dump or a peer needs it.

A finished rank is kept while others still work, however long: they may evaluate or export for
hours, and only finished ranks can save the last step if one of those dies. A rank may also wait for
the *end* of a finished one, which nothing shows but that no rank does anything. Therefore finished
ranks are let go after a long time in which the others used no processor.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from agent.controller.drain import DRAINING
from agent.controller.states import JobState
from agent.hooks.rank_links import RankLinks, Timer
from agent.hooks.rank_processes import RankProcesses
from agent.hooks.status_pages import StatusPages
from agent.text.wording import ranged
from worker_hooks.contract import protocol

TRAINING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.HOLDING})
LOOK_S = 30.0  # between two looks at what the others do while finished ranks wait for them
LONGEST_IDLE_S = 600.0  # of those others
AT_WORK = 0.002  # of one processor: less is a timer that wakes up, and no work
DOUBT_S = 0.5  # how long to wait for a death notice when an unfinished rank wants to exit


class ExitingRanks:
    """The ranks of the present attempt that want to exit."""

    def __init__(
        self,
        links: RankLinks,
        pages: StatusPages,
        processes: RankProcesses,
        training: AbstractSet[int],
        say: Callable[[str], None],
    ) -> None:
        """Know no such rank yet.

        ``training``: ranks that registered and are neither gone nor about to exit; it changes.
        """
        self._say = say
        self._links = links
        self._pages = pages
        self._processes = processes
        self._training = training
        self._waiting: dict[int, bool] = {}  # rank -> whether its training is over
        self.finished: set[int] = set()
        """Those that may exit after their training."""
        self._next_look: Timer | None = None  # while finished ranks wait for others
        self._used_s = 0.0  # processor time of those others at the last look
        self._idle_s = 0.0  # they have used none for so long
        self._is_kept_said = self._is_given_up = False
        self._doubts: dict[int, Timer] = {}  # unfinished ranks, which perhaps flee a death
        self._state = JobState.NEW
        self.agreed = 0  # the step that all come to in a graceful exit; 0: none yet

    def attach(self, call_later: Callable[..., Timer]) -> None:
        """``call_later``: the loop's."""
        self._call_later = call_later

    def add(self, rank: int, *, is_done: bool) -> None:
        """A rank wants to exit, perhaps because its training is over; it waits."""
        self._waiting[rank] = is_done
        if is_done and self._next_look is None and not self._is_given_up:
            self._used_s, self._idle_s = self._used(), 0.0
            self._next_look = self._call_later(LOOK_S, self._look)
        if not is_done and rank not in self._doubts:
            self._doubts[rank] = self._call_later(DOUBT_S, lambda: self._end_doubt(rank))

    def forget(self, rank: int) -> None:
        """A rank is gone, or trains again after all."""
        self._waiting.pop(rank, None)
        if (doubt := self._doubts.pop(rank, None)) is not None:
            doubt.cancel()

    def take_back(self, rank: int) -> None:
        """A rank that may have exited is a new process now, or trains again."""
        self.forget(rank)
        self.finished.discard(rank)
        self._is_given_up = False

    def has_finished(self, rank: int) -> bool:
        """Whether a rank may exit after its training."""
        return rank in self.finished

    def decided(self, state: JobState) -> None:
        """The job is in this state now."""
        self._state = state
        self.let_go()

    def let_go(self) -> None:
        """Release the ranks that wait, unless a dump needs them or a peer still may.

        A finished rank holds the last step: if a peer dies in that step, no other rank may hold it.
        One that finished before the step of a graceful exit is in the way of that exit. While lost
        ranks are replaced, a finished rank has to join them; an unfinished one cannot. A rank that
        wants to exit in the middle of training may have noticed the end of a peer before the agent.
        """
        if self._state in DRAINING:
            return
        may_be_needed = bool(self._training) and self._state in TRAINING
        is_awaited = may_be_needed and not self._is_given_up
        is_needed = is_awaited or self._state is JobState.REPLACING
        doubted = self._doubts if may_be_needed else {}
        kept = {
            rank: is_done
            for rank, is_done in self._waiting.items()
            if (is_needed and not self._is_behind(rank) if is_done else rank in doubted)
        }
        released = self._waiting.keys() - kept.keys()
        self.finished |= {rank for rank in released if self._waiting[rank]}
        self._waiting = kept
        release = protocol.Release(f"the job is {self._state.value}")
        self._links.send_all(sorted(released), release)  # for one that is gone this calls `forget`

    def _is_behind(self, rank: int) -> bool:
        return (self._pages.newest_step(rank) or 0) < self.agreed

    def _end_doubt(self, rank: int) -> None:
        del self._doubts[rank]
        self.let_go()

    def _look(self) -> None:
        """Finished ranks have waited for a while: say so once, and see whether others work."""
        self._next_look = None
        finished = sorted(rank for rank, is_done in self._waiting.items() if is_done)
        if not finished or not self._training:
            return
        used_s = self._used()
        is_idle = used_s - self._used_s < AT_WORK * LOOK_S
        is_idle = is_idle and self._processes.are_known(self._training)
        self._idle_s = self._idle_s + LOOK_S if is_idle else 0.0
        self._used_s = used_s
        whom, others = ranged(finished), ranged(self._training)
        if self._idle_s >= LONGEST_IDLE_S:
            self._is_given_up = True
            idle = f"{others} did nothing for {self._idle_s:.0f} s"
            self._say(f"{idle}: {whom} may exit, and with them whoever could save the last step")
            self.let_go()
            return
        if not self._is_kept_said:
            self._is_kept_said = True
            self._say(f"{whom} finished training and wait: they hold the last step for {others}")
        self._next_look = self._call_later(LOOK_S, self._look)

    def _used(self) -> float:
        """Processor seconds of the ranks that have not finished, with their children."""
        return sum(self._processes.use(rank)[1] for rank in self._training)

    def stop_looking(self) -> None:
        """No finished rank waits any more, or not for those who work."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def clear(self) -> None:
        """Every rank is gone."""
        self._waiting.clear()
        for rank in tuple(self._doubts):
            self.forget(rank)
        self.finished.clear()
        self.agreed = 0
        self._is_given_up = False
        self.stop_looking()
