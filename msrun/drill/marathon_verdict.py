"""Judges a marathon: what msrun answered to each fault, what was lost, what has grown. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from msrun.drill.random_faults import MARATHON_KINDS, MarathonFault
from msrun.trials.history import DrillHistory, begun
from msrun.trials.verdict import curves, differing

MOST_FILES_MORE = 16  # descriptors that a process may have more than at its first look
MOST_THREADS_MORE = 8
MOST_MB_MORE = 64.0


class MarathonStrike(NamedTuple):
    """One or two faults that struck together, and until when every rank trained again."""

    faults: tuple[MarathonFault, ...]
    time: float  # wall clock
    at: float  # monotonic
    step: int  # the newest that some rank had committed
    took_s: float | None = None  # after the last fault; None: the job did not train again
    missed: tuple[int, ...] = ()  # indices of faults that found no process any more
    hangs: int = 0  # how often the job did not train again and had to be stopped

    @property
    def lost_ranks(self) -> frozenset[int]:
        """The ranks that had to be replaced."""
        lost = (fault.ranks for fault in self.faults if MARATHON_KINDS[fault.kind].loses_rank)
        return frozenset(chain.from_iterable(lost))

    @property
    def words(self) -> str:
        """As text."""
        told = [fault.words for fault in self.faults]
        if len(told) > 1:
            told[1] += f" {1e3 * self.faults[1].after_s:.0f} ms later"
        return ", ".join(told)


class MarathonExit(NamedTuple):
    """An msrun of the marathon that ended before the job did."""

    time: float  # wall clock
    exit_code: int  # negative: a signal
    reason: str = ""  # as msrun recorded it


class ProcessUse(NamedTuple):
    """What a process holds."""

    files: int
    threads: int
    mb: float

    @property
    def words(self) -> str:
        """As text."""
        return f"{self.files} descriptors, {self.threads} threads, {self.mb:.0f} MB"


class ProcessGrowth(NamedTuple):
    """What a process held at its first look and at its last one."""

    name: str  # msrun, forkserver or rank
    looks: int  # one after each fault that it outlived
    first: ProcessUse
    last: ProcessUse

    @property
    def leaks(self) -> str:
        """What has grown by more than use explains, as text; empty: nothing."""
        grown = (
            (self.last.files - self.first.files, MOST_FILES_MORE, "descriptors"),
            (self.last.threads - self.first.threads, MOST_THREADS_MORE, "threads"),
            (self.last.mb - self.first.mb, MOST_MB_MORE, "MB"),
        )
        return ", ".join(f"{more:.0f} more {what}" for more, most, what in grown if more > most)


class MarathonAnswer(NamedTuple):
    """What msrun did about a strike."""

    replaced: tuple[int, ...] = ()  # ranks, in their order of time
    restarts: tuple[str, ...] = ()  # the reason of each restart of all ranks
    exits: tuple[MarathonExit, ...] = ()  # after each of them the job was resumed
    lost: int = 0  # steps


@dataclass(frozen=True, slots=True)
class MarathonEnd:
    """What the marathon has seen of a job's end."""

    exit_code: int | None  # of the last msrun; None: it was cancelled
    trouble: str = ""  # why the marathon ended before its faults were all injected
    left: int = 0  # processes that outlived the job
    zombies: int = 0  # children of msrun that nobody reaped, at two looks in a row
    left_files: tuple[str, ...] = ()  # unfinished ones that nobody removed
    log_files: int = 0
    log_mb: float = 0.0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MarathonOutcome:
    """The result of a marathon."""

    seed: int
    wanted: int
    strikes: tuple[MarathonStrike, ...]
    answers: tuple[MarathonAnswer, ...]  # to each strike
    growths: tuple[ProcessGrowth, ...]
    end: MarathonEnd
    steps: int
    is_equal: bool
    broken: tuple[str, ...]

    @property
    def struck(self) -> int:
        """How many faults struck."""
        return sum(len(strike.faults) - len(strike.missed) for strike in self.strikes)


def read_answers(
    strikes: Sequence[MarathonStrike],
    events: Sequence[Mapping[str, Any]],
    exits: Sequence[MarathonExit] = (),
    losses: Sequence[tuple[float, int]] = (),
) -> tuple[MarathonAnswer, ...]:
    """What msrun did after each strike and before the next one.

    Args:
        events: of all runs, with wall-clock times.
        exits: of msruns before the last.
        losses: steps, each with the moment that they were begun again (monotonic).
    """
    if not strikes:
        return ()
    times, moments = [strike.time for strike in strikes], [strike.at for strike in strikes]
    found = [MarathonAnswer() for _ in strikes]

    def add(index: int, **more: Any) -> None:
        index = max(0, index)
        found[index] = found[index]._replace(
            **{name: getattr(found[index], name) + value for name, value in more.items()}
        )

    for event in events:
        index = bisect_right(times, event["time"]) - 1
        match event:
            case {"event": "ReplaceRanks", "newcomers": newcomers}:
                add(index, replaced=tuple(newcomers))
            case {"event": "StartAttempt", "attempt": attempt} if attempt > 0:
                add(index, restarts=(str(event.get("reason") or ""),))
    for went in exits:
        add(bisect_right(times, went.time) - 1, exits=(went,))
    for at, lost in losses:
        add(bisect_right(moments, at) - 1, lost=lost)
    return tuple(found)


def read_losses(
    strikes: Sequence[MarathonStrike], history: DrillHistory
) -> Iterator[tuple[float, int]]:
    """Each time that steps were lost: when they were begun again (monotonic), and how many.

    What only ranks had committed that were struck themselves is the interrupted step: nobody who
    lives on has it.
    """
    moments = [strike.at for strike in strikes]
    trained = (
        {rank: life for rank, life in lives.items() if life.commits} for lives in history.rounds()
    )
    for before, after in pairwise(sorted(filter(None, trained), key=begun)):
        index = bisect_right(moments, begun(after)) - 1
        struck = strikes[index].lost_ranks if index >= 0 else frozenset()
        held = max((max(before[rank].commits) for rank in before.keys() - struck), default=0)
        lost = held + 1 - min(min(life.commits) for life in after.values())
        if lost > 0:
            yield begun(after), lost


def judge_marathon(
    seed: int,
    wanted: int,
    strikes: Sequence[MarathonStrike],
    exits: Sequence[MarathonExit],
    growths: Sequence[ProcessGrowth],
    end: MarathonEnd,
    reference: DrillHistory,
    history: DrillHistory,
) -> MarathonOutcome:
    """The outcome; ``reference``: the undisturbed run to the same step."""
    losses = tuple(read_losses(strikes, history))
    lost = sum(steps for _, steps in losses)
    answers = read_answers(strikes, history.events, exits, losses)
    is_over = end.exit_code == 0 and not end.trouble
    others = [*(differing(reference, history) if is_over else ()), *curves(reference, history)]
    broken = [
        *([end.trouble] if end.trouble else []),
        *([f"the job ended with exit code {end.exit_code}"] if end.exit_code else []),
        *others,
        *_unexplained(strikes, answers),
        *([f"{lost} step{'s' if lost > 1 else ''} lost"] if lost else []),
        *(
            f"{each.name} has {each.leaks} after {each.looks} faults"
            for each in growths
            if each.leaks
        ),
        *_left(end),
    ]
    return MarathonOutcome(
        seed=seed,
        wanted=wanted,
        strikes=tuple(strikes),
        answers=answers,
        growths=tuple(growths),
        end=end,
        steps=max([history.last_step, *(strike.step for strike in strikes)]),
        is_equal=is_over and bool(reference.finals) and not others,
        broken=tuple(broken),
    )


def largest_growths(growths: Sequence[ProcessGrowth]) -> tuple[ProcessGrowth, ...]:
    """Of each kind of process the one that was seen most often, and all that leak."""
    oldest: dict[str, ProcessGrowth] = {}
    for each in growths:
        if each.name not in oldest or oldest[each.name].looks < each.looks:
            oldest[each.name] = each
    leaking = [each for each in growths if each.leaks and each is not oldest[each.name]]
    return (*oldest.values(), *leaking)


def _unexplained(
    strikes: Sequence[MarathonStrike], answers: Sequence[MarathonAnswer]
) -> Iterator[str]:
    """Restarts without a reason, and ends of the job that no fault asked for."""
    for strike, answer in zip(strikes, answers, strict=True):
        for reason in answer.restarts:
            if not reason:
                yield f"a restart without a reason at step {strike.step} ({strike.words})"
        if strike.hangs:
            yield f"the job hung at step {strike.step} ({strike.words}), was stopped, and resumed"
        asked = sum(MARATHON_KINDS[fault.kind].ends_msrun for fault in strike.faults)
        asked += strike.hangs
        for went in answer.exits[asked:]:
            why = went.reason or "no reason is recorded"
            yield (
                f"msrun ended with exit code {went.exit_code} at step {strike.step} "
                f"({strike.words}): {why}"
            )


def _left(end: MarathonEnd) -> Iterator[str]:
    if end.left:
        yield f"{end.left} process{'es' if end.left > 1 else ''} outlived the job"
    if end.zombies:
        yield f"{end.zombies} zombie{'s' if end.zombies > 1 else ''} of msrun"
    if end.left_files:
        yield f"files are left: {', '.join(end.left_files[:5])}"
