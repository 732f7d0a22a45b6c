"""Replaces files atomically: write aside, sync, rename; then sync the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

SMALL = 64 << 20  # bytes; no list of files is longer
UNABLE = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY}
)
"""What file systems answer (CIFS, 9p, FUSE, stores of objects) that lack a call for folders."""

FILE_MODE, FOLDER_MODE = 0o644, 0o755  # at most: nobody else writes, whatever the umask is

_told: set[str] = set()


def write_atomic(
    path: Path, content: bytes, *, durable: bool = True, private: bool = False
) -> None:
    """Replace ``path`` so that a reader, even after a crash, sees the old or the new content.

    Args:
        path: the file to replace; its folder must exist.
        content: all of the new bytes.
        durable: it also survives a power cut (fsync of the file and of its folder).
        private: only the user may read it.

    Raises:
        OSError: nothing was replaced; the temporary file is gone.
    """
    aside = path.parent / f".{path.name}.{os.getpid()}_tmp"  # one writer a process

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600 if private else FILE_MODE)

    try:
        with open(aside, "wb", opener=opener) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    if durable:
        fsync_folder(path.parent)


def ensure_folder(folder: Path) -> None:
    """Make a folder and its parents, unless they exist.

    Raises:
        OSError: it cannot be made, or is something else.
    """
    try:
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        ensure_folder(folder.parent)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a file for reading; a pipe or a device would block, or never end.

    ``flags``: more of ``open``, such as ``O_NOFOLLOW``.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_small(path: Path) -> bytes:
    """The content of a regular file that holds no tensors.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
    """
    with open(open_regular(path), "rb") as file:
        if (nbytes := os.fstat(file.fileno()).st_size) > SMALL:
            raise OSError(errno.EFBIG, f"it has {nbytes} bytes", str(path))
        return file.read(SMALL)


def read_end(path: Path, most: int, flags: int = 0) -> tuple[bytes, int]:
    """The last bytes of a regular file, ``most`` at most, and how many are before them.

    Raises:
        OSError, ValueError: it cannot be read, or is no regular file; ``flags`` as above.
    """
    fd = open_regular(path, flags)
    try:
        begin = max(0, os.fstat(fd).st_size - most)
        return os.pread(fd, most, begin), begin
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Make new, renamed and removed names in a folder survive a power cut, if that is possible.

    Raises:
        OSError: they may not.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
        tell_once(folder, "sync folders: after a power cut the newest files may be missing")
    finally:
        os.close(fd)


def tell_once(folder: Path, lack: str) -> None:
    """Log once in this process what the file system of a folder cannot do, and what follows."""
    if lack not in _told:
        _told.add(lack)
        import logging  # only here: the agent's start does not need it

        logging.getLogger("msrun").warning("msrun: the file system of %s cannot %s", folder, lack)


def describe_os_error(error: OSError) -> str:
    """An error of the file system as a part of a sentence: what is wrong, and with which file."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"
