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


def create() -> int:
    """A page that says nothing yet; the caller closes it.

    Raises:
        OSError: there can be no more files.
    """
    fd = os.memfd_create("msrun-next-shadow", os.MFD_CLOEXEC)
    write(fd, 0)
    return fd


def read(fd: int) -> int:
    """The optimizer step of the next copy; 0: it is not known yet."""
    found: int = _NUMBER.unpack(os.pread(fd, _NUMBER.size, 0))[0]
    return found


def write(fd: int, step: int) -> None:
    """Tell the optimizer step of the next copy."""
    os.pwrite(fd, _NUMBER.pack(step), 0)
