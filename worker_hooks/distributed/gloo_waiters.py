"""Raises in the threads that gloo leaves asleep when a connection breaks.

A thread in a collective sleeps in a buffer of gloo's until the buffer is sent or filled. When a
connection breaks, gloo (torch 2.13) raises in the buffers that are queued for it, and forgets the
one whose bytes are on their way, half sent or half received (``Pair::signalException`` reads
neither ``rx_`` nor ``op.ubuf``). So a broadcast of a large tensor, and now and then a small one,
would sleep until the group's timeout, which is half an hour.

The kernel shows for each thread the word that it sleeps on. Such a word is a part of the condition
variable inside the buffer, and the buffer begins with the address of its class's table of virtual
functions. gloo exports that table and the function that raises; the exception is made as a compiler
would make it (Itanium C++ ABI). Where a name is missing, nothing is found and nothing is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

_WORD = struct.Struct("=Q")
_BUFFER = "N4gloo9transport3tcp13UnboundBuffer"  # as names are mangled
_TABLE = f"_ZTV{_BUFFER}E"
_RAISE = f"_Z{_BUFFER}15signalExceptionENSt15__exception_ptr13exception_ptrE"
_TABLE_HEAD = 16  # bytes of a table in front of the first function, to which an object points
_WAITED = range(80, 176)  # bytes of a buffer in which its two condition variables lie
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine, "")  # its number as a call
_ERROR = "_ZNSt13runtime_error"  # what gloo raises is one
_ERROR_SIZE = 16  # its bytes
_ERROR_HELD = "_ZNSt15__exception_ptr13exception_ptr"
_TEXT = b"Connection closed by peer: msrun has ended this collective, in which a rank was lost"


class _Library(NamedTuple):
    """gloo and the C++ library as this process has loaded them: the words and functions needed."""

    table: int  # the word that a buffer begins with
    error_kind: int  # the address of a type's description
    error_end: int  # the address of a destructor
    allocate: ctypes._FuncPointer
    begin: ctypes._FuncPointer
    make_error: ctypes._FuncPointer
    hold: ctypes._FuncPointer
    release: ctypes._FuncPointer
    signal: ctypes._FuncPointer


@functools.cache
def _library() -> _Library | None:
    """``None``: a name is missing, or these libraries are linked in another way."""
    mode = os.RTLD_NOLOAD | os.RTLD_NOW
    try:
        path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
        gloo, std = ctypes.PyDLL(str(path), mode), ctypes.PyDLL("libstdc++.so.6", mode)
        allocate = std["__cxa_allocate_exception"]
        allocate.argtypes, allocate.restype = (ctypes.c_size_t,), ctypes.c_void_p
        return _Library(
            _address(gloo, _TABLE) + _TABLE_HEAD,
            _address(std, "_ZTISt13runtime_error"),
            _address(std, f"{_ERROR}D1Ev"),
            allocate,
            _procedure(std, "__cxa_init_primary_exception", 3),
            _procedure(std, f"{_ERROR}C1EPKc", 2),
            _procedure(std, f"{_ERROR_HELD}C1EPv", 2),
            _procedure(std, f"{_ERROR_HELD}D1Ev", 1),
            _procedure(gloo, _RAISE, 2),
        )
    except (OSError, ValueError, AttributeError):
        return None


def _address(library: ctypes.PyDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


def _procedure(library: ctypes.PyDLL, name: str, arguments: int) -> ctypes._FuncPointer:
    """A function of so many addresses that returns nothing."""
    found = library[name]
    found.argtypes, found.restype = (ctypes.c_void_p,) * arguments, None
    return found


class Waiter(NamedTuple):
    """A thread that sleeps in a buffer."""

    task: str  # the thread's number
    buffer: int  # an address


def sleeping() -> frozenset[Waiter]:
    """The threads of this process that sleep in gloo's buffers. Never raises."""
    library, found = _library(), set()
    if library is not None:
        with contextlib.suppress(OSError):  # a kernel without these files: nothing is found
            for task in os.listdir("/proc/self/task"):
                if (buffer := _slept_in(task, library)) is not None:
                    found.add(Waiter(task, buffer))
    return frozenset(found)


def _slept_in(task: str, library: _Library) -> int | None:
    """The buffer in which one thread sleeps; memory is read as a file, as it may be freed."""
    try:
        # the number of the system call and its arguments, of which futex(2) has the word first
        number, word, *_ = Path(f"/proc/self/task/{task}/syscall").read_text().split()
        slept_on = int(word, 16)
        if number != _FUTEX or slept_on % 4:
            return None
        begin = slept_on - _WAITED.stop
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            octets = os.pread(memory.fileno(), len(_WAITED), begin)
    except (OSError, ValueError, OverflowError):  # it ended, runs, or waits elsewhere
        return None
    at = octets.rfind(_WORD.pack(library.table))
    return begin + at if at >= 0 and (begin + at) % _WORD.size == 0 else None


def raise_in(waiters: Iterable[Waiter]) -> None:
    """Raise a RuntimeError in these threads, see :func:`sleeping`; those that woke are left alone.

    Only for threads of which it is known that nobody else will ever wake them: the buffer of one
    that is woken in the moment of this call may be freed under it.
    """
    if (library := _library()) is None:
        return
    for task, buffer in waiters:
        if _slept_in(task, library) != buffer:
            continue
        error = library.allocate(_ERROR_SIZE)
        library.begin(error, library.error_kind, library.error_end)
        library.make_error(error, _TEXT)
        held = ctypes.c_void_p()
        library.hold(ctypes.byref(held), error)
        library.signal(buffer, ctypes.byref(held))
        library.release(ctypes.byref(held))
