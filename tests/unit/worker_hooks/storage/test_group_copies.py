"""A checkpoint of replica groups in which each rank wrote all it holds: any one file of a group is enough."""

from __future__ import annotations

import shutil

import pytest
from support.checkpoints import flipped
from support.sharded_states import Held, begun, columns

from worker_hooks.storage import commit
from worker_hooks.storage.find import search
from worker_hooks.storage.manifest import COPY, read, sound_model, verify

HOLDERS = ((0, 2), (1, 3))
LINE = "ttp_rank_{}-1_7.safetensors"


def file_of(rank):
    return f"rank_{rank}/ttp_rank_{rank}-1_7.safetensors"


@pytest.fixture
def folder(tmp_path):
    """Ranks 2 and 3 have copies of what ranks 0 and 1 wrote."""
    groups = [{"w": columns(at, 2, 400, 8), "b": Held((3,), b"abc")} for at in range(2)]
    layout, made = begun(tmp_path, groups)
    copies = []
    for shard in made.shards:
        rank = shard.rank + 2
        path = layout.unfinished / file_of(rank)
        path.parent.mkdir()
        shutil.copy(layout.unfinished / shard.file, path)
        copies.append(shard._replace(file=file_of(rank), rank=rank, kind=COPY))
    made = made._replace(shards=(*made.shards, *copies), holders=HOLDERS, world_size=4)
    return commit.commit(layout, made)


def resumed_from(folder):
    """The files that a resume reads, and what it says."""
    found = search((folder,))
    files = [] if found.newest is None else [one.file for one in found.newest.manifest.shards]
    return files, [remark.removeprefix(f"{folder} ") for remark in found.remarks]


def test_whole(folder):
    assert resumed_from(folder)[1] == []
    assert [one.rank for one in sound_model(folder, read(folder)).shards] == [0, 1]


@pytest.mark.parametrize("lost", [[0], [1], [0, 1], [2, 1], [0, 3], [2, 3]])
@pytest.mark.parametrize("is_removed", [True, False])
def test_one_file_of_each_group_is_enough(folder, lost, is_removed):
    for rank in lost:
        (folder / file_of(rank)).unlink() if is_removed else flipped(folder / file_of(rank))
    files, remarks = resumed_from(folder)
    assert sorted(files) == sorted(file_of(n if n not in lost else (n + 2) % 4) for n in (0, 1))
    what = "is missing" if is_removed else "was altered (its checksum differs)"
    said = "; ".join(f"{file_of(rank)} {what}" for rank in sorted(lost))
    assert remarks == [f"is whole without damaged files that others equal: {said}"]


@pytest.mark.parametrize("lost", [[0, 2], [1, 3, 0]])
def test_without_a_file_of_a_group_there_is_none(folder, lost):
    for rank in lost:
        (folder / file_of(rank)).unlink()
    files, (remark,) = resumed_from(folder)
    assert files == []
    assert remark.startswith("is skipped: ")
    assert sound_model(folder, read(folder)) is None


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_file_of_the_group_may_be_copied_to_the_place(folder, is_removed):
    (folder / file_of(0)).unlink() if is_removed else flipped(folder / file_of(0))
    shutil.copy(folder / file_of(2), folder / file_of(0))
    assert verify(folder, read(folder)) == []
    assert resumed_from(folder)[1] == []


def test_the_file_of_another_group_is_named(folder):
    shutil.copy(folder / file_of(1), folder / file_of(0))
    flaw = f"{file_of(0)} is a copy of {file_of(1)}, which never had the same content"
    assert verify(folder, read(folder)) == [flaw]
    assert resumed_from(folder)[0] == [file_of(1), file_of(2)]
