"""Which rank of a job hangs: alive, without progress, while its peers wait for it.

Pure: observations come in at each look, a finding comes out. A rank over its limit (see
:mod:`agent.health.stall`) is *suspected*, unless its peers make progress or it is in backward,
where ranks wait for each other; then all ranks are inspected. A *culprit* is over its limit and
gives no answer, or its main thread is in no collective; a rank in a collective is its victim.

A culprit that no signal has stopped is *spared* in three cases. No peer waits for it in a
collective. The kernel keeps it waiting: it reads, and cannot be killed. Or other ranks stand still
outside of collectives, too: then they have one cause, such as a file system that does not answer,
and new ranks would read from it as well. (If one rank alone stands in such an outage, because the
others had read already, it looks like a hang and is taken for one.) Where a rank waits for a
person, in a debugger, say, no rank is judged. Spared ranks are judged again as soon as one rank
moves, else less and less often. A rank without peers is never judged: nobody waits for it.

If all ranks are in collectives for twice their limits, the collectives do not match. Then no rank
is to blame, and the rank that is furthest behind (the lowest of several) is named: its end ends the
waiting of all, and the reason says where each of them was. A rank that replaces another one, and
has made no step yet, is never suspected, but counts here: it waits for something that its peers did
before it came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from agent.health.stall import (
    ARMED,
    STOPPED,
    TRACED,
    Observation,
    Stall,
    StallKind,
    TypicalSteps,
    idle_at_first,
    limits,
    observe,
    over_limit,
    stands,
)
from agent.text.wording import described, ranged
from worker_hooks.contract.status_page import Heartbeat, Phase

STALEMATE = 2  # times the limit, until ranks that all are in collectives wait in vain
EVERYBODY_WAITS = "all ranks wait in collectives that do not match"
OUTAGE = (
    "msrun takes it for an outage of what they read (a file system, a network), ends no rank, and "
    "waits"
)


class Inspection(NamedTuple):
    """Where a rank's main thread is, as its listener thread said."""

    is_in_collective: bool
    text: str
    held: str = ""  # by what a person keeps it from going on: ``is in a debugger``

    @property
    def innermost(self) -> str:
        """The last line."""
        return self.text.rpartition("\n")[2]


class OtherRanks(NamedTuple):
    """The ranks that do not train any more."""

    are_there: bool = False
    run: bool = False  # while all that train are stopped: so nobody paused the job


NO_OTHERS = OtherRanks()


class HangFinding(NamedTuple):
    """Which ranks hang, and why; or why none does."""

    culprits: Mapping[int, str]
    victims: tuple[int, ...]
    reason: str = ""
    is_mutual: bool = False  # all wait for each other, and one of them has to go
    standstill: str = ""  # for people: why nobody makes progress though no rank hangs


class HangDetector:
    """Follows the ranks of one job from look to look. Times are monotonic seconds."""

    def __init__(self, fixed_s: float | None) -> None:
        """``fixed_s``: the one limit of all tiers; ``None``: by the ranks' own pace."""
        self._fixed_s = fixed_s
        self.limits = limits(TypicalSteps(), fixed_s)
        self.is_paused = False
        """Whether every process is stopped: no accident does that, but a person."""
        self._stalls: dict[int, Stall] = {}
        self._have_left = False  # some ranks exited; others may wait for them until they are gone
        self._from_s = 0.0  # nothing before counts
        self._cleared: dict[int, int] = {}  # victim -> when it came to where it waits
        self._excused: dict[int, int] = {}  # the same of a rank that may wait outside of torch
        self._accused: dict[int, int] = {}
        self._spared: dict[int, bool] = {}  # rank -> whether it was stopped by a signal
        self._spared_at: tuple[tuple[int, int], ...] = ()  # where each rank was then
        self._spared_until_s = 0.0  # if nobody moves
        self._spared_for_s = 0.0
        self._new_asked_s = float("-inf")  # where ranks without a step are, when all stood still
        self._standing: dict[int, int] = {}  # the same of ranks that a standstill was told of

    @property
    def stands_still(self) -> bool:
        """Whether a standstill was found, and not every rank has made progress since."""
        return bool(self._standing)

    def set_pace(self, steps: TypicalSteps) -> None:
        """The job's recent steps took so long."""
        self.limits = limits(steps, self._fixed_s)

    def start_anew(self, now_s: float) -> None:
        """There was no look for a while, and perhaps no rank could run either: begin again."""
        self._stalls.clear()
        self._from_s = now_s

    def is_silent(self, rank: int, beat: Heartbeat) -> bool:
        """Whether a rank's page has not changed since the last look."""
        stall = self._stalls.get(rank)
        return stall is not None and stall.seen.beat == beat

    def look(
        self,
        seen: Sequence[Observation],
        now_s: float,
        others: OtherRanks = NO_OTHERS,
    ) -> list[StallKind]:
        """Take in observations of all ranks that train; suspects, if all are to be inspected."""
        self.note(seen, now_s, others)
        cases = self._cases()
        if len(self._stalls) == 1 and not others.run:
            return []  # nobody waits for it
        if any(map(self._is_suspected, cases.values())):
            return list(cases.values())
        return list(self._stalemate(cases).values())

    def note(
        self,
        seen: Sequence[Observation],
        now_s: float,
        others: OtherRanks = NO_OTHERS,
    ) -> None:
        """Only take in observations of the ranks that train.

        ``now_s``: monotonic. ``others``: the ranks that do not train any more.
        """
        self._have_left = others.are_there
        are_stopped = all(each.state == STOPPED for each in seen)
        self.is_paused = bool(seen) and are_stopped and not others.run
        if self.is_paused or any(each.state == TRACED for each in seen):
            before: dict[int, Stall] = {}  # a person debugs one, and its peers wait for that
            self._from_s = now_s
        else:
            before = self._stalls
        self._stalls = {
            each.rank: observe(before.get(each.rank), each, now_s, self._from_s) for each in seen
        }
        stood = self._standing.items()
        at = dict(self._places())
        self._standing = {rank: at_ns for rank, at_ns in stood if at.get(rank) == at_ns}
        if self._spared and self._has_moved(now_s):
            self._spared, self._spared_for_s = {}, 0.0
            # the time of an outage counts for nobody
            self._from_s = now_s
            self._stalls = {each.rank: observe(None, each, now_s, now_s) for each in seen}

    def _places(self) -> tuple[tuple[int, int], ...]:
        """Since when each rank is where it is."""
        return tuple((rank, stall.seen.beat.at_ns) for rank, stall in self._stalls.items())

    def _has_moved(self, now_s: float) -> bool:
        """Whether anybody made progress, or a spared rank was at work, since they were spared."""
        if self._places() != self._spared_at:
            return True
        return any(self._stalls[rank].idle_s == now_s for rank in self._spared)

    def judge(self, answers: Mapping[int, Inspection]) -> HangFinding:
        """Which ranks hang, as of the last look, by the answers of the ranks' listeners since."""
        cases = self._cases()
        victims = [rank for rank in self._stalls if self._is_victim(rank, cases, answers)]
        culprits = {rank: each for rank, each in cases.items() if rank not in victims}
        others = [rank for rank in self._stalls if rank not in victims and rank not in cases]
        self._remember(self._cleared, victims)
        if any(self._stalls[rank].seen.beat.phase not in ARMED for rank in others):
            excused = [rank for rank, each in culprits.items() if not self._is_overdue(each)]
            self._remember(self._excused, excused)  # they may wait for it outside of torch
            culprits = {rank: each for rank, each in culprits.items() if rank not in excused}
        held = {rank: answers[rank].held for rank in self._stalls if _held(answers.get(rank))}
        spared = set(culprits) if held else self._to_spare(culprits, victims)
        blamed = {
            rank: _accusation(each, answers.get(rank))
            for rank, each in culprits.items()
            if rank not in spared
        }
        is_mutual = False
        if not culprits and (waits := self._stalemate(cases)):
            if len(victims) == len(self._stalls):
                blamed, is_mutual = self._break(waits, answers), True
            self._new_asked_s = max(stall.looked_s for stall in self._stalls.values())
        self._remember(self._accused, blamed)
        victims = [rank for rank in victims if rank not in blamed]
        if blamed or not (spared or held):
            why = "" if blamed else _awaited(cases, others)
            return HangFinding(blamed, tuple(victims), why, is_mutual=is_mutual)
        return self._spare({rank: cases[rank] for rank in spared}, victims, held, answers)

    def _to_spare(self, culprits: Mapping[int, StallKind], victims: Sequence[int]) -> set[int]:
        """Those of them that hang only if nothing else explains it."""
        alike = {rank for rank in self._stalls if rank not in victims and self._stands(rank)}
        return {
            rank
            for rank, case in culprits.items()
            if not case.is_stopped
            and (not victims or case.is_in_kernel or (rank in alike and len(alike) > 1))
        }

    def _stands(self, rank: int) -> bool:
        return stands(self._stalls[rank], self.limits)

    def _spare(
        self,
        cases: Mapping[int, StallKind],
        victims: Sequence[int],
        held: Mapping[int, str],
        answers: Mapping[int, Inspection],
    ) -> HangFinding:
        """Blame nobody until somebody moves, or for a while, which is longer each time.

        An answer may have come too late, and who worked may have come to a collective.
        """
        now_s = max(stall.looked_s for stall in self._stalls.values())
        self._spared = dict.fromkeys(held, False)
        self._spared |= {rank: case.is_stopped for rank, case in cases.items()}
        self._spared_at = self._places()
        self._spared_for_s = max(2 * self._spared_for_s, self.limits.idle_s)
        self._spared_for_s = min(self._spared_for_s, self.limits.busy_s)
        self._spared_until_s = now_s + self._spared_for_s
        still = {rank for rank in self._stalls if rank not in victims and self._stands(rank)}
        at_work = self._stalls.keys() - {*victims, *still, *cases, *held}
        why = _why_held(held) if held else _why_spared(cases, still, victims)
        if at_work and not held:
            return HangFinding({}, tuple(victims), f"{why}; {ranged(at_work)} may be at work")
        self._standing = {rank: at_ns for rank, at_ns in self._places() if rank not in victims}
        places = [
            (rank, f"at {answers[rank].innermost}" if rank in answers else "without an answer")
            for rank in sorted({*still, *cases, *held})
        ]
        follows = "msrun ends no rank, and waits" if held else OUTAGE
        told = f"{why}: {follows}; {described(places)}"
        return HangFinding({}, tuple(victims), told, standstill=told)

    def _cases(self) -> dict[int, StallKind]:
        """Ranks over their limits, if all others are at least on their way there."""
        found = {rank: over_limit(stall, self.limits) for rank, stall in self._stalls.items()}
        cases = {rank: each for rank, each in found.items() if each is not None}
        least_s = min((each.limit_s for each in cases.values()), default=0.0) / 2
        if any(stall.looked_s - stall.since_s < least_s for stall in self._stalls.values()):
            return {}  # they do not wait for any rank
        return cases

    def _is_victim(
        self, rank: int, cases: Mapping[int, StallKind], answers: Mapping[int, Inspection]
    ) -> bool:
        answer = answers.get(rank)
        is_stopped = rank in cases and cases[rank].is_stopped
        is_waiting = answer is not None and answer.is_in_collective and not answer.held
        return is_waiting and not is_stopped

    def _is_suspected(self, case: StallKind) -> bool:
        """Whether this one is reason enough to ask all ranks where they are."""
        if self._is_known(case.rank, self._accused) or self._is_spared(case):
            return False
        if case.is_stopped:
            return True
        is_in_backward = self._stalls[case.rank].seen.beat.phase is Phase.BACKWARD
        if is_in_backward or self._is_known(case.rank, self._cleared):
            return False
        return self._is_overdue(case) or not self._is_known(case.rank, self._excused)

    def _is_spared(self, case: StallKind) -> bool:
        """Whether it was spared, or may be: nobody has moved since."""
        if not self._spared or self._stalls[case.rank].looked_s >= self._spared_until_s:
            return False
        return not case.is_stopped or self._spared.get(case.rank, False)

    def _is_overdue(self, case: StallKind) -> bool:
        """Whether the work of others is no excuse any more."""
        return case.is_stopped or case.silent_s >= self.limits.busy_s

    def _stalemate(self, cases: Mapping[int, StallKind]) -> dict[int, StallKind]:
        """All ranks, if all have waited far too long, and none was blamed for it yet; else none."""
        new = [stall for rank, stall in self._stalls.items() if rank not in cases]
        found = [idle_at_first(stall, self.limits) for stall in new]
        waits = {**cases, **{each.rank: each for each in found if each is not None}}
        if len(waits) < len(self._stalls) or self._have_left:
            return {}
        if any(stall.looked_s < self._new_asked_s + self.limits.busy_s for stall in new):
            return {}
        has_pace = any(stall.seen.has_pace for stall in self._stalls.values())
        if not has_pace and any(each.silent_s < self.limits.busy_s for each in waits.values()):
            return {}  # nobody knows yet how long a step takes
        is_vain = all(
            (rank not in cases or each.silent_s >= STALEMATE * each.limit_s)
            and not self._is_known(rank, self._accused)
            and not self._is_spared(each)
            for rank, each in waits.items()
        )
        return waits if is_vain else {}

    def _break(
        self, waits: Mapping[int, StallKind], answers: Mapping[int, Inspection]
    ) -> dict[int, str]:
        """All wait: one rank has to go."""
        seen = {rank: stall.seen for rank, stall in self._stalls.items()}
        last = min(seen, key=lambda rank: (seen[rank].has_pace, seen[rank].beat.step, rank))
        self._remember(self._accused, seen)
        where = "; ".join(f"rank {rank} at {answers[rank].innermost}" for rank in sorted(seen))
        return {last: f"{waits[last].words}; {EVERYBODY_WAITS}: {where}"}

    def _is_known(self, rank: int, known: Mapping[int, int]) -> bool:
        return known.get(rank) == self._stalls[rank].seen.beat.at_ns

    def _remember(self, known: dict[int, int], ranks: Iterable[int]) -> None:
        known.update({rank: self._stalls[rank].seen.beat.at_ns for rank in ranks})


def _accusation(case: StallKind, answer: Inspection | None) -> str:
    if answer is not None:
        return f"{case.words}; it stands at {answer.innermost}"
    return case.words if case.is_stopped else f"{case.words}; it gives no answer"


def _awaited(cases: Mapping[int, StallKind], others: Sequence[int]) -> str:
    if not cases:
        return "there is progress again"
    if not others:
        return "all wait for each other, which may take a while"
    return f"the others wait for rank {', '.join(map(str, sorted(others)))}, within its limit"


def _held(answer: Inspection | None) -> bool:
    return answer is not None and bool(answer.held)


def _why_held(held: Mapping[int, str]) -> str:
    return described((rank, held[rank]) for rank in sorted(held))


def _why_spared(
    cases: Mapping[int, StallKind], still: Collection[int], victims: Sequence[int]
) -> str:
    """What speaks against a hang, in words."""
    silent_s, stuck = max(case.silent_s for case in cases.values()), {*cases, *still}
    why = f"{ranged(stuck)} made no progress for {silent_s:.1f} s"
    if not victims:
        why += ", and no rank waits in a collective"
    elif len(stuck) > 1:
        why += " at the same time"
    in_kernel = [rank for rank, case in cases.items() if case.is_in_kernel]
    if in_kernel:
        why += f"; {ranged(in_kernel)} cannot be killed before the kernel has done (state D)"
    return why
