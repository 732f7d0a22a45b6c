"""A checkpoint is believed only when every byte is what its manifest says."""

from __future__ import annotations

import json
import os

import pytest
from support.checkpoints import OTHER, SHARD, flipped, saved

from worker_hooks.storage import safetensors_file
from worker_hooks.storage.manifest import (
    PRIVATE,
    QuickEncoder,
    Shard,
    decode,
    encode,
    read,
    verify,
    write,
)


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path, stale=(0,))


def changed(folder, **fields):
    """The manifest with other content."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_file(folder, file):
    """The manifest's first shard under another name, with its right size and checksum."""
    found = read(folder)
    return found._replace(shards=(found.shards[0]._replace(file=file), *found.shards[1:]))


# --- reading -----------------------------------------------------------------------------------


def test_a_manifest_is_read_as_it_was_written_and_people_can_read_it(folder):
    found = read(folder)
    assert (found.step, found.odd, found.stale_private, found.world_size) == (7, (1,), (0,), 2)
    assert [one.file for one in found.shards] == [SHARD, OTHER]
    write(folder, found)
    assert read(folder) == found
    text = (folder / "manifest.json").read_text()
    assert '\n "step": 7,\n' in text
    keys = list(json.loads(text))
    assert keys == sorted(keys)


def test_manifests_that_differ_in_their_shards_are_written_as_each_alone(folder):
    found = read(folder)._replace(reason='"shards": [] \\ "', digest='"shards": []')
    quick = QuickEncoder(found)
    one, other = found.shards
    far = one._replace(file="12", kind=PRIVATE, at=7)
    early = far._replace(file="13", is_early=True)
    for shards in ((one, other), (), (far,), (other, far, early, one)):
        text = quick(shards)
        assert text == encode(found._replace(shards=shards), is_for_people=False).decode()
        assert decode(text).shards == tuple(sorted(shards))


def none(folder):
    (folder / "manifest.json").unlink()


def torn(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])


def binary(folder):
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")


def deep(folder):
    (folder / "manifest.json").write_text("[" * 100_000)


def a_folder(folder):
    none(folder)
    (folder / "manifest.json").mkdir()


def a_pipe(folder):
    none(folder)
    os.mkfifo(folder / "manifest.json")


def linked_to(target):
    def link(folder):
        none(folder)
        (folder / "manifest.json").symlink_to(target)

    return link


def huge(folder):
    os.truncate(folder / "manifest.json", 1 << 40)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (a_pipe, "cannot be read (it is no regular file)"),
        (linked_to("/dev/zero"), "cannot be read (it is no regular file)"),
        (linked_to("/dev/tty"), "cannot be read ("),
        (linked_to("/"), "cannot be read (Is a directory)"),
        (linked_to("manifest.json"), "cannot be read (Too many levels of symbolic links)"),
        (linked_to("nowhere"), "has no manifest.json"),
        (huge, "cannot be read (it has 1099511627776 bytes)"),
        (none, "has no manifest.json: not saved by msrun, or never completed"),
        (torn, "is damaged: it is not JSON"),
        (binary, "is damaged: it is not JSON"),
        (deep, "is damaged: it is not JSON"),
        (a_folder, "cannot be read (Is a directory)"),
        (lambda folder: (folder / "manifest.json").write_text("[1]"), "was not written by msrun"),
        (lambda folder: changed(folder, format="1"), "was not written by msrun"),
        (lambda folder: changed(folder, format=True), "was not written by msrun"),
        (lambda folder: changed(folder, format=2), "has format 2, known are those up to 1"),
        (lambda folder: changed(folder, more=1), "lacks fields, or has unknown"),
        (lambda folder: changed(folder, shards=[{}]), "lacks fields, or has unknown"),
        (lambda folder: changed(folder, shards=7), "lacks fields, or has unknown"),
        (lambda folder: changed(folder, odd=7), "lacks fields, or has unknown"),
        (lambda folder: changed(folder, step=-1), "step=-1 cannot be"),
        (lambda folder: changed(folder, step="7"), "step='7' cannot be"),
        (lambda folder: changed(folder, world_size=0), "world_size=0 cannot be"),
        (lambda folder: changed(folder, saved_at=float("nan")), "saved_at=nan cannot be"),
        (lambda folder: changed(folder, reason=None), "reason=None cannot be"),
        (lambda folder: changed(folder, odd=["1"]), "odd=('1',) cannot be"),
    ],
)
def test_what_is_no_manifest_of_ours_is_one_sentence(folder, spoil, said):
    spoil(folder)
    with pytest.raises(ValueError) as raised:
        read(folder)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "field",
    [{"file": ""}, {"file": "a\0b"}, {"file": 7}, {"nbytes": -1}, {"sha256": "x"}, {"rank": None}],
)
def test_a_shard_s_fields_are_checked(folder, field):
    shards = [one._asdict() for one in read(folder).shards]
    changed(folder, shards=[shards[0] | field, shards[1]])
    with pytest.raises(ValueError, match="is damaged: Shard"):
        read(folder)


# --- verifying ---------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_no_damage_and_all_of_it_was_read(folder):
    heard = []
    assert verify(folder, read(folder), heard.append) == []
    assert sum(heard) == 8000
    assert verify(folder, read(folder), quick=True) == []


def longer(path):
    path.write_bytes(path.read_bytes() + b"x")


def shorter(path):
    os.truncate(path, 10)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def outward(path):
    away = path.parent.parent.parent / "away"
    path.rename(away)
    path.symlink_to(away)


@pytest.mark.parametrize(
    ("spoil", "said", "is_quick"),
    [
        (os.unlink, f"{SHARD} is missing", True),
        (longer, f"{SHARD} has 3001 bytes instead of 3000", True),
        (shorter, f"{SHARD} has 10 bytes instead of 3000", True),
        (pipe, f"{SHARD} is not a file", True),
        (outward, f"{SHARD} is outside the folder", True),
        (flipped, f"{SHARD} was altered (its checksum differs)", False),
    ],
)
def test_a_damaged_file_is_named(folder, spoil, said, is_quick):
    spoil(folder / SHARD)
    found = read(folder)
    assert verify(folder, found) == [said]
    assert verify(folder, found, quick=True) == ([said] if is_quick else [])


def test_all_damages_are_found(folder):
    flipped(folder / SHARD)
    flipped(folder / OTHER)
    assert len(verify(folder, read(folder))) == 2


@pytest.mark.parametrize("file", ["../away", "/etc/passwd", "rank_0/../../away", ".."])
def test_a_path_that_leaves_the_folder_is_never_opened(folder, file):
    (folder.parent / "away").write_bytes(b"x" * 3000)
    assert verify(folder, with_file(folder, file)) == [f"{file} is outside the folder"]


def test_an_absolute_path_is_refused_even_into_the_folder(folder):
    path = str(folder / SHARD)
    assert verify(folder, with_file(folder, path)) == [f"{path} is outside the folder"]


@pytest.mark.parametrize("file", [OTHER, "rank_1/./private_rank_1.safetensors"])
def test_a_file_that_is_named_twice_is_damage(folder, file):
    assert verify(folder, with_file(folder, file)) == ["its manifest names a file twice"]


def test_a_manifest_that_names_nothing_is_damage(folder):
    assert verify(folder, read(folder)._replace(shards=())) == ["its manifest names no file"]


def test_a_folder_may_be_reached_through_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert verify(tmp_path / "link", read(folder)) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_damage(folder):
    (folder / SHARD).chmod(0)
    assert verify(folder, read(folder)) == [f"{SHARD} cannot be read (Permission denied)"]


@pytest.mark.parametrize("stale", [(), (1,)])
def test_a_step_that_was_edited_is_damage_unless_the_manifest_calls_the_state_stale(folder, stale):
    head = safetensors_file.header([], {"step": "7"})
    done = safetensors_file.write(folder / OTHER, head, [], lambda _: None)
    shard = Shard(OTHER, 1, PRIVATE, done.nbytes, done.sha256)
    found = read(folder)
    found = found._replace(shards=(found.shards[0], shard), stale_private=stale)
    assert verify(folder, found) == []
    said = f"{OTHER} is of step 7, but its manifest.json says 8"
    assert verify(folder, found._replace(step=8)) == ([] if stale else [said])
