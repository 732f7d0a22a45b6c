"""Whether the nodes of a job save into one folder, or each into one of its own of the same name.

A node leaves an empty file where its ranks save, and the controller's node looks for it. Nothing
else tells: two file systems may have the same path, type and number.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from agent.machine.file_thread import FileThread

LOOKS = 5
LOOK_S = 1.0  # between two looks: a network's file system may show a new file late
NOT_SHARED = (
    "{folder} is not one folder for all nodes: what {node} writes there is not seen on the first"
)
NEVER_COMPLETE = (
    "a ModelCheckpoint in {folder} cannot become complete, as the ranks of {node} write their "
    "parts to another disk: its first save fails. Give it a folder that all nodes share, or leave "
    "it out"
)


class FolderMarks:
    """What a node leaves, until the job is over."""

    def __init__(self, name: str, files: FileThread) -> None:
        """``name``: of the empty files; ``files`` makes them."""
        self._name = name
        self._files = files
        self._known: set[str] = set()  # folders of this attempt
        self._here: set[str] = set()  # and files that were made for them
        self._made: set[str] = set()

    def begin(self) -> None:
        """An attempt begins: all is told again."""
        self._known.clear()
        self._here = set()  # a thread may still be at the last one's

    def mark(self, folder: str, made: Callable[[str], None]) -> None:
        """Mark a folder; ``made`` takes the file's path, if it could be made, and was not before.

        Two folders that do not exist yet share the file in the folder above them: it is told once,
        as whoever finds it removes it.
        """
        if folder in self._known:
            return
        self._known.add(folder)

        def done(path: str | Exception) -> None:
            if isinstance(path, str) and path:  # else a save will fail as well, and say so
                self._made.add(path)
                made(path)

        here = self._here
        self._files.do(lambda: self._make(folder, here), done)

    def close(self) -> None:
        """Remove what the other node has not removed."""
        for path in self._made:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _make(self, folder: str, here: set[str]) -> str:
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)  # it is made with the first save
        path = os.path.join(folder, self._name)
        if path in here:
            return ""
        with open(path, "wb"):
            here.add(path)
            return path


def take(path: str) -> bool:
    """Whether another node's file is seen here; it is removed then."""
    if not os.path.isdir(os.path.dirname(path)):
        return False
    os.listdir(os.path.dirname(path))  # for file systems that keep in mind what was not there
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError:  # it is there, and not ours to remove
        return True
    return True
