"""One ``msrun drill --patterns``: the drills one by one, each row shown as soon as it is judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, groupby
from pathlib import Path

from agent.spec.job_spec import UsageError
from agent.text.sanitize import sanitized
from msrun.drill.pattern_verdict import PatternVerdict
from msrun.drill.patterns import ALL, STEPS, PatternDeath, PatternDrill, choose
from msrun.drill.session import BROKEN_EXIT, DrillOptions, in_folder
from msrun.options.argv import scan
from msrun.terminal.stdout import put
from msrun.terminal.table import show_json
from msrun.trials.trial import Command

DEATHS = (*(moment.value for moment in STEPS), ALL)
_NAME, _RUNG, _CELL, _FAULT = 26, 13, 10, 44  # widths of columns


def drill(names: str, number: int | None, options: DrillOptions, environ: Mapping[str, str]) -> int:
    """Run the drills and show their results.

    Args:
        names: of patterns, with commas; or "all".
        number: of random drills; ``None``: a death in each phase of each pattern.

    Returns:
        1 if any result is wrong, else 0.

    Raises:
        UsageError: one sentence on what is wrong; nothing was started.
        KeyboardInterrupt: it was interrupted; everything it started is gone.
    """
    patterns = choose(names)
    given = Command.of(scan(options.job))
    if given.program:
        raise UsageError("msrun drill: --patterns brings its own scripts: give options alone")

    def run(folder: Path) -> int:
        drills = PatternDrill(folder, given.options, environ, options.timeout_s)
        if number is not None:
            return show_random(
                drills.at_random(patterns, number, options.seed), as_json=options.as_json
            )
        deaths = chain.from_iterable(map(drills.in_phases, patterns))
        return show_phases(deaths, as_json=options.as_json)

    return in_folder(run, is_kept=options.keep)


def show_phases(deaths: Iterable[PatternDeath], *, as_json: bool = False) -> int:
    """Show a row for each pattern and rung, below it why a cell is not equal; the exit code."""
    if as_json:
        return _show_json(deaths)
    put(_line(*(title.ljust(_CELL) for title in DEATHS), name="pattern", rung="rung"))
    verdicts: Counter[PatternVerdict] = Counter()
    for (name, rung), several in groupby(deaths, key=lambda each: (each.pattern, each.rung)):
        found = {each.deaths: each.outcome for each in several}
        verdicts.update(outcome.verdict for outcome in found.values())
        cells = (found[which].verdict.value.ljust(_CELL) for which in DEATHS)
        put(_line(*cells, name=name, rung=rung))
        for why, which in _reasons(found[each].why for each in DEATHS).items():
            where = ", ".join(DEATHS[index] for index in which)
            put(f"    {where}: {sanitized(why)}\n")
    return _summary(verdicts)


def show_random(deaths: Iterable[PatternDeath], *, as_json: bool = False) -> int:
    """Show a row for each death; the exit code."""
    if as_json:
        return _show_json(deaths)
    put(_line("fault".ljust(_FAULT), "verdict", name="pattern", rung="rung"))
    verdicts: Counter[PatternVerdict] = Counter()
    for each in deaths:
        verdicts[each.outcome.verdict] += 1
        told = ": ".join(filter(None, (each.outcome.verdict.value, sanitized(each.outcome.why))))
        put(_line(each.deaths.ljust(_FAULT), told, name=each.pattern, rung=each.rung))
    return _summary(verdicts)


def _reasons(whys: Iterable[str]) -> dict[str, list[int]]:
    """Each reason, and the indices of those that have it."""
    found: dict[str, list[int]] = {}
    for index, why in enumerate(whys):
        if why:
            found.setdefault(why, []).append(index)
    return found


def _line(*cells: str, name: str, rung: str) -> str:
    return f"{name:<{_NAME}} {rung:<{_RUNG}} {' '.join(cells)}".rstrip() + "\n"


def _summary(verdicts: Counter[PatternVerdict]) -> int:
    named = (each for each in PatternVerdict if each is not PatternVerdict.UNSTRUCK)
    counts = ", ".join(f"{verdicts[each]} {each.value}" for each in named)
    put(f"{verdicts.total()} drills: {counts}\n")
    return _exit_code(verdicts)


def _show_json(deaths: Iterable[PatternDeath]) -> int:
    done = list(deaths)
    code = _exit_code(Counter(each.outcome.verdict for each in done))
    drills = [
        {
            "pattern": each.pattern,
            "rung": each.rung,
            "deaths": each.deaths,
            "verdict": each.outcome.verdict.value,
            "why": each.outcome.why,
            "took_s": each.took_s,
        }
        for each in done
    ]
    show_json({"ok": code == 0, "drills": drills})
    return code


def _exit_code(verdicts: Mapping[PatternVerdict, int]) -> int:
    return BROKEN_EXIT if verdicts.get(PatternVerdict.WRONG) else 0
