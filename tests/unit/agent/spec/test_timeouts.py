"""The ladder of waiting times: what follows from what was given, and what contradicts itself."""

from __future__ import annotations

from itertools import combinations

import pytest

from agent.spec.job_spec import DumpSpec, JobSpec, Program, ProgramKind, Timeouts, UsageError
from agent.spec.timeouts import TimeoutLadder, TimeoutRung, derive, describe, exit_times

NAMES = ("freeze", "update_grace", "stall", "grace", "scheduler")


def ladder(**seconds: float) -> TimeoutLadder:
    return derive(
        **{name: TimeoutRung(given, f"--{name}={given:g}") for name, given in seconds.items()}
    )


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({}, (5, 10, 20, 30, None)),
        ({"grace": 30}, (5, 10, 20, 30, None)),
        ({"grace": 600}, (5, 10, 20, 600, None)),
        ({"grace": 15}, (2.5, 5, 10, 15, None)),
        ({"grace": 2}, (2, 5, 10, 2, None)),  # a short grace does not make a disk faster
        ({"grace": 0}, (2, 5, 10, 0, None)),
        ({"scheduler": 36}, (5, 10, 20, 30, 36)),
        ({"scheduler": 18}, (2.5, 5, 10, 15, 18)),
        ({"scheduler": 6}, (2, 5, 10, 5, 6)),
        ({"stall": 300}, (5, 10, 300, 450, None)),
        ({"update_grace": 60}, (5, 60, 120, 180, None)),
        ({"stall": 4}, (1, 2, 4, 30, None)),  # asked for: below the floors
        ({"freeze": 6, "stall": 7}, (6, 6.5, 7, 30, None)),
        ({"freeze": 60, "scheduler": 100}, (60, 80, 90, 95, 100)),
    ],
)
def test_what_was_not_given_follows_from_what_was(given, times):
    assert tuple(ladder(**given)) == pytest.approx(times)


def test_every_ladder_without_a_short_grace_climbs_and_keeps_what_was_given():
    for count in range(len(NAMES) + 1):
        for names in combinations(NAMES, count):
            given = {name: 40.0 * (1 + NAMES.index(name)) for name in names}
            made = ladder(**given)
            times = [time for time in made if time is not None]
            assert times == sorted(set(times)), given
            for name, seconds in given.items():
                assert made[NAMES.index(name)] == seconds


@pytest.mark.parametrize(("lower", "upper"), list(combinations(NAMES, 2)))
def test_two_given_times_out_of_order_are_both_named(lower, upper):
    for seconds in (9, 10):
        with pytest.raises(UsageError) as raised:
            ladder(**{lower: 10, upper: seconds})
        assert f"--{lower}=10" in str(raised.value)
        assert f"--{upper}={seconds}" in str(raised.value)


SPEC = JobSpec(Program("t.py", (), ProgramKind.SCRIPT, "python"), 1, "job", "rec")


def test_the_ladder_is_one_line():
    assert describe(SPEC) == (
        "timeouts: freeze 5 s < update grace 10 s < dump without progress 20 s < stop grace 30 s; "
        "graceful exit: step 20 s < saved 30 s after a signal, else step 585 s < saved 600 s"
    )
    waits = Timeouts(grace_s=2, scheduler_s=40, exit_s=9, asked_exit_s=9)
    assert describe(SPEC._replace(dump=DumpSpec(freeze_s=2.345), timeouts=waits)) == (
        "timeouts: freeze 2.3 s < update grace 10 s < dump without progress 20 s "
        ">= stop grace 2 s < scheduler's grace 40 s; graceful exit: step 6 s < saved 9 s"
    )


def exits(**seconds: float) -> tuple[float, float]:
    """What a graceful exit may take; `exit` is what was given for it."""
    rungs = {name: TimeoutRung(given, f"--{name}={given:g}") for name, given in seconds.items()}
    grace, freeze, scheduler = (rungs.get(name) for name in ("exit", "freeze", "scheduler"))
    return exit_times(derive(freeze=freeze, scheduler=scheduler), grace, freeze, scheduler)


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({}, (30, 600)),
        ({"exit": 5}, (5, 5)),
        ({"exit": 1000}, (1000, 1000)),
        ({"scheduler": 12}, (10, 600)),  # the cluster kills then, whatever is waited for
        ({"scheduler": 1200}, (1000, 1000)),
        ({"freeze": 60}, (120, 600)),
        ({"exit": 30, "scheduler": 31, "freeze": 29}, (30, 30)),
    ],
)
def test_what_a_graceful_exit_may_take(given, times):
    assert exits(**given) == pytest.approx(times)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"freeze": 5, "exit": 5}, ("--freeze=5", "--exit=5")),
        ({"exit": 30, "scheduler": 30}, ("--exit=30", "--scheduler=30")),
    ],
)
def test_a_grace_that_leaves_no_room_is_refused(given, names):
    with pytest.raises(UsageError, match="leaves no room within") as raised:
        exits(**given)
    assert all(name in str(raised.value) for name in names)
