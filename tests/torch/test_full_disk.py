"""Periodic checkpoints on a disk that is full: said, and no end of a training that is well."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher

from worker_hooks.storage import manifest as manifests

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "train_and_save.py"  # 24 steps
RANKS = 2
WAYS = pytest.mark.parametrize("is_async", [False, True], ids=["waits", "async"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte, with a file on it that leaves no room."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    try:
        (place / "other").write_bytes(bytes((1 << 20) - (48 << 10)))
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> set[str]:
    job = launcher.start(f"--worker_num={RANKS}", SCRIPT)
    assert job.wait().code == 0
    return digests(job)


def digests(job: Job) -> set[str]:
    return set(re.findall(r"^end 24 (\w+)", "\n".join(job.logs().values()), re.MULTILINE))


def begun(msrun: Launcher, disk: Path, *, is_async: bool) -> Job:
    config = {"save_checkpoint_steps": 4, "keep_checkpoint_max": 9, "async_save": is_async}
    words = ("--directory", disk, "--config", json.dumps(config), "--pause=0.02", "--say")
    return msrun.start(f"--worker_num={RANKS}", SCRIPT, *words)


@WAYS
def test_training_continues_without_the_checkpoints_for_which_there_is_no_room(
    is_async: bool, msrun: Launcher, disk: Path, undisturbed: set[str]
) -> None:
    job = begun(msrun, disk, is_async=is_async)
    job.await_lines("step 10\n", RANKS)
    (disk / "other").unlink()
    ended = job.wait()
    assert ended.code == 0
    assert digests(job) == undisturbed
    said = [line for line in ended.err.splitlines() if "cannot be saved" in line]
    assert len(said) == 1, ended.err  # not again at step 8
    assert "Net-1_4 cannot be saved: " in said[0]
    assert "No space left on device" in said[0]
    assert re.search(r"\([0-9.]+ MB to write, 0\.0 MB free\); training continues", said[0])
    assert "checkpoints are saved again" in ended.err
    assert "replacing" not in ended.err
    folders = {path.name: manifests.read(path) for path in disk.iterdir()}  # nothing else is left
    assert {"Net-2_8", "Net-3_4", "Net-3_8"} <= folders.keys() <= {"Net-2_4", *folders}
    for name, about in folders.items():
        assert manifests.verify(disk / name, about) == []


@WAYS
def test_the_last_step_is_saved_elsewhere_and_no_rank_is_replaced(
    is_async: bool, msrun: Launcher, disk: Path
) -> None:
    job = begun(msrun, disk, is_async=is_async)
    ended = job.wait()
    assert ended.code == 1
    assert "No space left on device" in ended.err
    assert not [one for one in job.events() if one["event"] == "ReplaceRanks"]
    assert "a new rank would fail as well" in ended.err
    (dump,) = (job.folder / "dumps").glob("tft_saved_checkpoints-step_24")
    assert manifests.verify(dump, manifests.read(dump)) == []
