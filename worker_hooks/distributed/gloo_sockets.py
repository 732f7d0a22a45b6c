"""Finds the connections of gloo's process groups among all descriptors of this process.

gloo does not tell which they are. But its threads wait for them with epoll(7), and the kernel shows
what is registered there: descriptors, each with the word that was stored beside it. gloo stores the
address of the C++ object that owns the connection. Such an object begins with the address of its
class's table of virtual functions, and the dynamic linker knows that table's name, which has gloo's
namespace in it. Others that use epoll store a descriptor or a number (Python, libuv, TensorPipe) or
the address of something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator

_EPOLL = "anon_inode:[eventpoll]"
_GLOO = b"4gloo"  # a namespace in a mangled name, with its length
_ADDRESS = struct.Struct("=Q")
_FD, _WORD = 1, 5  # places in a line "tfd: 20 events: 19 data: 55f1cec6dfa0 pos:0 ..."


class _Symbol(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def gloo_sockets() -> list[int]:
    """Descriptors that gloo waits for: connections, and each group's listener. Never raises."""
    with contextlib.suppress(OSError, AttributeError):  # no such memory file; no dladdr
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            linker = ctypes.CDLL(None).dladdr
            return [
                descriptor
                for descriptor, word in _registered()
                if _is_gloos(word, memory, linker) and _is_socket(descriptor)
            ]
        finally:
            os.close(memory)
    return []


def _registered() -> Iterator[tuple[int, int]]:
    """Each descriptor in an epoll of this process, and the word stored beside it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == _EPOLL:
                with open(f"/proc/self/fdinfo/{name}") as file:
                    rows = [line.split() for line in file if line.startswith("tfd:")]
                yield from ((int(row[_FD]), int(row[_WORD], 16)) for row in rows)


def _is_gloos(word: int, memory: int, linker: ctypes._FuncPointer) -> bool:
    """Whether this is the address of an object of gloo's; ``memory`` is read as it may be freed."""
    try:
        (table,) = _ADDRESS.unpack(os.pread(memory, _ADDRESS.size, word))
    except (OSError, OverflowError, struct.error):  # no address
        return False
    found = _Symbol()
    is_known = linker(ctypes.c_void_p(table), ctypes.byref(found))
    return bool(is_known) and _GLOO in (found.name or b"")


def _is_socket(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False
