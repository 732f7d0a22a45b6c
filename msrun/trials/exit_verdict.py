"""Judges how a job exited on request: gracefully, or before a preemption kills it. Pure.

A graceful exit promises more than that nothing is lost: all ranks exit at one step, and msrun with
0. A preemption promises that the state is saved before everything is killed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agent.text.ranges import format_ranges
from msrun.trials.history import DrillExit, DrillHistory, Round, Strike, begun
from msrun.trials.node_fault import OF_JOB, AnyFault, NodeDeed
from worker_hooks.drill.plan import Deed

SIGNAL_EXIT_BASE = 128
REQUESTS = frozenset({Deed.REQUEST, Deed.PREEMPT}) | OF_JOB
_NOTICED = frozenset({"StopRequested", "SignalReceived"})


class ExitVerdict(NamedTuple):
    """How the first msrun that got a request to exit ended."""

    left_s: float  # after the request
    in_time: bool | None  # the newest step was saved before the kill; None: no kill follows
    words: str
    broken: tuple[str, ...] = ()  # promises, as text


def judge_exit(
    faults: Sequence[AnyFault], history: DrillHistory, departures: Sequence[DrillExit]
) -> ExitVerdict | None:
    """How it exited; ``None``: there was no request, or the trial was cancelled."""
    strike = next((one for one in history.strikes if faults[one.number].deed in REQUESTS), None)
    if strike is None:
        return None
    went = next((one for one in departures if one.at >= strike.at), None)
    if went is None:
        return None
    fault, left_s = faults[strike.number], went.at - strike.at
    how = f"exited after {left_s:.2f} s"
    if fault.deed in {Deed.REQUEST, NodeDeed.REQUEST}:
        broken = tuple(_ungraceful(fault, went, history, strike)) if len(faults) == 1 else ()
        return ExitVerdict(left_s, in_time=None, words=how, broken=broken)
    in_time = not _lost_at(history, strike)
    if went.is_killed:
        how = f"killed after {fault.grace_s:g} s"
    return ExitVerdict(
        left_s, in_time, f"{'saved in time' if in_time else 'not saved in time'}, {how}"
    )


def steps_lost(history: DrillHistory) -> int | None:
    """Steps that some rank committed and that had to be trained again, over all restarts.

    ``None``: no rank committed anything.
    """
    rounds = [lives for lives in history.rounds() if _newest(lives)]
    if not rounds:
        return None
    return sum(_lost(rounds[index], rounds[index + 1]) for index in range(len(rounds) - 1))


def _lost_at(history: DrillHistory, strike: Strike) -> int:
    """Steps lost by the restart that followed a strike; without a restart all steps."""
    rounds = [lives for lives in history.rounds() if _newest(lives)]
    before = [lives for lives in rounds if begun(lives) <= strike.at]
    after = rounds[len(before) :]
    if not before:
        return 0
    if not after:
        newest = _newest(before[-1])
        is_held = newest == history.last_step or any(dump.step == newest for dump in history.dumps)
        return 0 if is_held else newest
    return _lost(before[-1], after[0])


def _ungraceful(
    fault: AnyFault, went: DrillExit, history: DrillHistory, strike: Strike
) -> Iterator[str]:
    expected = SIGNAL_EXIT_BASE + fault.number if fault.number == signal.SIGINT else 0
    if not _could_exit_gracefully(history, strike):
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
        yield f"the ranks exited at different steps: {', '.join(who)}"


def noticed_at(history: DrillHistory, strike: Strike) -> float | None:
    """When msrun noticed the request to exit; wall clock."""
    return next(
        (
            float(event["time"])
            for event in history.events
            if event["event"] in _NOTICED and event["time"] >= strike.time
        ),
        None,
    )


def _could_exit_gracefully(history: DrillHistory, strike: Strike) -> bool:
    """Whether every rank had registered a state when the request came; else no rank waits.

    A rank that has committed a step has registered, and so have the ranks it trains with.
    """
    for lives in history.lives.values():
        then = [life for life in lives if life.begun_at <= strike.at]
        if then and any(at <= strike.at for at in then[-1].commits.values()):
            return True
    until = noticed_at(history, strike) or strike.time
    missing: set[int] = set()
    for event in history.events:
        if event["time"] > until:
            break
        if event["event"] == "StartAttempt":
            missing = set(history.lives)
        elif event["event"] == "Registered":
            missing.discard(event["rank"])
    return not missing


def _lost(before: Round, after: Round) -> int:
    if all(life.is_woken for life in after.values()):
        return 0
    first = min(min(life.commits) for life in after.values() if life.commits)
    return max(0, _newest(before) + 1 - first)


def _newest(lives: Round) -> int:
    return max((max(life.commits) for life in lives.values() if life.commits), default=0)
