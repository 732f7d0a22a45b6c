"""``group_info.pb``: MindSpore's bytes, in each checkpoint of replica groups, for people to read."""

from __future__ import annotations

import os
import stat

import pytest
from support.sharded_states import begun, columns

from worker_hooks import restore_group_info_list
from worker_hooks.contract import atomic_file
from worker_hooks.storage import commit, group_info
from worker_hooks.storage.find import search
from worker_hooks.storage.manifest import read, verify

HOLDERS = ((0, 4, 300), (1,))


def groups():
    return [{"w": columns(at, 2, 40, 8)} for at in range(2)]


def committed(tmp_path, **changes):
    layout, made = begun(tmp_path, groups())
    return commit.commit(layout, made._replace(holders=HOLDERS, **changes))


def info_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pb"))


def test_bytes_are_protobufs():
    assert group_info.encode([0, 4, 300]) == bytes([18, 7, 8, 0, 8, 4, 8, 0xAC, 2])


@pytest.mark.parametrize(
    ("content", "ranks"),
    [
        (bytes([18, 4, 8, 0, 8, 4]), [0, 4]),
        (bytes([18, 4, 10, 2, 0, 4]), [0, 4]),  # packed
        (bytes([10, 8, 10, 2, 100, 112, 18, 2, 8, 9, 18, 2, 8, 7]), [7]),  # a named group before
        (bytes([18, 2, 8, 1, 18, 2, 8, 2]), [1, 2]),  # a message in two parts
        (bytes([24, 1, 18, 4, 16, 5, 8, 1]), [1]),  # fields of later versions
    ],
)
def test_what_protobuf_may_write_is_read(tmp_path, content, ranks):
    (tmp_path / "file").write_bytes(content)
    assert restore_group_info_list(str(tmp_path / "file")) == ranks


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "has no list of ranks"),
        (bytes([18, 0]), "has no list of ranks"),
        (bytes([10, 4, 10, 2, 100, 112]), "has no list of ranks"),
        (bytes([18, 9, 8, 0]), "is damaged, or no group_info.pb"),
        (bytes([18]), "is damaged"),
        (bytes([16, 3]), "is damaged"),
        (bytes([18, 1, 8]), "is damaged"),
        (b"\xff" * 20, "is damaged"),
        (b"PK\x03\x04 no such thing", "is damaged"),
    ],
)
def test_what_has_no_ranks_is_refused(tmp_path, content, text):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=text):
        restore_group_info_list(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["nothing", "", "a\0b"])
def test_what_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"cannot be read|null byte"):
        restore_group_info_list(str(tmp_path / name))


@pytest.mark.parametrize("path", [None, b"x", 3])
def test_a_path_is_text(path):
    with pytest.raises(TypeError, match="group_info_file_name must be a str, not"):
        restore_group_info_list(path)


def test_each_rank_of_a_group_has_its_list(tmp_path):
    before = os.umask(0)
    try:
        folder = committed(tmp_path)
    finally:
        os.umask(before)
    assert info_files(folder) == [f"rank_{rank}/group_info.pb" for rank in (0, 1, 300, 4)]
    for ranks in HOLDERS:
        for rank in ranks:
            path = folder / f"rank_{rank}/group_info.pb"
            assert restore_group_info_list(str(path)) == list(ranks)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert verify(folder, read(folder)) == []


def test_ranks_that_share_a_part_with_others_each_are_alike_with_none(tmp_path):
    group_info.write_all(tmp_path, ((0, 1, 4), (0, 2, 4), (1, 3), (2, 3)))
    told = [
        restore_group_info_list(str(tmp_path / f"rank_{rank}/group_info.pb")) for rank in range(5)
    ]
    assert told == [[0, 4], [1], [2], [3], [0, 4]]


def test_nothing_trusts_it(tmp_path):
    folder = committed(tmp_path)
    (folder / "rank_0/group_info.pb").write_bytes(group_info.encode([1]))
    (folder / "rank_4/group_info.pb").unlink()
    assert verify(folder, read(folder)) == []
    assert search((tmp_path,)).newest.manifest == read(folder)


def test_there_is_none_where_nobody_should_restore(tmp_path):
    assert info_files(committed(tmp_path, is_disputed=True)) == []


def test_without_room_for_it_the_checkpoint_is_complete(tmp_path, monkeypatch):
    write = atomic_file.write_atomic

    def failing(path, *args, **kwargs):
        if path.name == "group_info.pb":
            raise OSError(28, "No space left on device")
        write(path, *args, **kwargs)

    monkeypatch.setattr(group_info, "write_atomic", failing)
    folder = committed(tmp_path)
    assert info_files(folder) == []
    assert verify(folder, read(folder)) == []


@pytest.mark.parametrize(
    ("variable", "written"),
    [
        ("group_info.pb", "rank_3/group_info.pb"),
        ("deep/down/info.pb", "deep/down/rank_3/info.pb"),
        ("rank_3/group_info.pb", "rank_3/group_info.pb"),
        ("rank_3/of/it.pb", "rank_3/of/it.pb"),
        ("rank_33/group_info.pb", "rank_33/rank_3/group_info.pb"),
    ],
)
def test_a_rank_writes_it_where_mindspores_variable_says(tmp_path, variable, written):
    group_info.publish(str(tmp_path / variable), 3, [3, 7])
    group_info.publish(str(tmp_path / variable), 3, [1, 3, 7])
    (found,) = (each for each in tmp_path.rglob("*") if each.is_file())
    assert found == tmp_path / written
    assert restore_group_info_list(str(found)) == [1, 3, 7]
    assert found.stat().st_mode & 0o777 == 0o600
