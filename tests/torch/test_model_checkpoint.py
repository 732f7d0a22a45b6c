"""Checkpoints of real ranks under msrun: gone on from bit for bit, whenever everything was killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.checkpoints import newest
from support.jobs import WORKERS, Launcher, poll
from support.warm_python import WarmPython
from torch.distributed.checkpoint import HuggingFaceStorageReader

from msrun.commands import run
from msrun.drill.fault_options import read_words
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.storage.find import candidates
from worker_hooks.storage.manifest import Manifest, read, verify

pytestmark = [
    pytest.mark.torch,
    pytest.mark.warm,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
]
SCRIPT = WORKERS / "train_and_save.py"
LAST = 24
KILLS = int(os.environ.get("MSRUN_KILLS", "3"))
EPOCHS = 1 + KILLS // 2  # of a training that is killed so often
INTEGRATED = {"save_checkpoint_steps": 5}
COPIES = {"save_checkpoint_steps": 5, "integrated_save": False, "async_save": True}
SPLIT = {"save_checkpoint_steps": 5, "remove_redundancy": True, "async_save": True}


def train(
    msrun: Launcher, *args: object, ranks: int = 2, fault: str = "", **config: object
) -> dict[int, str]:
    """A training to its end; how it ended on each rank. Whom a fault strikes is replaced."""
    words = (f"--worker_num={ranks}", SCRIPT, "--config", json.dumps(config), *args)
    environ = {}
    if fault:
        (msrun.tmp / "traces").mkdir()
        faults = read_words(fault, "kill").faults
        environ["MSRUN_DRILL"] = DrillPlan(str(msrun.tmp / "traces"), "", faults).encode()
    ended = msrun.run(*words, **environ)
    assert ended.code == 0, ended.err
    assert ended.err.count(" back after ") == bool(fault), ended.err
    return {rank: (msrun.tmp / f"end.{rank}").read_text() for rank in range(ranks)}


def alone(python: WarmPython, folder: Path, *args: object) -> dict[int, str]:
    """How a training ends on each rank that msrun knows nothing of and that saves nothing."""
    config = json.dumps({"save_checkpoint_steps": 0})
    python.train(folder, 2, SCRIPT, "--config", config, *args)
    return {rank: (folder / f"end.{rank}").read_text() for rank in range(2)}


def kill_all(msrun: Launcher) -> None:
    """Msrun first: it must not see a rank die."""
    pids = sorted(msrun.marked())
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for job in msrun.jobs:
        job.process.wait()
        for stream in (job.process.stdout, job.process.stderr):
            stream.close()
    msrun.jobs.clear()
    poll(lambda: not msrun.marked())


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> dict[int, str]:
    return alone(warm_python, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> dict[int, str]:
    """Undisturbed, two epochs of a larger state."""
    words = ("--epochs", EPOCHS, "--fill", 8)
    return alone(warm_python, tmp_path_factory.mktemp("filled"), *words)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one epoch of two ranks has saved."""
    launcher = Launcher(tmp_path_factory.mktemp("begun"))
    try:
        train(launcher, "--epochs", 1, **SPLIT)
        return launcher.tmp / "saved"
    finally:
        launcher.end()


@pytest.mark.parametrize("config", [INTEGRATED, COPIES, SPLIT], ids=["one", "copies", "split"])
def test_a_training_goes_on_from_its_last_checkpoint(msrun, undisturbed, config):
    job = msrun.start(
        "--worker_num=2", SCRIPT, "--config", json.dumps(config), "--say", "--pause", "0.1"
    )
    saved = msrun.tmp / "saved"
    poll(lambda: (saved / "Net-2_7" / "manifest.json").exists() or job.process.poll() is not None)
    kill_all(msrun)
    path, found = newest(saved, print)
    assert path.name in {"Net-2_7", "Net-3_4"}
    shape = {shard.kind: 0 for shard in found.shards} | {"private": 2}
    for shard in found.shards:
        shape[shard.kind] += shard.kind != "private"
    assert (
        shape
        == {
            "one": {"replicated": 1, "private": 2},
            "copies": {"replicated": 1, "copy": 1, "private": 2},
            "split": {"replicated": 2, "private": 2},
        }[next(name for name, each in WAYS.items() if each is config)]
    )
    # saving goes on when a rank was replaced
    end = train(msrun, "--is_recover", 1, fault="rank=1,step=19,phase=backward", **config)
    assert f"from step {found.step}" in msrun_log(msrun)
    assert end == undisturbed
    saves = [one.step for _, one in candidates(saved) if isinstance(one, Manifest)]
    assert {20, LAST} <= {*saves}
    assert run(["checkpoints", "verify", str(saved)]) == 0
    assert dcp_reads(saved / "Net-3_8", load_all(saved / "Net-3_8"))
    assert [path.name for path in sorted(saved.iterdir()) if "_tmp" in path.name] == []


def test_a_folder_that_is_away_is_not_taken_for_one_in_which_nothing_was_saved(msrun, undisturbed):
    """A disk that is not mounted; the job goes on once it is."""
    config = json.dumps({"save_checkpoint_steps": 5})
    job = msrun.start("--worker_num=2", SCRIPT, "--config", config, "--say", "--pause", "0.1")
    saved = msrun.tmp / "saved"
    poll(lambda: (saved / "Net-2_7" / "manifest.json").exists() or job.process.poll() is not None)
    kill_all(msrun)
    saved.rename(msrun.tmp / "unmounted")
    saved.mkdir()
    refused = msrun.run("--resume")
    assert refused.code == 2
    assert f"the newest checkpoint of this run, {saved}/Net-" in refused.err
    assert "is not there, and nothing begins from an older state" in refused.err
    saved.rmdir()
    (msrun.tmp / "unmounted").rename(saved)
    ended = msrun.run("--resume")
    assert ended.code == 0, ended.err
    ends = {rank: (msrun.tmp / f"end.{rank}").read_text() for rank in range(2)}
    assert ends == undisturbed


def test_as_many_stay_as_wanted_however_often_a_training_was_resumed(msrun):
    """A run knows those before the one that it resumed: the checkpoint tells it."""
    config = {"save_checkpoint_steps": 8, "keep_checkpoint_max": 2}
    for epochs in (1, 2, 3, 4):
        train(msrun, "--epochs", epochs, "--is_recover", int(epochs > 1), **config)
    found = {path.name: one for path, one in candidates(msrun.tmp / "saved")}
    assert {*found} == {"Net-3_8", "Net-4_8"}
    assert found["Net-4_8"].lineage[0] == found["Net-3_8"].record_id
    assert found["Net-4_8"].lineage[1:] == found["Net-3_8"].lineage
    assert len(found["Net-4_8"].lineage) == 3


def test_more_ranks_find_that_a_finished_training_is_finished(msrun):
    """A rank that is new has no place in the data of its own: it is where the others are."""
    config = {"save_checkpoint_steps": 4}
    train(msrun, "--epochs", 1, ranks=1, **config)
    ends = train(msrun, "--epochs", 1, "--is_recover", 1, **config)
    assert len({*ends.values()}) == 2  # BatchNorm's statistics are each rank's own
    assert {end.split()[0] for end in ends.values()} == {"8"}
    told = (msrun.tmp / "logs" / "worker_0.log").read_text()
    assert told.count("training had come to its end already: step 8 is the last") == 1


WAYS = {"one": INTEGRATED, "copies": COPIES, "split": SPLIT}


def msrun_log(msrun: Launcher) -> str:
    return (msrun.tmp / "logs" / "worker_0.log").read_text()


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the replicated state; a cut one in its parts."""
    found: dict[str, torch.Tensor] = {}
    for shard in read(folder).shards:
        if shard.kind == "replicated":
            found |= load_file(folder / shard.file)
    return found


def dcp_reads(folder: Path, wanted: dict[str, torch.Tensor]) -> bool:
    target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return all(torch.equal(target[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on(msrun, begun, ranks):
    shutil.copytree(begun, msrun.tmp / "saved")
    end = train(msrun, "--epochs", 2, "--is_recover", 1, ranks=ranks, **SPLIT)
    assert f"from step {8}" in msrun_log(msrun)
    assert end[0].startswith("16 ")
    assert read(msrun.tmp / "saved" / "Net-2_8").world_size == ranks


def test_ranks_share_rank_0_s_clock(msrun, undisturbed):
    config = {"save_checkpoint_steps": 0, "save_checkpoint_seconds": 1, "keep_checkpoint_max": 99}
    end = train(msrun, "--pause", "0.15", async_save=True, **config)
    assert end == undisturbed
    steps = [found.step for _, found in candidates(msrun.tmp / "saved")]
    assert len(steps) >= 3 and steps[0] == LAST
    assert not list((msrun.tmp / "saved").glob(".*"))


def test_a_rank_that_cannot_write_ends_training_with_the_reason(msrun):
    """A file stands where rank 1's folder would be."""
    config = json.dumps({"save_checkpoint_steps": 4})
    job = msrun.start("--worker_num=2", "--on_failure=dump", SCRIPT, "--config", config)
    saved = msrun.tmp / "saved"
    run = job.await_state("running")["record_id"]
    folder = saved / f"Net-1_4.{run}-0_tmp"
    folder.mkdir(parents=True)
    (folder / "rank_1").touch()
    ended = job.wait()
    assert ended.code == 1
    # rank 0, which waits for the part, may be stopped before it hears of it
    own = (msrun.tmp / "logs" / "worker_1.log").read_text()
    assert "cannot be saved: " in msrun_log(msrun) + own


def test_an_exception_of_one_rank_is_saved_beside_the_checkpoints(msrun, undisturbed):
    """By both ranks' agreement: the other one waits in a collective."""
    config = {"save_checkpoint_steps": 5, "exception_save": True}
    words = ("--config", json.dumps(config), "--fail", 11, "--failing", 1)
    ended = msrun.run("--worker_num=2", "--on_failure=dump", SCRIPT, *words)
    assert ended.code == 1
    path, found = newest(msrun.tmp / "saved", print)
    assert found.step in {11, 12}  # the other rank may have updated already
    assert path.name == f"Net-2_{found.step - 8}_breakpoint"
    assert f"step {found.step}, 2 ranks, {path}" in ended.err
    assert "rank 1 raised RuntimeError: the script's own mistake" in found.reason
    assert not list((msrun.tmp / "logs").rglob("tft_saved_checkpoints*"))
    assert train(msrun, "--is_recover", 1, **config) == undisturbed
    assert f"from step {found.step}" in msrun_log(msrun)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_whatever_moment_everything_is_killed_at_the_newest_loads(msrun, filled, is_async):
    """Again and again, over one training; the moments are random, the seed is not."""
    chance = random.Random(7 + is_async)
    config = {
        "save_checkpoint_steps": 1,
        "keep_checkpoint_max": 2,
        "async_save": is_async,
        "integrated_save": False,
        "remove_redundancy": is_async,
    }
    saved = msrun.tmp / "saved"
    words = ("--worker_num=2", SCRIPT, "--config", json.dumps(config), "--fill", "8", "--say")
    epochs = ("--epochs", EPOCHS)
    known = interrupted = 0
    for _ in range(KILLS):
        before = set(saved.glob("*_tmp"))
        # where the first one was interrupted there is nothing to go on from, and msrun says so
        job = msrun.start(*words, *epochs, "--is_recover", int(known > 0), "--pause", "0.02")
        poll(lambda: set(saved.glob("*_tmp")) - before or job.process.poll() is not None, 90)  # noqa: B023
        time.sleep(chance.uniform(0, 0.3))  # the random moment itself
        kill_all(msrun)
        for path, found in candidates(saved):
            if isinstance(found, Manifest):
                assert verify(path, found) == [], path
        assert newest_step(saved) >= known
        known = newest_step(saved)
        interrupted += bool(set(saved.glob("*_tmp")) - before)
    print(f"{interrupted} of {KILLS} saves were interrupted")
    end = train(msrun, *epochs, "--is_recover", int(known > 0), "--fill", 8, **config)
    assert end == filled
    assert len([one for _, one in candidates(saved) if isinstance(one, Manifest)]) == 2


def newest_step(saved: Path) -> int:
    found = [one.step for _, one in candidates(saved) if isinstance(one, Manifest)]
    return max(found, default=0)
