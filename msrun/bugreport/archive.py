"""A ``.tar.gz`` for the user alone, written aside; of files only the last bytes are taken."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import tempfile
import time
from pathlib import Path

from agent.spec.job_spec import UsageError
from worker_hooks.contract.atomic_file import read_end


class Archive:
    """What will be in it, in memory: bounded by those who add."""

    def __init__(self, name: str) -> None:
        """``name``: of the one folder that it unpacks to."""
        self._name = name
        self._data = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._data, mode="w:gz")  # noqa: SIM115  until write()
        self._now = time.time()
        self.names: list[str] = []

    def add(self, name: str, text: str) -> None:
        """Add a file."""
        content = text.encode(errors="backslashreplace")
        entry = tarfile.TarInfo(f"{self._name}/{name}")
        entry.size, entry.mode, entry.mtime = len(content), 0o600, int(self._now)
        self._tar.addfile(entry, io.BytesIO(content))
        self.names.append(name)

    def write(self, path: Path) -> int:
        """Write the archive to a file that is not there yet; its size.

        Raises:
            UsageError: it cannot be written.
        """
        self._tar.close()
        aside = ""
        try:
            fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(fd, "wb") as file:
                file.write(self._data.getbuffer())
            os.link(aside, path)  # unlike a rename, it replaces nothing
        except FileExistsError as error:
            raise UsageError(f"{path} exists: name another file with -o") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror})") from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)
        return len(self._data.getbuffer())


def tail(path: Path, folder: Path, most: int) -> str | None:
    """The last bytes of a regular file in ``folder``; ``None``: it is none, or cannot be read.

    Neither a link nor a pipe is followed, which a script may have put there.
    """
    inside = os.path.realpath(path.parent) + "/"
    if not inside.startswith(os.path.realpath(folder) + "/"):
        return None
    try:
        data, cut = read_end(path, most, os.O_NOFOLLOW)
    except OSError:
        return None
    said = f"... {cut} bytes are left out ...\n" if cut else ""
    return said + data.decode(errors="backslashreplace")
