"""A keeper: a sleeping process that shares all of this process's memory, and nothing else.

The kernel frees memory when the last process that uses it has ended. So what lies in the memory of
a rank that is killed with SIGKILL is there until its keeper is killed, too, and can be read in
``/proc/<keeper>/mem``. It costs nothing while the rank lives: nothing is copied, no page is written
twice, and the keeper never runs. What the kernel itself takes back at a lack of memory is gone: it
kills all processes that share it.

The keeper has no stack of Python's and no signal handler. It runs a few bytes of machine code that
close its descriptors, so that peers see the rank's connections end; leave the rank's session and
group, whose processes are killed with the rank; give it a name; and sleep. All signals but SIGKILL
and SIGSTOP are blocked. As its end signals nothing, ``os.wait()`` in the script does not know it.

Two descriptors stay. One is the agent's process: as long as that lives it reads the memory, and
frees it. If it is killed, ranks that are left save by themselves, and may need what the dead one
had. The other one is the forkserver's, which lives until they have: then the keeper ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from worker_hooks.machine.kept_memory import KEEPER

_CLONE_VM = 0x100  # linux/sched.h
_PAGE = mmap.PAGESIZE
_LAST_FD = 0xFFFFFFFF
_FOR_EVER = 0xFFFFFFFFFFFFFFFF  # -1
_AT = 64  # where in its data the descriptor is that it waits for
_PR_SET_NAME, _PR_SET_PTRACER = 15, 0x59616D61  # linux/prctl.h; the latter for Yama, if it is there
_MACHINE = "x86_64"
# of x86-64: asm/unistd_64.h
_POLL, _EXIT, _SETSID, _PRCTL, _CLOSE_RANGE = 7, 60, 112, 157, 436
_POLLFD = struct.Struct("<ihh")  # poll.h: descriptor, events, those that have come
_ENDBR64 = b"\xf3\x0f\x1e\xfa"  # where a call may land, if the processor asks for that
_ARGUMENTS = (b"\x48\xbf", b"\x48\xbe", b"\x48\xba")  # mov rdi / rsi / rdx, 64 bits
_NUMBER, _SYSCALL = b"\xb8", b"\x0f\x05"  # mov eax, 32 bits; syscall


def start_keeper(agent: int, beyond: int = 0) -> int:
    """Start one; its process id.

    Args:
        agent: the process id of who reads the memory.
        beyond: of who lives until all ranks have saved, if the agent is killed; 0: nobody does.

    Raises:
        OSError: the kernel, or its policy, does not allow it.
    """
    if platform.machine() != _MACHINE:
        raise OSError(f"there is no keeper for processors of type {platform.machine()}")
    memory = mmap.mmap(-1, 3 * _PAGE)  # its code; its data; its stack, which grows down
    room = (ctypes.c_char * len(memory)).from_buffer(memory)
    _kept.append((memory, room))  # as long as this process lives
    code = ctypes.addressof(room)
    name, stack = code + _PAGE, code + 3 * _PAGE
    memory[_PAGE : _PAGE + len(KEEPER)] = KEEPER.encode()
    watched = list[int]()
    try:
        watched.append(os.pidfd_open(agent))
        if beyond:
            with suppress(ProcessLookupError):  # it has ended
                watched.append(os.pidfd_open(beyond))
        waits = b"".join(_POLLFD.pack(each, select.POLLIN, 0) for each in watched)
        memory[_PAGE + _AT : _PAGE + _AT + len(waits)] = waits
        text = _code(name, name + _AT, watched)
        memory[: len(text)] = text
        return _clone(code, stack)
    finally:
        for each in watched:
            os.close(each)  # here


def _clone(code: int, stack: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.mprotect(ctypes.c_void_p(code), _PAGE, mmap.PROT_READ | mmap.PROT_EXEC))
    libc.clone.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    was = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return _checked(libc.clone(code, stack, _CLONE_VM, None))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, was)


_kept: list[object] = []


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _code(name: int, waits: int, watched: Sequence[int]) -> bytes:
    """What the keeper runs; it needs no stack, and never returns."""
    edges = [-1, *sorted(watched), _LAST_FD + 1]
    close = (
        _call(_CLOSE_RANGE, low + 1, high - 1, 0) for low, high in pairwise(edges) if high > low + 1
    )
    named = _call(_SETSID) + _call(_PRCTL, _PR_SET_NAME, name)
    awaited = (
        _call(_POLL, waits + _POLLFD.size * index, 1, _FOR_EVER) for index in range(len(watched))
    )
    # the agent is gone: from now on its peers read
    after = _call(_PRCTL, _PR_SET_PTRACER, _FOR_EVER).join(awaited)
    return _ENDBR64 + b"".join(close) + named + after + _call(_EXIT, 0)


def _call(number: int, *arguments: int) -> bytes:
    loads = zip(_ARGUMENTS, arguments, strict=False)
    given = b"".join(load + value.to_bytes(8, "little") for load, value in loads)
    return given + _NUMBER + number.to_bytes(4, "little") + _SYSCALL
