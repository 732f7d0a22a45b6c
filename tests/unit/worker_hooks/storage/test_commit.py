"""A checkpoint is completed, and deleted, on file systems that lack calls for folders."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from support.checkpoints import NAME, saved

from worker_hooks.contract import atomic_file
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.contract.status_page import CommitRecord
from worker_hooks.storage import commit, manifest, retention
from worker_hooks.storage.find import candidates
from worker_hooks.storage.manifest import read, verify

LACKS = [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS]


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(atomic_file, "_told", set())


def without(monkeypatch, name, number):
    """``os.NAME`` fails for folders."""
    call = getattr(os, name)

    def lacking(what, *args, **kwargs):
        mode = (os.fstat if isinstance(what, int) else os.lstat)(what).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(number, os.strerror(number))
        return call(what, *args, **kwargs)

    monkeypatch.setattr(os, name, lacking)


def completed(tmp_path):
    made = read(saved(tmp_path, f"{NAME}7.r1_tmp"))
    commit.commit(DumpLayout(tmp_path / f"{NAME}7", "r1"), made)
    return made


@pytest.mark.parametrize("number", LACKS)
@pytest.mark.parametrize("lacks", ["fsync", "rename"])
def test_it_is_complete_and_said_once(tmp_path, monkeypatch, caplog, number, lacks):
    without(monkeypatch, lacks, number)
    for _ in range(2):
        completed(tmp_path)
    assert [path.name for path, _ in candidates(tmp_path)] == [f"{NAME}7_replaced_1", f"{NAME}7"]
    for path, found in candidates(tmp_path):
        assert verify(path, found) == []
    assert len(os.listdir(tmp_path)) == 2
    (said,) = [one.getMessage() for one in caplog.records]
    what = "sync" if lacks == "fsync" else "rename"
    assert said.startswith(f"msrun: the file system of {tmp_path}")
    assert f" cannot {what} folders: " in said


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("lacks", ["fsync", "rename"])
def test_any_other_trouble_is_an_error(tmp_path, monkeypatch, number, lacks):
    without(monkeypatch, lacks, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        completed(tmp_path)


def test_the_names_of_all_files_are_durable_before_the_manifest_is(tmp_path, monkeypatch):
    order, fsync_folder, write = [], commit.fsync_folder, manifest.write

    def synced(folder):
        order.append(folder.name)
        fsync_folder(folder)

    def written(*args):
        order.append("manifest")
        write(*args)

    made = read(saved(tmp_path, f"{NAME}7.r1_tmp"))
    monkeypatch.setattr(commit, "fsync_folder", synced)
    monkeypatch.setattr(manifest, "write", written)
    commit.commit(DumpLayout(tmp_path / f"{NAME}7", "r1"), made)
    assert {*order[: order.index("manifest")]} == {"rank_0", "rank_1"}
    assert order[-2:] == ["manifest", tmp_path.name]


def test_moved_file_by_file_it_has_no_manifest_before_it_is_whole(tmp_path, monkeypatch):
    without(monkeypatch, "rename", errno.ENOTSUP)
    moved, replace = [], os.replace

    def noted(source, target):
        moved.append(os.path.basename(target))
        replace(source, target)

    made = read(saved(tmp_path, f"{NAME}7.r1_tmp"))
    monkeypatch.setattr(os, "replace", noted)
    commit.move(tmp_path / f"{NAME}7.r1_tmp", tmp_path / f"{NAME}7")
    assert moved[-1] == "manifest.json"
    assert len(moved) == 1 + len(made.shards)


def test_it_can_be_deleted(tmp_path, monkeypatch):
    path = saved(tmp_path)
    without(monkeypatch, "rename", errno.EXDEV)
    retention.remove(path)
    assert os.listdir(tmp_path) == []


def test_nobody_else_may_write_whatever_the_umask_is(tmp_path):
    before = os.umask(0)
    try:
        layout = DumpLayout(tmp_path / "a" / "b" / f"{NAME}7", "r1")
        commit.make_folder(layout)
        entries, record = (), CommitRecord(7, 0, 0, 0, b"{}", b"", is_commit=True)
        shard = commit.write_private(layout.unfinished, 0, entries, record, lambda _: None)
        found = read(saved(tmp_path / "other"))._replace(shards=(shard,))
        commit.commit(layout, found)
    finally:
        os.umask(before)
    paths = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}
    assert modes == {(True, 0o755), (False, 0o644)}
    assert len(paths) == 6
