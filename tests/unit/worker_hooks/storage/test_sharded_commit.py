"""A checkpoint of replica groups: complete or refused, and linked for torch only if it is one state."""

from __future__ import annotations

import os

import pytest
from support.checkpoints import flipped
from support.sharded_states import Held, begun, columns

from worker_hooks.storage import commit, manifest
from worker_hooks.storage.manifest import read, verify
from worker_hooks.storage.one_state import IncompleteStateError

BIAS = Held((3,), b"abc")


def committed(tmp_path, groups):
    layout, made = begun(tmp_path, groups)
    return commit.commit(layout, made)


def links(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_symlink())


def sharded(bias=BIAS):
    return [{"w": columns(at, 3, 400, 8), "b": bias if at == 2 else BIAS} for at in range(3)]


def test_files_of_one_state_are_linked(tmp_path):
    folder = committed(tmp_path, sharded())
    assert links(folder) == [f"ttp_rank_{rank}-1_7.safetensors" for rank in range(3)]
    assert verify(folder, read(folder)) == []


@pytest.mark.parametrize(
    "groups",
    [
        sharded(Held((3,), b"abd")),
        [{"w": Held((2,), b"ab")}, {"w": Held((2,), b"cd")}],
        # torch knows a part by where it begins
        [{"w": Held((4,), b"abcd", (0,), (4,))}, {"w": Held((2,), b"ab", (0,), (4,))}],
    ],
)
def test_others_are_complete_without_a_link(tmp_path, groups):
    folder = committed(tmp_path, groups)
    assert links(folder) == []
    assert verify(folder, read(folder)) == []


def test_what_is_too_much_to_compare_is_not_linked(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "MOST_COMPARED", 5)
    assert links(committed(tmp_path, sharded())) == []


def test_what_was_disputed_is_not_linked(tmp_path):
    layout, made = begun(tmp_path, sharded())
    assert links(commit.commit(layout, made._replace(is_disputed=True))) == []


def test_a_hole_is_never_committed(tmp_path):
    groups = sharded()
    groups[1]["w"] = columns(2, 3, 400, 8)
    layout, made = begun(tmp_path, groups)
    with pytest.raises(IncompleteStateError, match="parts of w are missing"):
        commit.commit(layout, made)
    assert os.listdir(tmp_path) == [layout.unfinished.name]
    assert not (layout.unfinished / "manifest.json").exists()


def test_an_edited_manifest_is_said_to_hide_a_hole(tmp_path):
    folder = committed(tmp_path, sharded())
    made = read(folder)
    manifest.write(folder, made._replace(shards=made.shards[:2]))
    (flaw,) = verify(folder, read(folder))
    assert flaw == "it does not hold a whole state: no file has the state of rank 2"
    manifest.write(folder, made._replace(shards=made.shards[:2], holders=made.holders[:2]))
    (flaw,) = verify(folder, read(folder))
    assert flaw == "it does not hold a whole state: parts of w are missing"


def test_a_lost_file_and_a_flipped_bit_are_named(tmp_path):
    folder = committed(tmp_path, sharded())
    file = read(folder).shards[1].file
    flipped(folder / file)
    assert verify(folder, read(folder)) == [f"{file} was altered (its checksum differs)"]
    (folder / file).unlink()
    assert verify(folder, read(folder)) == [f"{file} is missing"]
