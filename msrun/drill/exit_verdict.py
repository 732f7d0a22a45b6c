"""Judges how a job left when it was asked to: gracefully, or before a preemption's end. Pure.

A graceful exit promises more than that nothing is lost: all ranks leave at one step, and msrun with
0. A preemption promises that this is over before everything is killed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agent.text.ranges import format_ranges
from msrun.drill.history import DrillExit, DrillHistory, RankLife, Strike
from worker_hooks.drill.plan import Deed, Fault

SIGNAL_EXIT_BASE = 128
ASKING = frozenset({Deed.REQUEST, Deed.PREEMPT})
_HEARD = frozenset({"StopRequested", "SignalReceived"})


class ExitVerdict(NamedTuple):
    """How the msrun went that was asked to leave first."""

    left_s: float  # after the request
    in_time: bool | None  # the newest step was saved before the kill; None: nobody would kill
    words: str
    broken: tuple[str, ...] = ()


def judge_exit(
    faults: Sequence[Fault], history: DrillHistory, departures: Sequence[DrillExit]
) -> ExitVerdict | None:
    """How it left; ``None``: nobody was asked to, or it was called off."""
    strike = next((one for one in history.strikes if faults[one.number].deed in ASKING), None)
    if strike is None:
        return None
    went = next((one for one in departures if one.at >= strike.at), None)
    if went is None:
        return None
    fault, left_s = faults[strike.number], went.at - strike.at
    how = f"left after {left_s:.2f} s"
    if fault.deed is Deed.REQUEST:
        broken = tuple(_ungraceful(fault, went, history, strike)) if len(faults) == 1 else ()
        return ExitVerdict(left_s, None, how, broken)
    in_time = not _lost_at(history, strike)
    if went.is_killed:
        how = f"killed after {fault.grace_s:g} s"
    return ExitVerdict(
        left_s, in_time, f"{'saved in time' if in_time else 'not saved in time'}, {how}"
    )


def steps_lost(history: DrillHistory) -> int | None:
    """Steps that were committed by any rank and had to be trained again, over all restarts.

    ``None`` when nobody committed anything.
    """
    rounds = [lives for lives in history.rounds() if _newest(lives)]
    if not rounds:
        return None
    return sum(_lost(rounds[index], rounds[index + 1]) for index in range(len(rounds) - 1))


def _lost_at(history: DrillHistory, strike: Strike) -> int:
    """Steps lost by the restart that followed a strike; all of them if none did."""
    rounds = [lives for lives in history.rounds() if _newest(lives)]
    before = [lives for lives in rounds if _begun(lives) <= strike.at]
    after = rounds[len(before) :]
    if not before:
        return 0
    if not after:
        newest = _newest(before[-1])
        is_held = newest == history.last_step or any(dump.step == newest for dump in history.dumps)
        return 0 if is_held else newest
    return _lost(before[-1], after[0])


def _ungraceful(
    fault: Fault, went: DrillExit, history: DrillHistory, strike: Strike
) -> Iterator[str]:
    expected = SIGNAL_EXIT_BASE + fault.number if fault.number == signal.SIGINT else 0
    if not _could_stay(history, strike):
        return
    if went.exit_code != expected:
        yield f"the graceful exit ended with exit code {went.exit_code} instead of {expected}"
    last: dict[int, list[int]] = {}
    for rank, lives in history.lives.items():
        then = [life for life in lives if life.begun_at <= strike.at]
        if then:
            last.setdefault(max(then[-1].commits, default=0), []).append(rank)
    if len(last) > 1:
        who = (f"{format_ranges(ranks)} at {step}" for step, ranks in sorted(last.items()))
        yield f"the ranks left at different steps: {', '.join(who)}"


def heard_at(history: DrillHistory, strike: Strike) -> float | None:
    """When msrun noticed that it was asked to leave; wall clock."""
    return next(
        (
            float(event["time"])
            for event in history.events
            if event["event"] in _HEARD and event["time"] >= strike.time
        ),
        None,
    )


def _could_stay(history: DrillHistory, strike: Strike) -> bool:
    """Whether every rank had registered a state when the request came; else nobody waits.

    Who has committed a step has registered, and so have those it trains with.
    """
    for lives in history.lives.values():
        then = [life for life in lives if life.begun_at <= strike.at]
        if then and any(at <= strike.at for at in then[-1].commits.values()):
            return True
    until = heard_at(history, strike) or strike.time
    missing: set[int] = set()
    for event in history.events:
        if event["time"] > until:
            break
        if event["event"] == "StartAttempt":
            missing = set(history.lives)
        elif event["event"] == "Registered":
            missing.discard(event["rank"])
    return not missing


def _lost(before: Sequence[RankLife], after: Sequence[RankLife]) -> int:
    first = min(min(life.commits) for life in after if life.commits)
    return max(0, _newest(before) + 1 - first)


def _newest(lives: Sequence[RankLife]) -> int:
    return max((max(life.commits) for life in lives if life.commits), default=0)


def _begun(lives: Sequence[RankLife]) -> float:
    return min(life.begun_at for life in lives)
