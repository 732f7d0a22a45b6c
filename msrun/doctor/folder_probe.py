"""Looks at a folder as checkpoints will use it. A program of its own: a dead file server hangs it.

    python folder_probe.py FOLDER NAME

Everything is made in ``FOLDER/NAME`` and removed at the end; where FOLDER does not exist yet, in
the nearest folder above it. Each step prints a line of JSON before it begins (``{"doing": ...}``)
and one with its result.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

MOST_BYTES = 256 << 20
MOST_S = 2.0
CHUNK = bytes(4 << 20)
SHARE = 10  # of the free space that the test writes at most: one tenth


def main(folder: str, name: str) -> None:
    """Look at ``folder``, and print."""
    is_there = os.path.isdir(folder)
    if file := file_in_the_way(folder):
        say(file=file)
        return
    folder = nearest(folder)
    place = os.path.join(folder, name)
    say(place=folder, is_there=is_there)
    room = os.statvfs(folder)
    say(free=room.f_bavail * room.f_frsize, size=room.f_blocks * room.f_frsize)
    try:
        attempt("mkdir", lambda: os.mkdir(place))
        attempt("write", lambda: write(place, room.f_bavail * room.f_frsize // SHARE))
        attempt("sync of a folder", lambda: sync_folder(place))
        attempt("rename of a folder", lambda: rename(place))
        attempt("hard link", lambda: link(place))
        attempt("flock", lambda: lock(place))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def file_in_the_way(folder: str) -> str:
    """The folder, or one above it, that is no folder; empty: there is none."""
    folder = os.path.realpath(folder)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return "" if os.path.isdir(folder) else folder


def nearest(folder: str) -> str:
    """The folder itself, or the nearest one above it that exists."""
    folder = os.path.realpath(folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def say(**facts: Any) -> None:
    """Print a line."""
    print(json.dumps(facts), flush=True)


def attempt(what: str, do: Callable[[], Any]) -> None:
    """Do one step, and print how it ended."""
    say(doing=what)
    began = time.monotonic()
    try:
        found = do()
    except OSError as error:
        say(step=what, error=error.strerror or str(error))
        if what == "mkdir":
            raise SystemExit(1) from error
    else:
        say(step=what, seconds=time.monotonic() - began, **(found or {}))


def write(place: str, most: int) -> dict[str, float]:
    """Write and sync a file that has no name any more, so that nothing can be left behind."""
    path = os.path.join(place, "speed")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(path)
        began, nbytes = time.monotonic(), 0
        while nbytes < min(MOST_BYTES, most) and time.monotonic() - began < MOST_S:
            nbytes += os.write(fd, CHUNK)
        wrote_s = time.monotonic() - began
        os.fsync(fd)
        return {"nbytes": nbytes, "wrote_s": wrote_s, "synced_s": time.monotonic() - began}
    finally:
        os.close(fd)


def sync_folder(place: str) -> None:
    """A rename is safe from a power failure only after this."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(place: str) -> None:
    """How a checkpoint becomes complete."""
    os.mkdir(os.path.join(place, "old"))
    os.rename(os.path.join(place, "old"), os.path.join(place, "new"))


def link(place: str) -> None:
    """How a checkpoint names a file twice."""
    path = os.path.join(place, "linked")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    os.link(path, f"{path}.again")


def lock(place: str) -> None:
    """How two msruns keep apart."""
    fd = os.open(os.path.join(place, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


if __name__ == "__main__":
    if len(sys.argv) > 3:  # noqa: PLR2004  only remove what a killed one has left
        shutil.rmtree(os.path.join(nearest(sys.argv[1]), sys.argv[2]), ignore_errors=True)
    else:
        main(sys.argv[1], sys.argv[2])
