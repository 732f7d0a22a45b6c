"""`msrun drill --patterns`: the catalogue's scripts are killed for real, and a wrong one is caught.

The whole catalogue takes long and is no part of the tests: `scripts/drill --patterns` runs it.
"""

from __future__ import annotations

import json

import pytest
from support.jobs import WORKERS, Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]
WRONG = WORKERS / "cached_counter.py"
PHASES = ("forward", "backward", "commit", "data", "update", "all")


def drilled(launcher: Launcher, *words: object) -> tuple[int, list[dict]]:
    ended = launcher.drill("--json", *words, "--", "--recover_arg=", within_s=550)
    assert not launcher.marked()
    content = json.loads(ended.out)
    assert content["ok"] == (ended.code == 0), ended.err
    return ended.code, content["drills"]


def test_a_script_of_the_catalogue_dies_in_each_phase_on_both_rungs(msrun: Launcher) -> None:
    """All in two jobs, as nothing is amiss."""
    code, drills = drilled(msrun, "--patterns=should_exit_loop")
    assert {each["pattern"] for each in drills} == {"should_exit_loop"}
    verdicts = {(each["rung"], each["deaths"]): each["verdict"] for each in drills}
    assert verdicts.keys() == {
        (rung, each) for rung in ("replacement", "restart") for each in PHASES
    }
    untold = {"forward", "data"}  # a loop of the script's own does not tell when these begin
    assert {verdicts[place] for place in verdicts if place[1] not in untold} == {"equal"}, verdicts
    assert set(verdicts.values()) == {"equal", "-"}, verdicts
    assert sum(each["took_s"] > 0 for each in drills) == 2
    assert code == 0


def test_a_script_that_depends_on_what_nobody_sees_is_called_wrong(msrun: Launcher) -> None:
    """At random moments, beside one that does not; this seed draws both."""
    chosen = f"--patterns={WRONG},adamw_cosine"
    code, drills = drilled(msrun, chosen, "--random=2", "--seed=7")
    verdicts = {each["pattern"]: (each["verdict"], each["why"]) for each in drills}
    assert verdicts == {
        WRONG.stem: ("WRONG", "exit code 0, and other weights on rank 0-1"),
        "adamw_cosine": ("equal", ""),
    }
    assert code == 1
