"""How long a rank has been where it is, and whether that is longer than allowed.

Pure: the observations of a look come in with its time. Three tiers of evidence, by what the kernel
says of the rank's process; ``typical`` and ``slowest`` are the median and the slowest of the recent
steps, without work beside training (a checkpoint, a validation), each of the rank with the largest:

    stopped    it is in state T                      max(1.5 s, 5 x typical)
    idle       it uses no processor, nor do its      max(15 s, 30 x slowest)
               children
    busy       else, or it awaits a loop's first     max(300 s, 30 x slowest)
               batch

One that waits inside the kernel (state D) reads or writes a disk or a network file system. That is
work, and until it is done such a process cannot even be killed.

Between loops, and from an update to the next batch, a rank may do anything for any time: there only
a stopped one can be over its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from worker_hooks.contract.status_page import Heartbeat, Pace, Phase

STOPPED, TRACED, IN_KERNEL, DEAD = "T", "t", "D", "ZX"  # the kernel's letters
ARMED = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE})
AT_WORK = 0.05  # of one processor: a process that uses less is idle
FIRST = 4  # times the limit of an idle rank, of one that has made no step yet
TICK_S = 0.011  # the kernel counts processor time in steps of 10 ms
NS = 1e-9
BY_SIGNAL = "stopped by a signal"


class Observation(NamedTuple):
    """What a look finds of a rank that trains; the last two only if its page has not changed."""

    rank: int
    beat: Heartbeat
    has_pace: bool  # it made a complete step, from commit to commit
    state: str = ""  # of its process, the kernel's letter; empty: not looked at
    cpu_s: float = 0.0  # processor time used so far, by its children too


class Limits(NamedTuple):
    """Seconds without progress, by what is seen of the process."""

    stopped_s: float
    idle_s: float
    busy_s: float
    words: str  # where the numbers come from


class Stall(NamedTuple):
    """Where a rank is and since when; monotonic seconds."""

    seen: Observation
    looked_s: float
    since_s: float  # its last progress
    stopped_s: float  # it may have been stopped since
    idle_s: float  # it was seen at work last
    kernel_s: float = 0.0  # it was seen waiting inside the kernel last; 0: never


class StallKind(NamedTuple):
    """A rank without progress for longer than allowed."""

    rank: int
    silent_s: float
    limit_s: float
    is_stopped: bool
    is_in_kernel: bool  # it waits for a disk or a network file system, and cannot be killed
    words: str


class TypicalSteps(NamedTuple):
    """How long recent steps took, without work beside training, in seconds."""

    median_s: float = 0.0
    slowest_s: float = 0.0


def limits(steps: TypicalSteps, fixed_s: float | None) -> Limits:
    """The limits for such steps; ``fixed_s``: the one limit that was asked for."""
    if fixed_s is not None:
        return Limits(fixed_s, fixed_s, fixed_s, f"--hang-timeout={fixed_s:g}")
    return Limits(
        max(1.5, 5 * steps.median_s),
        max(15.0, 30 * steps.slowest_s),
        max(300.0, 30 * steps.slowest_s),
        f"as steps take {steps.median_s:.2g} s and the slowest recent one {steps.slowest_s:.2g} s",
    )


def typical_steps(paces: Iterable[Sequence[Pace]]) -> TypicalSteps:
    """The figures of several ranks' steps."""
    found = [sorted(pace.step_ns - pace.aside_ns for pace in each) for each in paces if each]
    medians = [each[len(each) // 2] for each in found]
    slowest = [each[-1] for each in found]
    return TypicalSteps(max(medians, default=0) * NS, max(slowest, default=0) * NS)


def observe(before: Stall | None, seen: Observation, now_s: float, from_s: float) -> Stall:
    """How long a rank has been where it is, as of this look.

    Args:
        before: as of the look before; ``None``: there was none.
        seen: the observation of this look.
        from_s: nothing before this time counts.
    """
    since_s = max(from_s, seen.beat.at_ns * NS)
    if before is None or before.seen.beat != seen.beat:
        return Stall(seen, now_s, since_s, since_s, now_s)
    is_first = not before.seen.state  # this look is the first at its process
    ran_s = 0.0 if is_first else before.looked_s
    used_s = seen.cpu_s - before.seen.cpu_s
    is_busy = is_first or used_s > TICK_S + AT_WORK * (now_s - before.looked_s)
    return Stall(
        seen,
        now_s,
        since_s,
        before.stopped_s if before.seen.state == STOPPED else max(since_s, ran_s),
        now_s if is_busy else before.idle_s,
        now_s if seen.state == IN_KERNEL else before.kernel_s,
    )


def stands(stall: Stall, limits: Limits) -> bool:
    """Whether a rank has done nothing for half of the time that an idle one may take."""
    is_asleep = bool(stall.seen.state) and stall.seen.state not in {STOPPED, TRACED, *DEAD}
    return is_asleep and _idle_s(stall) >= limits.idle_s / 2


def idle_at_first(stall: Stall, limits: Limits) -> StallKind | None:
    """Whether a rank that has made no step yet has been idle for far longer than allowed later.

    That alone tells nothing: it may wait for what compiles, or reads, elsewhere.
    """
    seen, idle_s, limit_s = stall.seen, _idle_s(stall), FIRST * limits.idle_s
    is_asleep = bool(seen.state) and seen.state not in {STOPPED, TRACED, *DEAD}
    if not is_asleep or seen.has_pace or seen.beat.phase not in ARMED or idle_s < limit_s:
        return None
    words = f"used no processor time for {idle_s:.1f} s {_where(seen.beat)}, its first one"
    return StallKind(seen.rank, idle_s, limit_s, is_stopped=False, is_in_kernel=False, words=words)


def _idle_s(stall: Stall) -> float:
    return stall.looked_s - max(stall.since_s, stall.idle_s)


def over_limit(stall: Stall, limits: Limits) -> StallKind | None:
    """Whether a rank is over its limit, as of the last look."""
    seen, now_s = stall.seen, stall.looked_s
    if not seen.state or seen.state in DEAD or seen.state == TRACED:
        return None
    is_stopped, is_in_kernel = seen.state == STOPPED, seen.state == IN_KERNEL
    if is_stopped:
        silent_s, limit_s = now_s - max(stall.since_s, stall.stopped_s), limits.stopped_s
        how = BY_SIGNAL
    elif seen.beat.phase not in ARMED or not seen.has_pace:
        return None
    else:
        silent_s, limit_s = now_s - stall.since_s, limits.busy_s
        idle_s = _idle_s(stall)
        how = "it is busy" if idle_s < silent_s / 2 else "it uses no processor time"
        is_first = seen.beat.phase is Phase.DATA and not seen.beat.batch
        if idle_s >= limits.idle_s and not is_first:
            silent_s, limit_s = idle_s, limits.idle_s
            # to read from a disk is work, also where a look falls between two reads
            is_in_kernel = now_s - stall.kernel_s <= limits.idle_s
        if is_in_kernel:
            how = "it waits inside the kernel, state D"
    if silent_s < limit_s:
        return None
    words = f"made no progress for {silent_s:.1f} s {_where(seen.beat)}"
    words += f" ({how}; the limit is {limit_s:.3g} s, {limits.words})"
    return StallKind(seen.rank, silent_s, limit_s, is_stopped, is_in_kernel, words)


def _where(beat: Heartbeat) -> str:
    if beat.phase in ARMED:
        return f"in {beat.phase.name.lower()} of step {beat.step + 1}"
    return f"after step {beat.step}"
