"""A checkpoint that was due when a rank died is saved once it is replaced: exactly once, by all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import safe_open
from support.jobs import WORKERS, Launcher

from worker_hooks.storage.find import candidates
from worker_hooks.storage.manifest import PRIVATE, Manifest, verify

pytestmark = [pytest.mark.torch, pytest.mark.warm]
RANKS = 3
EVERY, LAST = 3, 24
FALLS = {
    "waited for": (
        [1, 3, "before part"],
        [1, 6, "in part"],
        [1, 6, "in part"],  # and again, while what was due is made up for
        [2, 9, "after part"],
        [0, 12, "before part"],
        [0, 15, "in commit"],
        [0, 18, "after commit"],  # it is there: nothing is to be made up for
    ),
    "beside training": (
        [1, 6, "beside"],
        [0, 12, "beside"],
        [2, 18, "a step later"],  # what step 18 was is gone: the next step stands in for it
    ),
}
CONFIGS = {
    "waited for": {"remove_redundancy": True},
    "beside training": {"async_save": True},
}


class Saved(NamedTuple):
    """What a training came to."""

    ends: tuple[str, ...]
    names: list[str]
    found: dict[int, Manifest]
    places: dict[int, Path]


def train(launcher: Launcher, folder: str, way: str, falls: tuple[object, ...]) -> Saved:
    config = {"save_checkpoint_steps": EVERY, "keep_checkpoint_max": 99, **CONFIGS[way]}
    cwd = launcher.tmp / folder
    cwd.mkdir()
    words = (WORKERS / "save_and_fall.py", json.dumps(falls), "--config", json.dumps(config))
    job = launcher.start(f"--worker_num={RANKS}", *words, cwd=cwd, log_dir=cwd / "logs")
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert ended.err.count(" back after ") == len(falls), ended.err
    assert len(list(cwd.glob("fell.*"))) == len(falls)
    saved = cwd / "saved"
    found = [(path, each) for path, each in candidates(saved) if isinstance(each, Manifest)]
    assert [each for path, one in found for each in verify(path, one)] == []
    assert len({one.step for _, one in found}) == len(found)
    ends = tuple(Path(cwd / f"end.{rank}").read_text() for rank in range(RANKS))
    return Saved(
        ends,
        sorted(path.name for path in saved.iterdir()),
        {one.step: one for _, one in found},
        {one.step: path for path, one in found},
    )


@pytest.fixture(scope="module")
def whole(launcher: Launcher) -> Saved:
    """Undisturbed."""
    return train(launcher, "whole", "waited for", ())


@pytest.mark.parametrize("way", FALLS)
def test_what_was_due_when_a_rank_died_is_saved(launcher: Launcher, whole: Saved, way: str) -> None:
    cut = train(launcher, way, way, FALLS[way])
    assert cut.ends == whole.ends
    steps = {*range(EVERY, LAST + 1, EVERY)}
    assert {*whole.found} == steps
    if way == "waited for":
        assert cut.names == whole.names
    else:
        assert {*cut.found} == steps - {18} | {19}
    assert len(cut.names) == len(cut.found)  # none is torn
    for step in {*cut.found} & steps:  # what is made up for is what it would have been
        mine, other = (private(saved.places[step], saved.found[step]) for saved in (cut, whole))
        assert mine == other
        assert cut.found[step].digest == whole.found[step].digest


def kept(variables: dict[str, object]) -> dict[str, object]:
    """Those that live from batch to batch.

    Which have changed since a frame was first seen differs by process. Whether what each batch sets
    anew is there depends on where a process was last at the begin or end of a loop.
    """
    return {name: each for name, each in variables.items() if name not in {"x", "y", "loss"}}


def private(folder: Path, manifest: Manifest) -> dict[str, tuple[object, ...]]:
    """What each rank had for itself: buffers, randomness, its place in the data, its variables."""
    found = {}
    for shard in manifest.shards:
        if shard.kind == PRIVATE:
            with safe_open(folder / shard.file, "np") as file:
                record = json.loads(file.metadata()["record"])
                for place in (record, record["before"]):
                    for key in place.keys() & {"frames", "-1"}:
                        place[key] = [[name, kept(a | b)] for name, a, b in place[key]]
                tensors = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
            found[shard.file] = record, tensors
    return found
