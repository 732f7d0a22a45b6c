"""Where the ranks of a node read at which optimizer step the next copy is due.

One rank writes it, before it goes on behind its own step: so before any peer, which needs it for
the collectives of the following steps, can have passed that one. A rank to which that does not
apply, and which is past the step already, makes no copy there and none elsewhere: the copies of the
others are no common cut then, and those before stay.

It is a file in memory that the agent holds, read by calls: memory mapped by several processes would
be refused in a copy.
"""

from __future__ import annotations

import os
import struct

_NUMBER = struct.Struct("=q")


class DuePage:
    """An open page; it is closed with its process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = self._identity()

    @staticmethod
    def create() -> DuePage:
        """A page that says nothing yet.

        Raises:
            OSError: there can be no more files.
        """
        page = DuePage(os.memfd_create("msrun-next-shadow", os.MFD_CLOEXEC))
        page.write(0)
        return page

    def read(self) -> int:
        """The optimizer step of the next copy; 0: it is not known yet.

        Raises:
            OSError: the script has closed the file.
        """
        self._check()
        found: int = _NUMBER.unpack(os.pread(self.fd, _NUMBER.size, 0))[0]
        return found

    def write(self, step: int) -> None:
        """Tell the optimizer step of the next copy.

        Raises:
            OSError: the script has closed the file.
        """
        self._check()
        os.pwrite(self.fd, _NUMBER.pack(step), 0)

    def _identity(self) -> tuple[int, int]:
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    def _check(self) -> None:
        """A script may close descriptors that it does not know, and get the number anew."""
        if self._identity() != self._file:
            raise OSError("its file was closed by the script")
