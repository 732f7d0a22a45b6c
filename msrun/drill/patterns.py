"""``msrun drill --patterns``: the catalogue of small scripts, each killed in every phase of a step.

Each script runs once without protection; that is what its results are compared with. Then it runs
with a death in each of five phases, all in one job, once with replacement and once with restarts.
Only where that job did not end equal, each phase gets a job of its own, which names the phase.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from agent.spec.job_spec import UsageError
from agent.text.ranges import format_ranges
from msrun.drill import pattern_verdict
from msrun.drill.pattern_verdict import PatternOutcome, PatternRun, PatternVerdict, ScriptResult
from msrun.trials.exit_verdict import steps_lost
from msrun.trials.history import DrillHistory, read
from msrun.trials.trial import Command, Trial
from worker_hooks.drill.plan import Fault, Moment

CATALOGUE = Path(__file__).with_name("catalogue")
RUNGS: Mapping[str, tuple[str, ...]] = {
    "replacement": (),
    "restart": ("--on-failure=dump,restart",),
}
RESTARTS = 6  # one more than deaths in a job
RANKS = 2  # unless the script's description says: Ranks: 3
STEPS = {  # the step in which each phase's death strikes; an epoch of the scripts has eight
    Moment.FORWARD: 4,  # the ranks have been compared, at their first two commits
    Moment.BACKWARD: 5,
    Moment.COMMIT: 8,  # the last of an epoch
    Moment.DATA: 11,
    Moment.UPDATE: 13,
}
LAST_STEP = max(STEPS.values())
ALL = "all"
SLOWDOWN, SLACK_S = 5, 60.0  # a job may take so many times as long as the undisturbed one, and more
_REFUSAL = re.compile(r"TypeError: .* cannot be saved: .*")  # by TrainState, of what it was given
UNPROTECTED = {"MS_ENABLE_TFT": "{TTP:0}"}


class Pattern(NamedTuple):
    """A script of the catalogue."""

    name: str
    ranks: int
    is_slow: bool
    path: Path

    @staticmethod
    def read(path: Path) -> Pattern:
        """Read a docstring: a sentence, then perhaps ``Ranks: 3.`` and ``Slow.`` in lines below."""
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        ranks = re.search(r"^Ranks: (\d+)", text, re.MULTILINE)
        is_slow = re.search(r"^Slow\b", text, re.MULTILINE) is not None
        return Pattern(path.stem, int(ranks[1]) if ranks else RANKS, is_slow, path)


class PatternDeath(NamedTuple):
    """A job of a pattern with one or more deaths, and what came of it."""

    pattern: str
    rung: str
    deaths: str  # "all", a phase, or the fault as text
    outcome: PatternOutcome
    took_s: float = 0.0
    struck: frozenset[int] = frozenset()  # indices of the faults that did strike


class _Undisturbed(NamedTuple):
    """The run to compare with."""

    results: Mapping[int, ScriptResult]
    console: str
    took_s: float
    trouble: str = ""  # why nothing can be compared


def choose(names: str) -> tuple[Pattern, ...]:
    """The patterns that are named: ``ema,moco``; a word names each that begins with it.

    ``all`` means all but the slow ones. A word that ends with ``.py`` is the path of a script that
    prints its result as those of the catalogue do.

    Raises:
        UsageError: it names a word that fits no pattern, or a script that cannot be read.
    """
    known = tuple(map(Pattern.read, sorted(CATALOGUE.glob("*.py"))))
    if names == ALL:
        return tuple(pattern for pattern in known if not pattern.is_slow)
    chosen: dict[Path, Pattern] = {}
    for word in names.split(","):
        if word.endswith(".py"):
            fitting = [_own_script(word)]
        else:
            fitting = [pattern for pattern in known if word and pattern.name.startswith(word)]
        if not fitting:
            listed = ", ".join(pattern.name for pattern in known)
            raise UsageError(f"--patterns: {word!r} is no pattern, choose from {listed}")
        chosen |= {pattern.path: pattern for pattern in fitting}
    return tuple(chosen.values())


def _own_script(path: str) -> Pattern:
    try:
        return Pattern.read(Path(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise UsageError(f"--patterns: {path} cannot be read: {error}") from None


class PatternDrill:
    """Runs patterns of the catalogue in a folder, one job after the other."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        environ: Mapping[str, str],
        timeout_s: float | None,
    ) -> None:
        """``options``: msrun's, for every job. ``timeout_s``: for each; ``None``: derived."""
        self._folder = folder
        self._options = tuple(options)
        self._environ = environ
        self._timeout_s = timeout_s
        self._undisturbed: dict[str, _Undisturbed] = {}
        self._number = 0

    def in_phases(self, pattern: Pattern) -> Iterator[PatternDeath]:
        """A death in each phase, on each rung."""
        deaths = {
            moment: Fault(rank=(index + 1) % pattern.ranks, step=step, moment=moment)
            for index, (moment, step) in enumerate(STEPS.items())
        }
        for rung in RUNGS:
            drilled = partial(self.drill, pattern, rung)
            together = drilled(tuple(deaths.values()), ALL)
            yield together
            for index, (moment, fault) in enumerate(deaths.items()):
                if together.outcome.verdict is not PatternVerdict.EQUAL:
                    yield drilled((fault,), moment.value)
                elif index in together.struck:
                    yield together._replace(deaths=moment.value, took_s=0.0)
                else:
                    yield PatternDeath(pattern.name, rung, moment.value, pattern_verdict.UNSTRUCK)

    def at_random(
        self, patterns: Sequence[Pattern], number: int, seed: int
    ) -> Iterator[PatternDeath]:
        """Deaths of random ranks at random moments, of random patterns on random rungs."""
        chance = Random(seed)  # noqa: S311  it must be reproducible
        for _ in range(number):
            pattern, rung = chance.choice(patterns), chance.choice(tuple(RUNGS))
            moment = chance.choice((*STEPS, Moment.ANY))
            fault = Fault(
                rank=chance.randrange(pattern.ranks),
                step=chance.randint(1, LAST_STEP),
                moment=moment,
                delay=round(chance.random(), 3),
            )
            yield self.drill(pattern, rung, (fault,), fault.words)

    def drill(
        self, pattern: Pattern, rung: str, faults: tuple[Fault, ...], deaths: str
    ) -> PatternDeath:
        """One job with these faults."""
        whole = self._undisturbed.get(pattern.name) or self._run_undisturbed(pattern)
        if whole.trouble:
            return PatternDeath(pattern.name, rung, deaths, _refused(whole))
        trial = self._trial(pattern, RUNGS[rung], faults)
        within_s = self._timeout_s or SLOWDOWN * whole.took_s + SLACK_S
        ended = trial.run(self._environ, within_s)
        console, history = _console(trial), read(trial.folder)
        run = PatternRun(
            ended.exit_code,
            pattern_verdict.read_results(console),
            struck=len(history.strikes),
            steps_lost=steps_lost(history) or 0,
            said=pattern_verdict.read_said(console, history),
            accusation=pattern_verdict.read_accusation(console),
            reason=_reason(history),
        )
        outcome = pattern_verdict.judge(whole.results, run)
        if outcome.verdict not in {PatternVerdict.WRONG, PatternVerdict.LOST}:
            shutil.rmtree(trial.folder, ignore_errors=True)
        struck = frozenset(strike.number for strike in history.strikes)
        return PatternDeath(pattern.name, rung, deaths, outcome, ended.took_s, struck)

    def _run_undisturbed(self, pattern: Pattern) -> _Undisturbed:
        trial = self._trial(pattern)
        ended = trial.run({**self._environ, **UNPROTECTED}, self._timeout_s)
        console = _console(trial)
        results = pattern_verdict.read_results(console)
        trouble = ""
        if ended.exit_code != 0:
            trouble = f"undisturbed it ended with exit code {ended.exit_code}"
        elif silent := sorted(set(range(pattern.ranks)) - results.keys()):
            trouble = f"undisturbed rank {format_ranges(tuple(silent))} printed no result"
        whole = _Undisturbed(results, console, ended.took_s, trouble)
        self._undisturbed[pattern.name] = whole
        return whole

    def _trial(
        self, pattern: Pattern, rung: Sequence[str] = (), faults: Sequence[Fault] = ()
    ) -> Trial:
        self._number += 1
        options = (f"--worker-num={pattern.ranks}", f"--max-restarts={RESTARTS}", *rung)
        command = Command((*options, *self._options), (str(pattern.path),))
        return Trial(self._folder / f"{self._number:04}_{pattern.name}", command, faults)


def _console(trial: Trial) -> str:
    return (trial.folder / "console.log").read_text(errors="replace")


def _reason(history: DrillHistory) -> str:
    """Why the last msrun ended, in its own words up to the first semicolon."""
    ends = [str(event["reason"]) for event in history.events if event["event"] == "Finish"]
    return ends[-1].partition(";")[0] if ends else ""


def _refused(whole: _Undisturbed) -> PatternOutcome:
    """A script that TrainState refuses at its start is told so early; any other trouble is ours."""
    if refusal := _REFUSAL.search(whole.console):
        return PatternOutcome(PatternVerdict.SAID, f"refused at the start: {refusal[0]}")
    return PatternOutcome(PatternVerdict.WRONG, f"broken drill: {whole.trouble}")
