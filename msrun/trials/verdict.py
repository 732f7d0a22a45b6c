"""Judges a drill by comparing its history with the undisturbed run's. Pure.

The promises: the faults strike, the job succeeds by itself or after a resume, no step is lost, and
every rank's results are the same to the last bit. A stop, moreover, must cause no restart; requests
to exit are judged in :mod:`msrun.trials.exit_verdict`.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.text.ranges import format_ranges
from msrun.trials.exit_verdict import REQUESTS, judge_exit, noticed_at, steps_lost
from msrun.trials.history import DrillExit, DrillHistory, RankLife, Strike
from msrun.trials.node_fault import AnyFault, NodeFault
from worker_hooks.drill.plan import LAUNCHER, Deed, Fault, Moment

TOO_LATE = " (msrun had killed it before)"
_NOTICED = frozenset({"WorkerExited", "Raised", "RankUnreachable"})


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The result of a drill. Seconds after the first strike; ``None``: it did not happen."""

    fault: str
    noticed_s: float | None = None
    frozen_s: float | None = None
    dump_s: float | None = None  # from the order to save to the rename
    dump_bytes: int | None = None
    step_saved: int | None = None
    steps_lost: int | None = None
    training_s: float | None = None  # until every rank has committed its next step
    weights_equal: bool = False
    differs: bool = False  # it ended well, with other results than the undisturbed run
    replaced: int = 0  # ranks
    restarted: int = 0  # how often all ranks were
    woken: int = 0  # how often all went on from their shadows
    runs: int = 1  # of msrun: more than one if the job had to be resumed
    taken_over: int = 0  # how often the other nodes went on without node 0, as another run
    left_s: float | None = None  # until the msrun that got a request to exit was gone
    in_time: bool | None = None  # of a preemption: the newest step was saved before the kill
    leave: str = ""  # how msrun exited on request, as text
    took_s: float = 0.0
    broken: tuple[str, ...] = ()  # promises, as text

    @property
    def answer(self) -> str:
        """What msrun did about the faults, as text; empty: nothing was needed."""
        done = [f"{self.replaced} replaced"] if self.replaced else []
        done += [f"{self.restarted}x restarted"] if self.restarted else []
        done += [f"{self.woken}x from shadows"] if self.woken else []
        done += [f"node 0 replaced {self.taken_over}x"] if self.taken_over else []
        done += [f"{self.runs - 1}x resumed"] if self.runs > 1 else []
        return ", ".join(done)

    @property
    def verdict(self) -> str:
        """One sentence."""
        return "; ".join(filter(None, ("; ".join(self.broken) or "nothing lost", self.leave)))


def judge(
    faults: Sequence[AnyFault],
    reference: DrillHistory,
    history: DrillHistory,
    *,
    exit_code: int | None,
    departures: Sequence[DrillExit] = (),
    left: int = 0,
    took_s: float = 0.0,
) -> TrialOutcome:
    """The outcome of a drill.

    Args:
        faults: those of the drill, those of ranks first.
        exit_code: of its last msrun; ``None``: it was cancelled.
        departures: how each msrun ended, in order.
        left: processes that outlived the job.
        took_s: how long it took in all.
    """
    late = _late(faults, history)
    real = tuple(strike for strike in history.strikes if strike.number not in late)
    history = replace(history, strikes=real)
    lost, asked = steps_lost(history), judge_exit(faults, history, departures)
    others = tuple(differing(reference, history))
    curved = tuple(curves(reference, history))
    broken = [
        *_unstruck(faults, history, late if real else frozenset()),
        *_ending(history, exit_code, left, took_s),
        *_disturbed(faults, history),
        *(asked.broken if asked is not None else ()),
        *([f"{lost} step{'s' if lost > 1 else ''} lost"] if lost else []),
    ]
    if exit_code == 0:  # else it did not reach an end that could be compared
        broken += [*others, *curved]
    starts = _of(history, "StartAttempt")
    runs, ends = {run for run, _ in history.starts()}, max(1, len(departures))
    return TrialOutcome(
        fault=" + ".join(_words(faults, late)),
        **_timings(faults, history),
        steps_lost=lost,
        replaced=sum(len(each["newcomers"]) for each in _of(history, "ReplaceRanks")),
        restarted=sum(each["attempt"] > 0 and each.get("shadow", -1) < 0 for each in starts),
        woken=sum(each.get("shadow", -1) >= 0 for each in starts),
        weights_equal=exit_code == 0 and not others,
        differs=exit_code == 0 and bool(others or curved),
        runs=ends,
        taken_over=max(0, len(runs) - ends),
        left_s=None if asked is None else asked.left_s,
        in_time=None if asked is None else asked.in_time,
        leave="" if asked is None else asked.words,
        took_s=took_s,
        broken=tuple(broken),
    )


def _words(faults: Sequence[AnyFault], late: Container[int]) -> Iterator[str]:
    """The faults as text; ranks that are struck alike are named together."""
    alike: dict[tuple[AnyFault, bool], list[AnyFault]] = {}
    for index, fault in enumerate(faults):
        kind = fault
        if isinstance(fault, Fault) and fault.rank != LAUNCHER:
            kind = fault._replace(rank=0)
        alike.setdefault((kind, index in late), []).append(fault)
    for (kind, is_late), found in alike.items():
        words = found[0].words
        if isinstance(kind, Fault) and len(found) > 1:
            ranks = format_ranges(fault.rank for fault in found if isinstance(fault, Fault))
            words = kind.words_of(f"ranks {ranks}")
        yield f"{words}{TOO_LATE * is_late}"


def check_reference(history: DrillHistory, exit_code: int | None, world_size: int) -> str:
    """Why the undisturbed run cannot be compared with; empty: it can."""
    if exit_code is None:
        return "the undisturbed run did not end in time"
    if exit_code != 0:
        return f"the undisturbed run failed with exit code {exit_code}{_why(history)}"
    silent = [rank for rank in range(world_size) if rank not in history.finals]
    if silent:
        who = f"rank{'s' if len(silent) > 1 else ''} {format_ranges(tuple(silent))}"
        return (
            f"{who} of the undisturbed run did not train to an end with worker_hooks.TrainState, "
            "nor with an optimizer of torch under --protect=shadow"
        )
    return ""


def why_not_deterministic(reference: DrillHistory, again: DrillHistory) -> str:
    """What differs between two undisturbed runs, so that nothing follows from other differences."""
    found = [*differing(reference, again), *curves(reference, again)]
    if not found:
        return ""
    return (
        f"the script is not deterministic, so nothing is known about what differs above: of two "
        f"undisturbed runs {found[0]}. Seed its random numbers (torch.manual_seed, random.seed, "
        "numpy.random.seed), and have it read no files that an earlier run has written"
    )


def _late(faults: Sequence[AnyFault], history: DrillHistory) -> frozenset[int]:
    """Faults whose moment came when msrun had killed the rank, since another one had failed.

    A timer of the kernel kills without a word, so its fault is marked when the timer starts.
    """
    found: set[int] = set()
    attempt = 0
    for event in history.events:
        if event["event"] == "StartAttempt":
            attempt = event["attempt"]
        elif event["event"] == "SignalRanks" and event["signum"] == signals.SIGKILL:
            for strike in history.strikes:
                fault = faults[strike.number]
                if not isinstance(fault, Fault) or fault.moment is not Moment.ANY:
                    continue
                is_of_it = strike.attempt == attempt and fault.rank in event["ranks"]
                if is_of_it and event["time"] < strike.time:
                    found.add(strike.number)
    return frozenset(found)


def _unstruck(
    faults: Sequence[AnyFault], history: DrillHistory, excused: frozenset[int]
) -> Iterator[str]:
    struck = {strike.number for strike in history.strikes} | excused
    for index, fault in enumerate(faults):
        if index not in struck:
            which = "the fault" if len(faults) == 1 else f"fault {index + 1} of {len(faults)}"
            beyond = f": training ended with step {history.last_step}" if history.finals else ""
            yield f"broken drill, {which} never struck ({fault.words}{beyond})"
    for strike in history.strikes:
        fault = faults[strike.number]
        if fault.deed is Deed.RAISE and _first(_bad_after(strike, history), _NOTICED) is None:
            yield (
                f"broken drill, nothing was injected: the {fault.words} had no effect, as whatever "
                "it interrupted caught or ignored it"
            )


def _bad_after(strike: Strike, history: DrillHistory) -> list[Mapping[str, Any]]:
    """The events from a strike on, but for ranks that succeeded."""
    return [
        event
        for event in history.events
        if event["time"] >= strike.time and event.get("exit_code") != 0
    ]


def _ending(
    history: DrillHistory, exit_code: int | None, left: int, took_s: float
) -> Iterator[str]:
    if exit_code is None:
        yield f"cancelled after {took_s:.0f} s without an end"
    elif exit_code != 0:
        yield f"the job failed with exit code {exit_code}{_why(history)}"
    elif left:
        yield f"{left} process{'es' if left > 1 else ''} outlived the job"


def _why(history: DrillHistory) -> str:
    """The reason of the last end, as msrun recorded it."""
    ends = [event["reason"] for event in history.events if event["event"] == "Finish"]
    return f": {ends[-1]}" if ends else ""


def _disturbed(faults: Sequence[AnyFault], history: DrillHistory) -> Iterator[str]:
    """A stopped rank is alive, and a short silence is none: neither may cause a restart."""
    if all(fault.deed is Deed.STOP for fault in faults) and len(history.rounds()) > 1:
        yield "a stopped rank caused a restart"
    is_short = all(isinstance(fault, NodeFault) and fault.disturbs_nobody for fault in faults)
    if is_short and (len(history.rounds()) > 1 or _of(history, "ReplaceRanks")):
        yield "a cable that was back in time caused a recovery"


def differing(reference: DrillHistory, history: DrillHistory) -> Iterator[str]:
    """The ranks whose end is not the undisturbed run's, each with what differs."""
    for rank, expected in reference.finals.items():
        found = history.finals.get(rank)
        if found is None:
            yield f"rank {rank} did not train to its end"
        elif found.step != expected.step:
            yield f"rank {rank} ended with step {found.step} instead of {expected.step}"
        elif found.digest != expected.digest:
            yield f"weights differ on rank {rank}"
        elif found.private_digest != expected.private_digest:
            yield f"random state or buffers differ on rank {rank}"


def curves(reference: DrillHistory, history: DrillHistory) -> Iterator[str]:
    """The first step at which a rank's loss differs.

    A rank that dies before its own commit of a step, which its peers can save, has no loss for it.
    """
    for rank in reference.lives:
        expected, found = reference.curve(rank), history.curve(rank)
        committed = {step for life in history.lives.get(rank, ()) for step in life.commits}
        for step, losses in sorted(expected.items()):
            if found.get(step) != losses and (step in found or step in committed):
                yield f"the loss of rank {rank} differs at step {step}"
                break


def _timings(faults: Sequence[AnyFault], history: DrillHistory) -> dict[str, Any]:
    """What happened when, counted from the first strike."""
    if not history.strikes:
        return {}
    strike = history.strikes[0]
    fault = faults[strike.number]
    after = [event for event in history.events if event["time"] >= strike.time]
    if fault.deed in REQUESTS:
        noticed = noticed_at(history, strike)
    else:  # a death is often noticed by a peer's error, a stop by nobody
        noticed = (
            _first(_bad_after(strike, history), _NOTICED) if fault.deed is not Deed.STOP else None
        )
    times: dict[str, Any] = {
        "noticed_s": None if noticed is None else noticed - strike.time,
        "training_s": _training_again(history, strike),
    }
    saved = [dump for dump in history.dumps if dump.time >= strike.time]
    if saved:
        times |= {"step_saved": saved[-1].step, "dump_bytes": saved[-1].nbytes}
    committed = [event for event in after if event["event"] == "DumpCommitted"]
    if committed:
        dump_id = committed[-1]["dump_id"]
        of_dump = [event for event in after if event.get("dump_id") == dump_id]
        frozen = [event["time"] for event in of_dump if event["event"] == "Frozen"]
        ordered = _first(of_dump, {"SaveRanks"})
        times["frozen_s"] = max(frozen) - strike.time if frozen else None
        times["dump_s"] = committed[-1]["time"] - ordered if ordered is not None else None
    return times


def _of(history: DrillHistory, name: str) -> list[Mapping[str, Any]]:
    return [event for event in history.events if event["event"] == name]


def _first(events: Sequence[Mapping[str, Any]], names: frozenset[str] | set[str]) -> float | None:
    """When the first event with one of these names was."""
    return next((float(event["time"]) for event in events if event["event"] in names), None)


def _training_again(history: DrillHistory, strike: Strike) -> float | None:
    """When every rank of the last attempt had committed a step after the strike."""
    trained = [lives for lives in history.rounds() if any(life.commits for life in lives.values())]
    if not trained or len(trained[-1]) < len(history.lives):
        return None
    firsts = [_next_commit(life, strike.at) for life in trained[-1].values()]
    return max(firsts) - strike.at if all(firsts) else None


def _next_commit(life: RankLife, after: float) -> float:
    """The first commit after a moment; 0 if there is none."""
    return min((at for at in life.commits.values() if at > after), default=0.0)
