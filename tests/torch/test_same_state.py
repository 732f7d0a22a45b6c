"""What ranks hold the same is observed; nothing that is one rank's own is ever given to another."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher, poll
from support.warm_python import WarmPython

from agent.spec.job_spec import UsageError
from msrun.commands import run
from msrun.drill.fault_options import read_words
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.storage import manifest

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "train_parts.py"
STEPS = 8
KILL = "rank=1,step=5,phase=backward"


def started(
    launcher: Launcher,
    name: str,
    ranks: int,
    *words: object,
    faults: str = "",
    restarts: int = 1,
    memory: str = "auto",
) -> tuple[Job, Path]:
    folder = launcher.tmp / name
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    plan = {}
    if faults:
        struck = read_words(faults, "kill").faults
        plan = {"MSRUN_DRILL": DrillPlan(str(folder / "traces"), "", struck).encode()}
    job = launcher.start(
        f"--worker_num={ranks}",
        f"--max-restarts={restarts}",
        f"--protect-memory={memory}",
        SCRIPT,
        *words,
        log_dir=folder / "logs",
        cwd=folder,
        XDG_STATE_HOME=str(folder / "state"),
        **plan,
    )
    return job, folder


def weights(folder: Path, kind: str, ranks: int) -> list[str]:
    return [(folder / f"{kind}.{rank}.sha").read_text() for rank in range(ranks)]


def of(job: Job, event: str) -> list[dict]:
    return [dict(one) for one in job.events() if one["event"] == event]


Undisturbed = Callable[[str, int], list[str]]


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, warm_python: WarmPython) -> Undisturbed:
    """The final weights of a training of this kind that nobody disturbs, which runs once."""

    @functools.cache
    def final_weights(kind: str, ranks: int) -> list[str]:
        folder = launcher.tmp / f"{kind}-undisturbed"
        warm_python.train(folder, ranks, SCRIPT, kind, STEPS)
        return weights(folder, kind, ranks)

    return final_weights


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("tensor_parallel", 2),
        ("fsdp1", 2),
        ("fsdp1_orig", 4),
        ("fsdp1_hybrid", 4),
        ("zero", 2),
        ("zero_forgotten", 2),
    ],
)
def test_parts_of_the_ranks_are_not_mixed_up(
    launcher: Launcher, undisturbed: Undisturbed, kind: str, ranks: int
) -> None:
    expected = undisturbed(kind, ranks)
    job, folder = started(launcher, kind, ranks, kind, STEPS, "--pause=0.1", faults=KILL)
    ended = job.wait()
    assert ended.code == 0, ended
    assert weights(folder, kind, ranks) == expected
    said = ended.err
    is_copied = kind != "zero_forgotten"
    level = "partly" if is_copied else "not"
    assert said.index(f"{level} protected: ") < said.index("rank 1 was killed by SIGKILL"), said
    assert "corrupts data" not in said
    (again,) = of(job, "StartAttempt")[1:]
    if not is_copied:
        assert "that is not registered" in said[said.index("not protected: ") :].partition("\n")[0]
        assert again.get("resume") is None
    assert not of(job, "ReplaceRanks")


def test_parts_with_replicas_are_saved_by_one_rank_of_each_group(
    launcher: Launcher, undisturbed: Undisturbed
) -> None:
    expected = undisturbed("copies", 4)
    late = KILL.replace("step=5", "step=7")  # once all vote
    words = ("copies", STEPS, "--pause=0.2")
    job, folder = started(launcher, "copies", 4, *words, faults=late)
    ended = job.wait()
    assert ended.code == 0, ended
    assert weights(folder, "copies", 4) == expected
    said = ended.err
    told = "partly protected: the state is cut into 2 parts, each held by a replica group (ranks 0, 2; "
    assert said.index(told) < said.index("rank 1 was killed by SIGKILL"), said
    (again,) = of(job, "StartAttempt")[1:]
    assert again["resume"]
    made = manifest.read(Path(again["resume"]))
    assert made.holders == ((0, 2), (1, 3))
    assert {one.rank for one in made.shards if one.variant == 1 and one.kind == "replicated"} == {3}
    assert not of(job, "ReplaceRanks")


def test_a_checkpoint_has_the_part_of_every_rank(
    launcher: Launcher, undisturbed: Undisturbed
) -> None:
    expected = undisturbed("tensor_parallel", 2)
    words = ("tensor_parallel", STEPS, "--every=3")
    job, folder = started(launcher, "periodic", 2, *words, faults=KILL, memory="off")
    ended = job.wait()
    assert ended.code == 0, ended
    assert weights(folder, "tensor_parallel", 2) == expected
    assert of(job, "StartAttempt")[-1]["resume"] is None
    (found,) = of(job, "CheckpointFound")
    assert found["step"] == 3
    newest = folder / f"periodic/parts-1_{STEPS}"
    made = manifest.read(newest)
    assert made.holders == ((0,), (1,))
    assert manifest.verify(newest, made) == []
    assert run(["checkpoints", "verify", str(newest)]) == 0
    with pytest.raises(UsageError, match="are no parts of one"):
        run(["checkpoints", "merge", str(newest)])
    (newest / next(one.file for one in made.shards if one.variant == 1)).unlink()
    assert run(["checkpoints", "verify", str(newest)]) != 0


@pytest.mark.parametrize("kind", ["fsdp1_hybrid", "fsdp1_orig"])
def test_what_cannot_be_read_within_a_step_is_saved_behind_it(
    kind: str, launcher: Launcher, undisturbed: Undisturbed
) -> None:
    expected = undisturbed(kind, 4)
    job, folder = started(launcher, f"{kind}-left", 4, kind, STEPS, "--pause=0.2")
    job.await_lines("step 2\n", 4)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 0
    (dump,) = (folder / "checkpoints").iterdir()
    assert manifest.verify(dump, manifest.read(dump)) == []
    again = launcher.start(
        "--resume", log_dir=folder / "logs", cwd=folder, XDG_STATE_HOME=str(folder / "state")
    )
    ended = again.wait()
    assert ended.code == 0, ended
    assert weights(folder, kind, 4) == expected


def test_a_graceful_exit_saves_the_part_of_every_rank(
    launcher: Launcher, undisturbed: Undisturbed
) -> None:
    expected = undisturbed("copies", 4)
    job, folder = started(launcher, "left", 4, "copies", STEPS, "--pause=0.2")
    job.await_lines("step 2\n", 4)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 0
    (dump,) = (folder / "checkpoints").iterdir()
    assert {frozenset(each) for each in manifest.read(dump).holders} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    assert not list(dump.glob("*.safetensors"))  # one name, two contents: nobody may mix them
    with pytest.raises(UsageError, match=r"no parts of one: .* is not the same in all groups"):
        run(["checkpoints", "merge", str(dump)])
    again = launcher.start(
        "--resume", log_dir=folder / "logs", cwd=folder, XDG_STATE_HOME=str(folder / "state")
    )
    ended = again.wait()
    assert ended.code == 0, ended
    assert weights(folder, "copies", 4) == expected


def test_replicas_that_drift_apart_without_a_majority_end_the_job(launcher: Launcher) -> None:
    words = ("drifts", STEPS, "--at=4", "--pause=0.1")
    job, folder = started(launcher, "drift", 3, *words, faults="rank=2,step=6,phase=backward")
    ended = job.wait()
    assert ended.code == 1, ended
    assert "there is no majority (rank 0 against rank 1)" in ended.err
    assert len(of(job, "StartAttempt")) == 1
    (dump,) = (folder / "checkpoints").iterdir()
    made = manifest.read(dump)
    assert made.is_disputed
    assert made.holders == ((0,), (1,))
    again = launcher.start(
        "--resume", log_dir=folder / "logs", cwd=folder, XDG_STATE_HOME=str(folder / "state")
    )
    refused = again.wait()
    assert refused.code != 0
    assert "the replicas disagreed without a majority" in refused.err
    assert not list(folder.glob("drifts.*.sha"))


@pytest.mark.parametrize("words", [(), ("epochs",)])
def test_a_training_whose_steps_nobody_counts_is_said_to_be_lost(
    launcher: Launcher, words: tuple[str, ...]
) -> None:
    job = launcher.start("--worker_num=2", WORKERS / "counts_late.py", *words)
    poll(lambda: job.status().get("protection", {}).get("level") == "not protected")
    ended = job.wait()
    assert ended.code == 0, ended
    assert (
        ended.err.count("the script has not said where a step ends: loop over state.batches") == 1
    )
    assert "not every rank has registered" not in ended.err


def test_a_training_that_counts_its_steps_late_is_protected_from_then_on(
    launcher: Launcher,
) -> None:
    ended = launcher.start("--worker_num=2", WORKERS / "counts_late.py", "late").wait()
    assert ended.code == 0, ended
    said = ended.err
    assert said.index("not protected: the script has not said") < said.index("msrun: protected: ")


def test_a_counter_of_the_script_undoes_the_replacement(launcher: Launcher) -> None:
    job, _ = started(launcher, "rate", 3, "rate_by_hand", STEPS, faults=KILL)
    ended = job.wait()
    assert ended.code == 0, ended
    assert "after the replacement of rank 1 optimizer.groups.0.lr differs" in ended.err
    assert len(of(job, "ReplaceRanks")) == 1
    told = "".join(job.logs().values())
    assert re.search(r"the learning rate was 0\.0\d+ at the checkpoint and is 0\.1 at step ", told)


@pytest.mark.parametrize("kind", ["fsdp1_inside", "fsdp2_inside", "tp_inside"])
def test_what_is_sharded_within_train_is_said_before_a_death(
    launcher: Launcher, undisturbed: Undisturbed, kind: str
) -> None:
    words = (kind, STEPS, "--die=3", "--every=2")
    job, folder = started(launcher, kind, 2, *words)
    ended = job.wait()
    said = ended.err
    assert said.index("not protected: model.0.weight is replaced in the model") < said.index("SIGK")
    assert not of(job, "ReplaceRanks")
    assert "resume" not in (again := of(job, "StartAttempt")[-1]) or again["resume"] is None
    assert ended.code == 0, ended
    trained = {"fsdp1_inside": "fsdp1"}.get(kind, kind)  # the same in the same place
    assert weights(folder, kind, 2) == undisturbed(trained, 2)


def test_what_is_sharded_before_is_taken_but_for_odd_optimizers(
    launcher: Launcher, warm_python: WarmPython
) -> None:
    for said in warm_python.train(launcher.tmp / "before", 2, SCRIPT, "refused", 1):
        told = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
        assert told.keys().isdisjoint({"fsdp2", "hsdp", "tp"})
        assert told["zero"].startswith(
            "optimizer cannot be saved: ZeroRedundancyOptimizer with overlap"
        )
