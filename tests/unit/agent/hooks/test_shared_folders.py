"""A node's mark in the folder where its ranks save: made once an attempt, found, and removed."""

from __future__ import annotations

import os
from pathlib import Path

from agent.hooks.shared_folders import FolderMarks, take
from agent.machine.file_thread import FileThread


class AtOnce(FileThread):
    """Does the work where it is ordered."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def do(self, job, done):
        try:
            result = job()
        except OSError as error:
            result = error
        done(result)


def test_a_mark_is_found_and_removed(tmp_path: Path) -> None:
    marks, made = FolderMarks(".mark", AtOnce()), []
    marks.mark(str(tmp_path), made.append)
    marks.mark(str(tmp_path), made.append)
    assert made == [str(tmp_path / ".mark")]
    assert take(made[0])
    assert not take(made[0])
    marks.begin()
    marks.mark(str(tmp_path), made.append)
    assert len(made) == 2
    marks.close()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_yet_is_marked_above_and_not_made(tmp_path: Path) -> None:
    marks, made = FolderMarks(".mark", AtOnce()), []
    marks.mark(str(tmp_path / "a/b"), made.append)
    assert made == [str(tmp_path / ".mark")]
    assert os.listdir(tmp_path) == [".mark"]


def test_folders_that_are_not_there_yet_are_looked_for_once(tmp_path: Path) -> None:
    """The second look found that the first one had removed the file: no shared folder, it said."""
    marks, made = FolderMarks(".mark", AtOnce()), []
    for place in ("dumps", "saved"):
        marks.mark(str(tmp_path / place), made.append)
    assert made == [str(tmp_path / ".mark")]
    assert all(take(path) for path in made)
    marks.begin()
    marks.mark(str(tmp_path / "saved"), made.append)
    assert made == [str(tmp_path / ".mark")] * 2
    assert take(made[1])


def test_where_nothing_can_be_written_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / ".mark").mkdir()
    made: list[str] = []
    FolderMarks(".mark", AtOnce()).mark(str(tmp_path), made.append)
    assert made == []
    assert not take(str(tmp_path / "gone/.mark"))
