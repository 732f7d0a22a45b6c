"""Watches for ranks that make no progress, and for slow ones: the effects of hang and straggler.

The status pages are read, which costs no message and no system call; a process is looked at only
once its page does not change. Other nodes tell of theirs, see ``agent.hooks.rank_processes``. The
timer runs while the job does, from the first commits on, once every rank has registered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health.hang import HangDetector, Inspection, OtherRanks
from agent.health.stall import (
    DEAD,
    STOPPED,
    Observation,
    StallKind,
    typical_steps,
)
from agent.health.stragglers import Stragglers
from agent.hooks.rank_links import Timer
from agent.hooks.rank_processes import RankProcesses
from agent.hooks.services import Services
from agent.hooks.status_pages import StatusPages
from agent.workers.tempo import NS, Tempo, tempo
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

SHORTEST_S, LONGEST_S = 0.25, 5.0  # between two looks
LOOKS = 4  # within the shortest limit, unless very many ranks are looked at
MOST_BUSY = 0.02  # share of a processor
LATE_S = 0.5  # a look that is so late says nothing about the ranks: the machine was late
ANSWER_S, NODES_ANSWER_S = 1.0, 3.0  # from other nodes, too
MOST_PACED = 1024  # ranks whose paces are read at once
MOST_SILENT = 16  # of those that are asked, until the deadline: each answer costs a look at these
OTHERS_S = 4.0  # longer than what another node told counts
UNHEARD_S = 30.0
UNHEARD = (
    "the msrun of a node says nothing, though its machine is well: until it does, no rank that "
    "hangs is noticed"
)
CANNOT_ANSWER = frozenset({STOPPED, *DEAD})

PAUSED = (
    "all ranks are stopped (SIGSTOP): msrun takes the job to be paused by a person; SIGCONT to "
    "every rank continues it"
)
AT_PROMPT = "waits for a person, in a debugger or for input from the terminal"
FROZEN = "is frozen by its control group"
LATE = "msrun could not run when the ranks answered, or was not heard by another node"


class Peers(Protocol):
    """The ranks' lines."""

    def send_all(self, ranks: Iterable[int], message: protocol.Message) -> object:
        """Say something to ranks."""


class HealthMonitor:
    """Watches the ranks of a job that runs."""

    def __init__(
        self,
        hang_s: float | None,
        pages: StatusPages,
        links: Peers,
        processes: RankProcesses,
        worker: Callable[[int], Worker],
        services: Services,
    ) -> None:
        """Watch nothing yet.

        Args:
            hang_s: a rank without progress for so long hangs; 0: never; ``None``: by its pace.
            worker: a rank's, in the present attempt.
        """
        self._hang_s = hang_s
        self._pages = pages
        self._links = links
        self._processes = processes
        self._worker = worker
        self._services = services
        self._loop = services.loop
        self._journal = services.journal
        self._state = JobState.NEW
        self._ranks: AbstractSet[int] = frozenset()
        self._are_all = self._were_all = False
        self._detector = HangDetector(hang_s)
        self._stragglers = Stragglers()
        self._paced: dict[int, Tempo] = {}
        self._next_paced = 0  # of very many ranks
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._took_s = 0.0  # of processor time, the last look
        self._was_paused = False
        self._stood_from_s: float | None = None  # a standstill was told then, and is not over
        self._inspection = 0  # its id
        self._answers: dict[int, Inspection] | None = None  # while there is one
        self._asked: dict[int, int] = {}  # rank -> attempt
        self._deadline: Timer | None = None
        self._answers_due_s = 0.0
        self._pending: set[int] = set()  # of those that were asked
        self._others_since_s: float | None = None  # all that train are stopped, and others run
        self._unheard_since_s: float | None = None  # a node says nothing

    def watch(self, state: JobState, ranks: AbstractSet[int], *, are_all: bool) -> None:
        """The job is in this state, these ranks train; ``are_all``: none has exited already.

        ``ranks`` may change without a word.
        """
        self._state, self._ranks, self._are_all = state, ranks, are_all
        self._were_all = self._were_all or are_all
        if state is not JobState.RUNNING or not ranks:
            self._rest()

    def refresh(self, workers: Mapping[int, Worker]) -> None:
        """Note in ``workers`` how fast they are; called now and then while ranks have pages."""
        paces = self._pages.paces(self._in_turn(workers))
        for rank, pace in paces.items():
            if (found := tempo(pace)) is None:
                self._paced.pop(rank, None)
            else:
                self._paced[rank] = found
        self._detector.set_pace(typical_steps(paces.values()))
        if self._state is JobState.RUNNING:
            self._name_stragglers()
            self._arm()
        for rank, worker in workers.items():
            # once a rank is gone, the last known one stays
            worker.tempo = self._paced.get(rank, worker.tempo)
            worker.is_slow = rank in self._stragglers.named

    def _in_turn(self, workers: Mapping[int, Worker]) -> Iterable[int]:
        """The ranks whose paces are read this time: all, unless there are very many."""
        if len(workers) <= MOST_PACED:
            return workers
        ranks, begin = list(workers), self._next_paced % len(workers)
        self._next_paced = begin + MOST_PACED
        return (*ranks, *ranks)[begin : begin + MOST_PACED]

    def hear(self, message: protocol.Stack) -> None:
        """A rank says where its main thread is."""
        if self._answers is not None and message.id == self._inspection:
            held = AT_PROMPT if message.is_at_prompt else ""
            answer = Inspection(message.is_in_collective, message.text, held)
            self._answers[message.rank] = answer
            self._pending.discard(message.rank)
            self._judge_if_all_answered()

    def forget(self) -> None:
        """The attempt is over."""
        self._rest()
        self._detector = HangDetector(self._hang_s)
        self._stragglers = Stragglers()
        self._ranks = frozenset()
        self._were_all = False

    def _arm(self) -> None:
        """Look at the ranks from now on, if there are steps to compare with."""
        if self._timer is not None or self._hang_s == 0 or not (self._were_all and self._ranks):
            return  # as nearly always; what follows may look at thousands of pages
        if any(beat.step for rank in self._ranks for beat in self._pages.beats((rank,)).values()):
            self._detector.start_anew(self._loop.time())
            self._set_timer()

    def _rest(self) -> None:
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._timer = self._deadline = self._answers = None
        self._others_since_s = self._unheard_since_s = None

    def _name_stragglers(self) -> None:
        change = self._stragglers.look({r: t for r, t in self._paced.items() if r in self._ranks})
        for slow in change.began:
            self._journal.event("StragglerNamed", **slow._asdict(), reason=slow.words)
        for rank in change.ended:
            self._journal.event("StragglerEnded", rank=rank)

    # --- hangs ----------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        least_s = min(self._detector.limits[:3]) / LOOKS
        after_s = min(LONGEST_S, max(SHORTEST_S, least_s, self._took_s / MOST_BUSY))
        self._due_s = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        began_s = time.thread_time()
        self._look_at_all()
        self._took_s = time.thread_time() - began_s

    def _look_at_all(self) -> None:
        now_s = self._loop.time()
        if now_s - self._due_s > LATE_S:
            self._detector.start_anew(now_s)
        self._set_timer()
        if not self._processes.are_known(self._ranks):  # a node's line may be cut
            self._detector.start_anew(now_s)
            self._note_unheard(now_s)
            return
        self._unheard_since_s = None
        seen = self._seen()
        if self._answers is not None:
            self._note(seen, now_s)
            return
        cases = self._detector.look(seen, now_s, self._others(seen, now_s))
        is_paused = self._detector.is_paused and self._others_since_s is None
        if is_paused and not self._was_paused:
            self._journal.event("JobPaused", ranks=sorted(self._ranks), reason=PAUSED)
            self._services.say(PAUSED)
        self._was_paused = is_paused
        self._end_standstill(now_s)
        if cases:
            self._inspect(cases)

    def _seen(self) -> list[Observation]:
        beats = self._pages.beats(self._ranks)
        found = []
        for rank, beat in beats.items():
            seen = Observation(rank, beat, rank in self._paced)
            if self._detector.is_silent(rank, beat):
                state, cpu_s = self._processes.use(rank)
                seen = seen._replace(state=state, cpu_s=cpu_s)
            found.append(seen)
        return found

    def _note(self, seen: Sequence[Observation], now_s: float) -> None:
        self._detector.note(seen, now_s, self._others(seen, now_s))

    def _others(self, seen: Sequence[Observation], now_s: float) -> OtherRanks:
        """What ranks do that do not train any more."""
        if not self._do_others_run(seen):
            self._others_since_s = None
        elif self._others_since_s is None:
            self._others_since_s = now_s
        since_s = self._others_since_s
        # a person stops one after the other, and other nodes tell of theirs a little later
        run = since_s is not None and now_s - since_s >= OTHERS_S
        return OtherRanks(are_there=not self._are_all, run=run)

    def _do_others_run(self, seen: Sequence[Observation]) -> bool:
        """Whether every rank that trains is stopped, but one on its way out is not."""
        if self._are_all or not all(each.state == STOPPED for each in seen):
            return False
        others = self._pages.all().keys() - self._ranks
        return any(
            self._processes.are_known((rank,)) and self._processes.use(rank)[0] not in CANNOT_ANSWER
            for rank in others
        )

    def _note_unheard(self, now_s: float) -> None:
        """Say once that nobody is watched, if it lasts: the kernel of such a node is well."""
        if self._unheard_since_s is None:
            self._unheard_since_s = now_s
        elif now_s - self._unheard_since_s >= UNHEARD_S:
            self._unheard_since_s = float("inf")  # said
            self._services.say(UNHEARD)

    def _inspect(self, cases: list[StallKind]) -> None:
        self._inspection += 1
        self._answers = {}
        attempts = {rank: page.attempt for rank, page in self._pages.all().items()}
        self._asked = {rank: attempts[rank] for rank in sorted(self._ranks) if rank in attempts}
        self._pending = set(self._asked)
        self._journal.event(
            "HangSuspected",
            ranks=[case.rank for case in cases],
            inspection=self._inspection,
            reason="; ".join(f"rank {case.rank} {case.words}" for case in cases),
        )
        answer_s = ANSWER_S if self._processes.are_here(self._asked) else NODES_ANSWER_S
        self._answers_due_s = self._loop.time() + answer_s
        self._deadline = self._loop.call_at(self._answers_due_s, self._judge)
        self._links.send_all(self._asked, protocol.Inspect(self._inspection))
        self._judge_if_all_answered()

    def _judge_if_all_answered(self) -> None:
        """All but those that cannot answer. What was known of other nodes before may be old."""
        if self._answers is None or len(self._pending) > MOST_SILENT:
            return  # the deadline judges
        if not all(self._processes.use(rank)[0] in CANNOT_ANSWER for rank in self._pending):
            return
        if self._processes.are_known(self._asked, self._inspection):
            self._judge()

    def _judge(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        answers, self._answers = self._answers or {}, None
        now_s, silent = self._loop.time(), self._asked.keys() - answers.keys()
        is_late = now_s - self._answers_due_s > LATE_S  # perhaps the ranks could not run, either
        is_late = is_late or not self._processes.are_known(self._asked, self._inspection)
        if is_late:
            self._detector.start_anew(now_s)
        frozen = [rank for rank in silent if self._processes.is_frozen(rank)]
        for rank in frozen:
            answers[rank] = Inspection(is_in_collective=False, text=FROZEN, held=FROZEN)
        self._note(self._seen(), now_s)
        verdict = self._detector.judge(answers)
        self._journal.event(
            "HangJudged",
            inspection=self._inspection,
            culprits=sorted(verdict.culprits),
            victims=verdict.victims,
            unanswered=sorted(silent),
            stacks={rank: answers[rank].text.splitlines() for rank in sorted(answers)},
            reason=LATE if is_late else verdict.reason or "; ".join(verdict.culprits.values()),
        )
        if verdict.standstill and self._stood_from_s is None:
            self._stood_from_s = now_s
            self._journal.event("JobStandsStill", reason=verdict.standstill)
            self._services.say(verdict.standstill)
        beats = self._pages.beats(verdict.culprits)
        for rank, why in verdict.culprits.items():
            self._worker(rank).hung = why
            silent_s = max(0.0, now_s - NS * beats[rank].at_ns) if rank in beats else 0.0
            attempt, is_mutual = self._asked[rank], verdict.is_mutual
            self._services.post(ev.RankHung(rank, attempt, why, round(silent_s, 3), is_mutual))

    def _end_standstill(self, now_s: float) -> None:
        if self._stood_from_s is not None and not self._detector.stands_still:
            lasted_s, self._stood_from_s = now_s - self._stood_from_s, None
            words = f"there is progress again, {lasted_s:.0f} s after the standstill was noticed"
            self._journal.event("JobMovesAgain", reason=words)
            self._services.say(words)
