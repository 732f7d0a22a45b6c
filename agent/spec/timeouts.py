"""The ladder of waiting times: each must leave room for the one below it. Pure.

    freeze < update grace < dump without progress < stop grace < the scheduler's grace

A graceful exit has a ladder of its own, from the request on:

    all ranks come to one step < it is saved < the scheduler's grace

What the user gave stands. The rest follows from it: halfway down from what is above, never below
what a disk may need (a dump is worth more than punctuality), and above what is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from agent.spec.exit_budget import hold_s
from agent.spec.job_spec import JobSpec, UsageError


class TimeoutRung(NamedTuple):
    """A time that was given, in seconds, and how an error names it (``--dump_timeout=9``)."""

    seconds: float
    shown: str


class TimeoutLadder(NamedTuple):
    """All times, in seconds."""

    freeze_s: float
    update_grace_s: float
    stall_s: float
    grace_s: float
    scheduler_s: float | None = None


class _Step(NamedTuple):
    default_s: float
    floor_s: float
    room: float  # how many times the rung below it is, where nothing was given


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
    """The whole ladder from what was given; ``None``: nothing was.

    Raises:
        UsageError: two times that were given are not in order.
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
    """Each time leaves room for those below it; floors yield only to times of the dump itself."""
    times = [step.default_s for step in _STEPS]
    above = None if scheduler is None else scheduler.seconds / _SCHEDULER_ROOM
    is_asked = False  # whether a time of the dump itself was given above
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
    """Above ``below_s``, and below the next time that was given where that leaves room."""
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
    """What a graceful exit may take until the step is saved, in seconds.

    Args:
        ladder: the other times.
        grace: what was given for all requests; ``None``: nothing was.
        freeze: what was given for ranks to stand still.
        scheduler: what the cluster is said to give msrun after its signal.

    Returns:
        After a signal, behind which somebody may be about to kill msrun; after other requests.

    Raises:
        UsageError: two times that were given are not in order.
    """
    _check_order([rung for rung in (freeze, grace, scheduler) if rung is not None])
    if grace is not None:
        return grace.seconds, grace.seconds
    short_s = max(EXIT_S, 2 * ladder.freeze_s)
    if scheduler is not None:
        short_s = scheduler.seconds / _SCHEDULER_ROOM
    return short_s, max(ASKED_EXIT_S, short_s)


def describe(spec: JobSpec) -> str:
    """The ladder in a line; ``>=`` where a short grace was given: a dump is not cut short by it."""
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
    """``step 20 s < saved 30 s``, and the same for requests without a signal where that differs."""
    freeze_s = spec.dump.freeze_s + spec.dump.update_grace_s
    pairs = [
        f"step {hold_s(grace_s, freeze_s):.3g} s < saved {grace_s:.3g} s"
        for grace_s in dict.fromkeys((spec.timeouts.exit_s, spec.timeouts.asked_exit_s))
    ]
    return f"{pairs[0]} after a signal, else {pairs[1]}" if len(pairs) > 1 else pairs[0]
