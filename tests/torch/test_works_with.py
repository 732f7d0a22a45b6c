"""Whatever a script trains with: killed once, it ends bitwise where it would have ended anyway.

Every way of training in `train_kinds.py` is run undisturbed by a script without any hooks, all in
one job. Against that stand a job for each with a rank that dies by a signal, and all of them under
torchrun and under plain Python, where nothing guards them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import WORKERS, Ended, Launcher

from msrun.drill_faults import read_words
from msrun.drill_history import read
from msrun.drill_verdict import steps_lost
from worker_hooks.fault import Plan

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
SCRIPT = WORKERS / "train_kinds.py"
RANKS = 3
AT_ONCE = 2  # jobs

# Steps are counted from 1; an epoch has four, where it has no loop more. What is not here is gone on
# with from each of its commits in test_every_step.py.
CASES = {
    "tensors": "rank=1,step=7,phase=backward",
    "by_hand": "rank=2,step=6,phase=backward",
    "gan": "rank=0,step=7,phase=forward",
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
    "by_epoch": "rank=2,step=6,phase=backward",
    "validate": "rank=1,step=5,phase=forward",
    "two_loaders": "rank=2,step=6,phase=backward",
    "early": "rank=1,step=4,phase=forward",
    "own_epochs": "rank=2,step=6,phase=forward",
    "weights_by_epoch": "rank=1,step=6,phase=forward",
    "bare": "rank=0,step=6,phase=backward",
    "catches": "rank=1,step=6,phase=backward",
    "shuffled": "rank=1,step=7,phase=forward",
    "workers": "rank=1,step=6,phase=backward",
    "workers_stay": "rank=1,step=7,phase=backward",
    "stream": "rank=1,step=7,phase=backward",
    "stream_worker": "rank=2,step=7,phase=data",
    "stateful": "rank=1,step=7,phase=backward",
}


class Run(NamedTuple):
    """A job that ended, and the folder it worked in."""

    ended: Ended
    folder: Path

    def results(self, kind: str, ranks: int = RANKS) -> list[dict]:
        """Of each rank all losses, and digests of all that it held at the end."""
        return [
            {**noted(self.folder / "out" / f"{kind}.{rank}.jsonl"), **json.loads(path.read_bytes())}
            for rank in range(ranks)
            for path in [self.folder / "out" / f"{kind}.{rank}.json"]
        ]


def noted(path: Path) -> dict:
    """Losses by the place they came about at; a step that was repeated says them twice."""
    found = {}
    for line in path.read_text().splitlines():
        found |= json.loads(line)
    return found


def run(launcher: Launcher, folder: Path, *words: object, **environ: str) -> Run:
    """A program, to its end."""
    folder.mkdir()
    with open(folder / "console", "w+b") as console:
        done = subprocess.run(
            [*map(str, words)],
            env=launcher.env(**{"XDG_STATE_HOME": str(folder / "state"), **environ}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            timeout=200,
            check=False,
        )
    return Run(Ended(done.returncode, (folder / "console").read_text(), ""), folder)


def msrun_of(*words: object) -> tuple[object, ...]:
    return (sys.executable, "-m", "msrun", "--log_dir=logs", *words)


def killed(launcher: Launcher, kind: str, fault: str, name: str = "") -> Run:
    """A job with one fault."""
    folder = launcher.tmp / (name or kind)
    plan = Plan(str(folder / "witness"), str(folder / "ckpt"), read_words(fault, "kill").faults)
    words = msrun_of(f"--worker_num={RANKS}", "--max-restarts=1", SCRIPT, "out", f"--kind={kind}")
    prelude = 'mkdir witness ckpt && exec "$@"'
    environ = {"MSRUN_DRILL": plan.encode()}
    return run(launcher, folder, "sh", "-c", prelude, "sh", *words, **environ)


def python_of(launcher: Launcher, name: str, *words: object) -> Run:
    """The script by itself, one process."""
    done = run(launcher, launcher.tmp / name, sys.executable, SCRIPT, "out", *words)
    assert done.ended.code == 0, done.ended.out
    return done


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("works"))
    yield launcher
    left = launcher.end()
    assert not left, f"processes outlived their job: {left}"


@pytest.fixture(scope="module")
def plain(launcher: Launcher) -> Run:
    """All of them undisturbed, and without hooks."""
    words = msrun_of(f"--worker_num={RANKS}", SCRIPT, "out", "--plain")
    done = run(launcher, launcher.tmp / "plain", *words)
    assert done.ended.code == 0, done.ended.out
    return done


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, launcher: Launcher) -> dict[str, Run]:
    """All that were chosen, two at a time."""
    chosen = {
        item.callspec.params["kind"]
        for item in request.session.items
        if "kind" in getattr(getattr(item, "callspec", None), "params", ())
        and item.path == Path(__file__)
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {
            kind: pool.submit(killed, launcher, kind, CASES[kind]) for kind in sorted(chosen)
        }
        return {kind: future.result() for kind, future in started.items()}


@pytest.mark.parametrize("kind", CASES)
def test_nothing_is_lost(kind: str, plain: Run, runs: dict[str, Run]) -> None:
    done = runs[kind]
    assert done.ended.code == 0, done.ended.out
    history = read(done.folder)
    assert len(history.strikes) == 1
    assert len(history.dumps) == 1
    assert steps_lost(history) == 0
    expected = plain.results(kind)
    if kind == "logged":  # the step was saved without what its ranks would have told each other
        for rank in expected:
            del rank["1.average.3"]
    assert done.results(kind) == expected


def test_a_script_that_answers_a_failure_itself_is_held_until_all_is_saved(
    runs: dict[str, Run],
) -> None:
    if "catches" not in runs:
        pytest.skip("its job was not chosen")
    logs = [path.read_text() for path in runs["catches"].folder.glob("logs/**/worker_*.log")]
    # the other survivor may be stopped before its collective fails: all is saved by then
    assert 1 <= sum("caught" in log for log in logs) <= RANKS - 1


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("logged_late", "rank=1,step=7,phase=commit"),  # the schedule is behind a collective
        ("seldom", "rank=1,step=7,phase=commit"),  # what this step does besides is behind one
        ("gan", "rank=1,step=7,phase=commit"),  # one of two networks is updated
        ("swapped", "rank=2,step=5,phase=forward"),  # other weights stand in for a validation
        # gradients are evened out within the update, and the others are in theirs by its middle
        ("closure", "rank=1,step=6,phase=update"),
    ],
)
def test_half_a_step_is_never_saved(way: str, fault: str, plain: Run, launcher: Launcher) -> None:
    done = killed(launcher, way, fault, f"{way} torn")
    assert done.ended.code == 0, done.ended.out
    history = read(done.folder)
    assert len(history.strikes) == 1
    assert history.dumps == ()
    assert "did not reach its commit" in done.ended.out
    assert done.results(way) == plain.results(way)  # from the beginning


def test_the_exception_that_ended_it_all_is_in_the_log_and_in_the_report(
    launcher: Launcher, plain: Run
) -> None:
    fault = "rank=1,step=6,phase=forward,raise"
    done = killed(launcher, "clip", fault, "raises")
    assert done.ended.code == 0, done.ended.out
    assert "rank 1 raised DrillError: exception in rank 1 at step 6, forward" in done.ended.out
    log = (done.folder / "logs" / "worker_1.attempt_0.log").read_text()
    assert log.splitlines()[-1].endswith("DrillError: exception in rank 1 at step 6, forward")
    assert steps_lost(read(done.folder)) == 0
    assert done.results("clip") == plain.results("clip")


def test_under_torchrun_the_same_scripts_train_unchanged(launcher: Launcher, plain: Run) -> None:
    told = ("--nnodes=1", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d")
    words = (*told, "--rdzv-endpoint=localhost:0", SCRIPT, "out")
    folder = launcher.tmp / "torchrun"
    done = run(launcher, folder, sys.executable, "-m", "torch.distributed.run", *words)
    assert done.ended.code == 0, done.ended.out
    for kind in kinds(plain):
        assert done.results(kind) == plain.results(kind), kind
    said = done.ended.out.count("nothing guards this run; under msrun a dead rank loses nothing")
    assert said == len(kinds(plain))
    assert not (folder / "checkpoints").exists()


def kinds(plain: Run) -> list[str]:
    return sorted(path.name.removesuffix(".0.json") for path in plain.folder.glob("out/*.0.json"))


def test_under_plain_python_too(launcher: Launcher) -> None:
    some = ("accumulate", "validate", "averages", "weights_by_epoch", "workers", "stateful")
    expected = python_of(launcher, "python plain", f"--kind={','.join(some)}", "--plain")
    done = python_of(launcher, "python", f"--kind={','.join(some)}")
    for kind in some:
        assert done.results(kind, 1) == expected.results(kind, 1), kind
    assert done.ended.out.count("nothing guards this run; under msrun") == len(some)


def test_a_script_can_be_told_to_leave_it(launcher: Launcher, plain: Run) -> None:
    folder = launcher.tmp / "off"
    words = msrun_of(f"--worker_num={RANKS}", SCRIPT, "out", "--kind=clip")
    done = run(launcher, folder, *words, MS_ENABLE_TFT="{TTP:0}")
    assert done.ended.code == 0, done.ended.out
    assert "nothing guards this run: MS_ENABLE_TFT says so" in done.ended.out
    assert done.results("clip") == plain.results("clip")
    lines = (folder / "logs" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert not [event for event in events if event["event"] == "RankRegistered"]


def test_half_the_ranks_go_on_where_all_stopped(launcher: Launcher) -> None:
    folder = launcher.tmp / "fewer"
    plan = Plan(
        str(folder / "witness"), "", read_words("rank=3,step=5,phase=backward", "kill").faults
    )
    words = msrun_of("--worker_num=4", "--max-restarts=0", WORKERS / "train_small.py", "--epochs=2")
    prelude = 'mkdir witness && exec "$@"'
    environ = {"MSRUN_DRILL": plan.encode()}
    done = run(launcher, folder, "sh", "-c", prelude, "sh", *words, **environ)
    assert done.ended.code == 1
    assert done.ended.out.splitlines()[-1] == "msrun --resume"
    again = run(
        launcher,
        folder / "again",
        *("sh", "-c", 'cd .. && exec "$@"', "sh", sys.executable, "-m", "msrun"),
        *("--resume", "--worker_num=2"),
        XDG_STATE_HOME=str(folder / "state"),
    )
    assert again.ended.code == 0, again.ended.out
    assert again.ended.out.count("trained to step 16") == 2
