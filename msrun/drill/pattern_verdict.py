"""Judges how a script of the catalogue ended after deaths, against its undisturbed run. Pure.

The judge is the script itself: the line in which each rank prints a digest of all that it trained,
and the values that it kept for itself. What msrun thinks of its own work decides nothing; only what
it said before the first death can excuse a loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import chain, takewhile
from typing import NamedTuple

from agent.text.ranges import format_ranges
from msrun.trials.history import DrillHistory

_FINAL = re.compile(r"\[rank (\d+)\]: FINAL (.*)")
_OURS = "msrun: "
_DEATH = re.compile(rf"{_OURS}.*(was killed by|exited with code|raised )")
_REFUSAL = re.compile(r"\b(not|no|cannot|never|nothing|anew|unprotected|refused|lacks?)\b")
_ANEW = re.compile("begins? anew after a replacement or resume")  # weights may depend on it
_ACCUSATION = "corrupts data"  # no drill corrupts anything: whatever differs, the script does it
_BENIGN = ("TrainState: no ckpt_save_path", "protected:")


class PatternVerdict(Enum):
    """What came of a pattern's deaths, the best first."""

    EQUAL = "equal"  # bitwise the undisturbed run, and no step was lost
    UNSTRUCK = "-"  # the script has no such moment
    SAID = "said"  # something was lost or began anew, and msrun had said so before the death
    LOST = "lost"  # nothing is wrong, but steps or the job were lost without a word before
    WRONG = "WRONG"  # exit code 0 with other results, or a claim that is not true


class ScriptResult(NamedTuple):
    """What a rank printed at its end: ``FINAL weights=41b5 best=0.25``."""

    weights: str  # digest of everything that it trained
    own: Mapping[str, str]  # values that the script kept for itself


class PatternRun(NamedTuple):
    """What is known of one job."""

    exit_code: int | None  # None: it did not end in time
    results: Mapping[int, ScriptResult]  # by rank
    struck: int  # deaths
    steps_lost: int
    said: tuple[str, ...]  # by msrun, before the first death, of what it does not protect
    accusation: str = ""  # that the hardware corrupts data
    reason: str = ""  # of its end, as msrun recorded it


class PatternOutcome(NamedTuple):
    """The verdict of one job, and why."""

    verdict: PatternVerdict
    why: str = ""


UNSTRUCK = PatternOutcome(PatternVerdict.UNSTRUCK)


def read_results(console: str) -> dict[int, ScriptResult]:
    """The last result of each rank, by rank; ``console``: all that msrun printed."""
    found = {}
    for told in filter(None, map(_FINAL.match, console.splitlines())):
        words = dict(word.partition("=")[::2] for word in told[2].split())
        found[int(told[1])] = ScriptResult(words.pop("weights", ""), words)
    return found


def read_said(console: str, history: DrillHistory) -> tuple[str, ...]:
    """What msrun and its hooks said of what they do not protect, before the first death.

    ``history``: what the ranks' hooks said and when, and when the first death struck.
    """
    lines = takewhile(lambda line: not _DEATH.match(line), console.splitlines())
    said = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
    struck_at = min((strike.at for strike in history.strikes), default=float("inf"))
    lives = chain.from_iterable(history.lives.values())
    warnings = sorted(chain.from_iterable(life.warnings for life in lives))
    said += [text for at, text in warnings if at < struck_at]
    return tuple(
        dict.fromkeys(
            text for text in said if _REFUSAL.search(text) and not text.startswith(_BENIGN)
        )
    )


def read_accusation(console: str) -> str:
    """The line in which msrun blames the hardware alone, or an empty text."""
    lines = (line for line in console.splitlines() if _ACCUSATION in line and "script" not in line)
    return next(lines, "")


def judge(expected: Mapping[int, ScriptResult], run: PatternRun) -> PatternOutcome:
    """The verdict of a job; ``expected``: the results of the undisturbed one, by rank."""
    if run.exit_code == 0 and (silent := sorted(expected.keys() - run.results.keys())):
        why = f"exit code 0, and no result of rank {format_ranges(tuple(silent))}"
        return PatternOutcome(PatternVerdict.WRONG, why)
    if run.exit_code == 0 and (other := _other_weights(expected, run)):
        named = next((line for line in run.said if _ANEW.search(line)), "")
        verdict = PatternVerdict.SAID if named else PatternVerdict.WRONG
        return PatternOutcome(verdict, f"{other}{f' ({named})' if named else ''}")
    if run.exit_code == 0 and (wrong := _untold(expected, run)):
        return PatternOutcome(PatternVerdict.WRONG, wrong)
    if run.accusation:
        return PatternOutcome(PatternVerdict.WRONG, f"untrue: {run.accusation}")
    values = () if run.exit_code != 0 else tuple(value for _, value in _changed(expected, run))
    loss = "; ".join(filter(None, (_loss(run), *values)))
    if loss:
        verdict = PatternVerdict.SAID if run.said else PatternVerdict.LOST
        return PatternOutcome(verdict, f"{loss}{f' ({run.said[0]})' if run.said else ''}")
    if not run.struck:
        return UNSTRUCK
    return PatternOutcome(PatternVerdict.EQUAL)


def _untold(expected: Mapping[int, ScriptResult], run: PatternRun) -> str:
    """Values of the script's own that are others, and that msrun did not name before the death."""
    untold = [
        value
        for name, value in _changed(expected, run)
        if not any(re.search(rf"\b{re.escape(name)}\b", line) for line in run.said)
    ]
    return f"exit code 0, and {', '.join(untold)}" if untold else ""


def _other_weights(expected: Mapping[int, ScriptResult], run: PatternRun) -> str:
    """Which ranks have other weights; only a variable that msrun named before may be the reason."""
    other = [rank for rank in expected if run.results[rank].weights != expected[rank].weights]
    return f"exit code 0, and other weights on rank {format_ranges(tuple(other))}" if other else ""


def _changed(expected: Mapping[int, ScriptResult], run: PatternRun) -> Iterator[tuple[str, str]]:
    """The script's values that differ from the undisturbed run's: name and text."""
    for rank, result in expected.items():
        for name, value in result.own.items():
            found = run.results[rank].own.get(name, "nothing")
            if found != value:
                yield name, f"{name}={found} instead of {value} on rank {rank}"


def _loss(run: PatternRun) -> str:
    if run.exit_code is None:
        return "did not end in time"
    if run.exit_code != 0:
        return ": ".join(filter(None, (f"exit code {run.exit_code}", run.reason)))
    return f"{run.steps_lost} step{'s' * (run.steps_lost > 1)} lost" if run.steps_lost else ""
