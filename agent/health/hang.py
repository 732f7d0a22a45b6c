"""Which rank of a job hangs: alive, without progress, while its peers wait for it.

Pure: observations come in at each look, a finding comes out. A rank over its limit (see
:mod:`agent.health.stall`) is *suspected*, unless its peers make progress or it is in backward,
where ranks wait for each other; then all ranks are inspected. A *culprit* is over its limit and
gives no answer, or its main thread is in no collective; a rank in a collective is its victim.

If all ranks are in collectives for twice their limits, the collectives do not match. Then no rank
is to blame, and the rank that is furthest behind (the lowest of several) is named: its end ends the
waiting of all, and the reason says where each of them was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agent.health.stall import (
    ARMED,
    STOPPED,
    TRACED,
    Observation,
    Stall,
    StallKind,
    TypicalSteps,
    limits,
    observe,
    over_limit,
)
from worker_hooks.contract.status_page import Heartbeat, Phase

STALEMATE = 2  # times the limit, until ranks that all are in collectives wait in vain
EVERYBODY_WAITS = "all ranks wait in collectives that do not match"


class Inspection(NamedTuple):
    """Where a rank's main thread is, as its listener thread said."""

    is_in_collective: bool
    text: str

    @property
    def innermost(self) -> str:
        """The last line."""
        return self.text.rpartition("\n")[2]


class HangFinding(NamedTuple):
    """Which ranks hang, and why; or why none does."""

    culprits: Mapping[int, str]
    victims: tuple[int, ...]
    reason: str = ""


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
        self, seen: Sequence[Observation], now_s: float, *, have_left: bool = False
    ) -> list[StallKind]:
        """Take in observations of all ranks that train; suspects, if all are to be inspected."""
        self.note(seen, now_s, have_left=have_left)
        cases = self._cases()
        is_reason = any(map(self._is_suspected, cases.values())) or self._is_stalemate(cases)
        return list(cases.values()) if is_reason else []

    def note(self, seen: Sequence[Observation], now_s: float, *, have_left: bool = False) -> None:
        """Only take in observations. ``have_left``: some ranks do not train any more."""
        self._have_left = have_left
        self.is_paused = bool(seen) and all(each.state == STOPPED for each in seen)
        if self.is_paused or any(each.state == TRACED for each in seen):
            before: dict[int, Stall] = {}  # a person debugs one, and its peers wait for that
            self._from_s = now_s
        else:
            before = self._stalls
        self._stalls = {
            each.rank: observe(before.get(each.rank), each, now_s, self._from_s) for each in seen
        }

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
        blamed = {rank: _accusation(each, answers.get(rank)) for rank, each in culprits.items()}
        if not blamed and self._is_stalemate(cases):
            blamed = self._break(cases, answers)
        self._remember(self._accused, blamed)
        victims = [rank for rank in victims if rank not in blamed]
        return HangFinding(blamed, tuple(victims), "" if blamed else _awaited(cases, others))

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
        return answer is not None and answer.is_in_collective and not is_stopped

    def _is_suspected(self, case: StallKind) -> bool:
        """Whether this one is reason enough to ask all ranks where they are."""
        if self._is_known(case.rank, self._accused):
            return False
        if case.is_stopped:
            return True
        is_in_backward = self._stalls[case.rank].seen.beat.phase is Phase.BACKWARD
        if is_in_backward or self._is_known(case.rank, self._cleared):
            return False
        return self._is_overdue(case) or not self._is_known(case.rank, self._excused)

    def _is_overdue(self, case: StallKind) -> bool:
        """Whether the work of others is no excuse any more."""
        return case.is_stopped or case.silent_s >= self.limits.busy_s

    def _is_stalemate(self, cases: Mapping[int, StallKind]) -> bool:
        """Whether all ranks have waited far too long, and none was blamed for it yet."""
        if len(cases) < len(self._stalls) or self._have_left:
            return False
        return bool(cases) and all(
            each.silent_s >= STALEMATE * each.limit_s and not self._is_known(rank, self._accused)
            for rank, each in cases.items()
        )

    def _break(
        self, cases: Mapping[int, StallKind], answers: Mapping[int, Inspection]
    ) -> dict[int, str]:
        """All wait: one rank has to go."""
        last = min(cases, key=lambda rank: (self._stalls[rank].seen.beat.step, rank))
        if len(cases) == 1:
            return {last: _accusation(cases[last], answers.get(last))}
        self._remember(self._accused, cases)
        where = "; ".join(f"rank {rank} at {answers[rank].innermost}" for rank in sorted(cases))
        return {last: f"{cases[last].words}; {EVERYBODY_WAITS}: {where}"}

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
