"""Whatever a script trains with: killed twice, it ends bitwise where it would have ended anyway.

Every way of training in `train_kinds.py` is run undisturbed by a script without any hooks, one after
the other. Against that stand a job for each with ranks that die by a signal: the first is replaced
where that can be, and after the second all are restarted from a dump.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.jobs import Ended, Launcher
from support.training_kinds import RANKS, SCRIPT, Run, killed
from support.warm_python import WarmPython

from msrun.trials.history import read
from msrun.trials.verdict import steps_lost

pytestmark = [pytest.mark.torch, pytest.mark.warm]
AT_ONCE = 2  # jobs
APART = "weights_by_epoch"

# Steps are counted from 1; an epoch has four, where it has no loop more. What is not here is gone on
# with from each of its commits in test_resume_from_every_step.py.
CASES = {
    "tensors": "rank=1,step=7,phase=backward",
    "by_hand": "rank=2,step=6,phase=backward",
    "gan": "rank=0,step=7,phase=commit",
    "asked": "rank=2,step=6,phase=update",
    "accumulate": "rank=2,step=6,phase=forward",
    "scaler": "rank=0,step=7,phase=update",
    "clip": "rank=1,step=5,phase=data",
    "schedules": "rank=2,step=6,phase=backward",
    "compiled": "rank=1,step=7,phase=forward",
    "compiled_outer": "rank=1,step=7,phase=backward",
    "private_buffers": "rank=1,step=7,phase=commit",
    "randomness": "rank=1,step=6,phase=data",
    "tied": "rank=2,step=7,phase=backward",
    "types": "rank=1,step=6,phase=forward",
    "averages": "rank=1,step=7,phase=commit",
    "kept_gradients": "rank=0,step=6,phase=backward",
    "logged": "rank=1,step=7,phase=commit",
    "variables": "rank=1,step=5,phase=forward",
    "by_epoch": "rank=2,step=6,phase=backward",
    "validate": "rank=1,step=5,phase=forward",
    "two_loaders": "rank=2,step=6,phase=backward",
    "early": "rank=1,step=4,phase=forward",
    "own_epochs": "rank=2,step=6,phase=forward",
    "weights_by_epoch": "rank=1,step=5,phase=forward",
    "curriculum": "rank=1,step=10,phase=forward",
    "thawed": "rank=2,step=11,phase=backward",
    "fetched_ahead": "rank=2,step=7,phase=update",
    "bare": "rank=0,step=6,phase=backward",
    "catches": "rank=1,step=6,phase=backward",
    "shuffled": "rank=1,step=7,phase=forward",
    "workers": "rank=1,step=6,phase=backward",
    "workers_stay": "rank=1,step=7,phase=backward",
    "stream": "rank=1,step=7,phase=backward",
    "stream_worker": "rank=2,step=7,phase=data",
    "reshuffled": "rank=1,step=6,phase=backward",
    "together": "rank=2,step=7,phase=forward",
    "prepared": "rank=0,step=7,phase=backward",
    "stateful": "rank=1,step=7,phase=backward",
    "decay": "rank=1,step=7,phase=backward",
    "encoder": "rank=1,step=7,phase=backward",
    "encoder_data": "rank=2,step=7,phase=forward",
    "queue": "rank=1,step=7,phase=backward",
    "noise": "rank=1,step=7,phase=update",
    "late_table": "rank=1,step=7,phase=update",
    "clip_vector": "rank=1,step=7,phase=backward",
    "meters": "rank=1,step=7,phase=backward",
}


# Nobody comes alone into these; the first rank that dies makes them all begin anew.
FIXED = {
    "bare": "the script does not train inside run(train, state)",
    "catches": "the script does not train inside run(train, state)",
}


def faults(kind: str) -> str:
    """The kind's own fault, and an earlier one of the rank below."""
    last = CASES[kind]
    rank = (int(last[5]) - 1) % RANKS
    return last if kind in FIXED else f"rank={rank},step=3,phase=backward+{last}"


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The kinds of this run."""
    found = {
        item.callspec.params["kind"]
        for item in request.session.items
        if "kind" in getattr(getattr(item, "callspec", None), "params", ())
        and item.path == Path(__file__)
    }
    return sorted(found)


@pytest.fixture(scope="module")
def plain(launcher: Launcher, warm_python: WarmPython, chosen: list[str]) -> Run:
    """All of them undisturbed, without hooks and without msrun."""
    folder = launcher.tmp / "plain"
    kinds = ",".join(sorted({*chosen, APART}))
    said = warm_python.train(folder, RANKS, SCRIPT, "out", "--plain", f"--kind={kinds}")
    return Run(Ended(0, "".join(said), ""), folder)


@pytest.fixture(scope="module")
def runs(launcher: Launcher, chosen: list[str]) -> dict[str, Run]:
    """All that were chosen, two at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {kind: pool.submit(killed, launcher, kind, faults(kind)) for kind in chosen}
        return {kind: future.result() for kind, future in started.items()}


@pytest.mark.parametrize("kind", CASES)
def test_nothing_is_lost(kind: str, plain: Run, runs: dict[str, Run]) -> None:
    done = runs[kind]
    assert done.ended.code == 0, done.ended.out
    history = read(done.folder)
    assert len(history.strikes) == (1 if kind in FIXED else 2)
    assert len(history.dumps) == 1
    assert steps_lost(history) == 0
    replaced = [each["step"] for each in history.events if each["event"] == "ReplaceRanks"]
    (begun,) = (each["reason"] for each in history.events if is_restart(each))
    assert replaced == ([] if kind in FIXED else [2])
    assert FIXED.get(kind, "all 1 replacements within 3600 s are spent") in begun
    expected = plain.results(kind)
    if kind == "logged":  # the step was saved without what its ranks would have told each other
        for rank, found in zip(expected, done.results(kind), strict=True):
            if "1.average.3" not in found:  # else they had told it just before
                del rank["1.average.3"]
    assert done.results(kind) == expected
    assert "corrupts data" not in done.ended.out
    if kind not in FIXED:
        assert not re.search("is not registered|begins? anew", done.ended.out)


def is_restart(event: Mapping[str, object]) -> bool:
    return event["event"] == "StartAttempt" and event["attempt"] != 0


def test_a_script_that_answers_a_failure_itself_is_held_until_all_is_saved(
    runs: dict[str, Run],
) -> None:
    if "catches" not in runs:
        pytest.skip("its job was not chosen")
    logs = [path.read_text() for path in runs["catches"].folder.glob("logs/**/worker_*.log")]
    # the other survivor may be stopped before its collective fails: all is saved by then
    assert 1 <= sum("caught" in log for log in logs) <= RANKS - 1


@pytest.mark.parametrize(
    ("apart", "fault", "replacements", "again"),
    [
        ("end", "rank=1,step=5,phase=forward", 0, []),
        ("end", "rank=2,step=4,phase=update", 1, []),
        ("update", "rank=1,step=5,phase=update", 1, [([2], 5)]),
    ],
)
def test_a_rank_that_is_behind_comes_to_the_commit_of_the_others(
    launcher: Launcher, plain: Run, apart: str, fault: str, replacements: int, again: list
) -> None:
    """Weights are averaged behind step 4, the end of an epoch, which is no commit.

    end: rank 2 has yet to make the update of step 4, or dies in it while its peers are past the
    average. update: it has yet to make that of step 5, and rank 0 has only just made it, so no page
    tells of its commit when the ranks are frozen.
    """
    kind, told = APART, f"--max_replacements={replacements}"
    told = told, "--protect-memory=off"  # its notes make each commit take longer
    done = killed(launcher, kind, fault, *told, name=f"apart-{apart}-{fault[5]}", APART=apart)
    assert done.ended.code == 0, done.ended.out
    history = read(done.folder)
    assert steps_lost(history) == 0
    orders = [each for each in history.events if each["event"] == "FreezeRanks"]
    told = [(each["ranks"], each["step"]) for each in orders[1:]]
    assert told in ([], again)  # on a busy machine rank 0's page may tell of its commit in time
    assert "are of a step before" not in done.ended.out
    assert done.results(kind) == plain.results(kind)
