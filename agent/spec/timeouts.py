"""The ladder of timeouts: each must leave room for the one below it. Pure.

    freeze < update grace < dump without progress < stop grace < the scheduler's grace

A graceful exit has its own ladder, from the request on:

    all ranks reach one step < it is saved < the scheduler's grace

A value that the user gave is kept. The others are derived: half of the rung above, never less than
a disk may need (a dump is worth more than punctuality), and more than the rung below.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from agent.spec.exit_budget import hold_s
from agent.spec.job_spec import JobSpec, UsageError


class TimeoutRung(NamedTuple):
    """A time that the user gave, in seconds, and its name in an error (``--dump-timeout=9``)."""

    seconds: float
    shown: str


class TimeoutLadder(NamedTuple):
    """All timeouts of a job, in seconds."""

    freeze_s: float
    update_grace_s: float
    stall_s: float
    grace_s: float
    scheduler_s: float | None = None


class _Step(NamedTuple):
    default_s: float
    floor_s: float
    room: float  # by which factor it exceeds the rung below, where nothing was given


_STEPS = (_Step(5, 2, 1), _Step(10, 5, 2), _Step(20, 10, 2), _Step(30, 0, 1.5))
_SCHEDULER_ROOM = 1.2
EXIT_S, ASKED_EXIT_S = 30.0, 600.0


def derive(
    freeze: TimeoutRung | None = None,
    update_grace: TimeoutRung | None = None,
    stall: TimeoutRung | None = None,
    grace: TimeoutRung | None = None,
    scheduler: TimeoutRung | None = None,
) -> TimeoutLadder:
    """The whole ladder from the values that were given; ``None``: not given.

    Raises:
        UsageError: two of the given times are not in order.
    """
    given = (freeze, update_grace, stall, grace)
    _check_order([rung for rung in (*given, scheduler) if rung is not None])
    times = _down(given, scheduler)
    for at in range(1, len(_STEPS)):
        if given[at] is None and times[at] <= times[at - 1]:
            above = next((rung for rung in (*given[at + 1 :], scheduler) if rung is not None), None)
            times[at] = _over(times[at - 1], times[at], at, above)
    freeze_s, update_grace_s, stall_s, grace_s = times
    return TimeoutLadder(
        freeze_s=freeze_s,
        update_grace_s=update_grace_s,
        stall_s=stall_s,
        grace_s=grace_s,
        scheduler_s=None if scheduler is None else scheduler.seconds,
    )


def _down(given: Sequence[TimeoutRung | None], scheduler: TimeoutRung | None) -> list[float]:
    """Each time leaves room for those below it; only a given time of the dump undercuts a floor."""
    times = [step.default_s for step in _STEPS]
    above = None if scheduler is None else scheduler.seconds / _SCHEDULER_ROOM
    is_asked = False  # whether a time of the dump was given above
    for at in reversed(range(len(_STEPS))):
        rung, step = given[at], _STEPS[at]
        if rung is not None:
            times[at] = above = rung.seconds
            is_asked = at < len(_STEPS) - 1
        elif above is not None:
            times[at] = min(step.default_s, above)
            if not is_asked:
                times[at] = max(times[at], step.floor_s)
        above = None if above is None else above / step.room
    return times


def _over(below_s: float, now_s: float, at: int, above: TimeoutRung | None) -> float:
    """A time above ``below_s``, and below the next given time where that leaves room."""
    wanted = below_s * _STEPS[at].room
    if above is None or wanted < above.seconds:
        return wanted
    return now_s if above.seconds <= below_s else (below_s + above.seconds) / 2


def _check_order(rungs: Sequence[TimeoutRung]) -> None:
    for lower, upper in pairwise(rungs):
        if lower.seconds >= upper.seconds:
            raise UsageError(
                f"{lower.shown} leaves no room within {upper.shown}: make the first one shorter or "
                "the second one longer"
            )


def exit_times(
    ladder: TimeoutLadder,
    grace: TimeoutRung | None,
    freeze: TimeoutRung | None,
    scheduler: TimeoutRung | None,
) -> tuple[float, float]:
    """How long a graceful exit may take until the step is saved, in seconds.

    Args:
        grace: the time given for all requests; ``None``: none was.
        freeze: the time given for ranks to freeze.
        scheduler: the time that the cluster is said to give msrun after its signal.

    Returns:
        The time after a signal, whose sender may be about to kill msrun; the time after others.

    Raises:
        UsageError: two of the given times are not in order.
    """
    _check_order([rung for rung in (freeze, grace, scheduler) if rung is not None])
    if grace is not None:
        return grace.seconds, grace.seconds
    short_s = max(EXIT_S, 2 * ladder.freeze_s)
    if scheduler is not None:
        short_s = scheduler.seconds / _SCHEDULER_ROOM
    return short_s, max(ASKED_EXIT_S, short_s)


def describe(spec: JobSpec) -> str:
    """The ladder in a line; ``>=`` where a short grace was given: it does not cut a dump short."""
    rungs = [
        ("freeze", spec.dump.freeze_s),
        ("update grace", spec.dump.update_grace_s),
        ("dump without progress", spec.dump.stall_s),
        ("stop grace", spec.timeouts.grace_s),
        ("scheduler's grace", spec.timeouts.scheduler_s),
    ]
    line, below_s = "timeouts:", None
    for name, seconds in rungs:
        if seconds is not None:
            sign = "" if below_s is None else " <" if below_s < seconds else " >="
            line += f"{sign} {name} {round(seconds, 1):g} s"
            below_s = seconds
    return f"{line}; graceful exit: {_exit_words(spec)}"


def _exit_words(spec: JobSpec) -> str:
    """``step 20 s < saved 30 s``, also for requests without a signal if that differs."""
    freeze_s = spec.dump.answer_s
    pairs = [
        f"step {hold_s(grace_s, freeze_s):.3g} s < saved {grace_s:.3g} s"
        for grace_s in dict.fromkeys((spec.timeouts.exit_s, spec.timeouts.asked_exit_s))
    ]
    return f"{pairs[0]} after a signal, else {pairs[1]}" if len(pairs) > 1 else pairs[0]
