"""Threads that are not Python's: a copy lacks them; a library that waits for its own would hang.

Only those are let through of which it is known what follows: those of gloo are made again with its
groups; pools of OpenBLAS, Arrow (pyarrow, by which ``datasets`` reads) and torch (pthreadpool) make
new threads in a child, as all three handle forks; jemalloc's only give memory back, and begin anew;
tokenizers of Hugging Face do without theirs, unless the script insists; those of OpenMP have been
ended before. Pools name no threads, so a thread is known by the
libraries that its stack returns to; torch has other threads, so those of its pool are counted, too.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

KNOWN = ("gloo_tcp_loop", "pt_gloo_runloop", "jemalloc_bg_thd")
OPENBLAS, ARROW, TOKENIZERS, TORCH = "openblas", "libarrow", "tokenizers", "libtorch_cpu"
_POOLS = (OPENBLAS, ARROW, TOKENIZERS, TORCH)
_SERIAL = "TOKENIZERS_PARALLELISM"  # Hugging Face's: false, and a tokenizer uses one thread
_OFF = frozenset({"", "off", "false", "f", "no", "n", "0"})  # as that library reads it
_ENDING_S, _LOOK_S = 0.1, 0.005  # threads of OpenMP that were told to end, others that compute
_STACK_BYTES = 16 << 10  # that are looked at: a thread of a pool that waits has few frames
_WORD = ctypes.sizeof(ctypes.c_void_p)


class _Code(NamedTuple):
    """The executable parts of the memory, and all that is mapped."""

    begins: tuple[int, ...]
    parts: tuple[tuple[int, int, str], ...]  # begin, end, file: in order
    mapped: tuple[tuple[int, int], ...]


def foreign(
    threads: Mapping[int, str],
    python: Collection[int],
    main: int,
    pools: Mapping[int, str],
    of_torch: int,
) -> tuple[str, ...]:
    """The names of threads that are not known to be harmless. Pure.

    Args:
        threads: all of the process: their names by their kernel ids.
        pools: whose pool a thread without a name of its own is of.
        of_torch: at most so many are of torch's pool.
    """
    unnamed = {threads.get(main, ""), *(threads.get(each, "") for each in python), "python"}
    rest = {
        number: name
        for number, name in threads.items()
        if number != main and number not in python and name not in KNOWN
    }
    plain = [each for each, name in rest.items() if name in unnamed or name.startswith("python")]
    named = [name for number, name in rest.items() if number not in plain]
    owned = [pools.get(number, "") for number in plain]
    is_more = owned.count(TORCH) > of_torch or any(each not in _POOLS for each in owned)
    return (*dict.fromkeys(named), *([rest[plain[0]]] if is_more else ()))


@contextlib.contextmanager
def serial_tokenizers() -> Iterator[None]:
    """While a process forks: its copies use no threads for tokenizers, and need not be told so."""
    here = os.getpid()
    if TOKENIZERS not in sys.modules or _SERIAL in os.environ:
        yield
        return
    os.environ[_SERIAL] = "false"
    try:
        yield
    finally:
        if os.getpid() == here:
            del os.environ[_SERIAL]


def why_not() -> str:
    """Why a copy would lack a thread of a library; empty: none that matters."""
    until = time.monotonic() + _ENDING_S
    python = {each.native_id for each in threading.enumerate() if each.native_id}
    main = os.getpid()
    of_torch = max(int(sys.modules["torch"].get_num_threads()) - 1, 0)
    while True:
        threads = _threads()
        others = [each for each in threads if each != main and each not in python]
        pools = _pools(others)
        if os.environ.get(_SERIAL, "").lower() not in _OFF:  # it would wait for them
            pools = {each: pool for each, pool in pools.items() if pool != TOKENIZERS}
        found = foreign(threads, python, main, pools, of_torch)
        if not found:
            return ""
        if time.monotonic() > until:
            return (
                f"a library has threads that a copy of the process would lack: {', '.join(found)}"
            )
        time.sleep(_LOOK_S)


def _threads() -> dict[int, str]:
    found = {}
    for number in os.listdir("/proc/self/task"):
        path = f"/proc/self/task/{number}/comm"
        with contextlib.suppress(OSError), open(path) as file:  # it has ended
            found[int(number)] = file.read().rstrip("\n")
    return found


def _pools(threads: Collection[int]) -> dict[int, str]:
    """Whose pools these threads are of, as far as they wait just now."""
    code = _code() if threads else _Code((), (), ())
    return {each: _pool(each, code) for each in threads}


def _pool(thread: int, code: _Code) -> str:
    """Whose pool a thread is of; empty: that is not known, as while it runs."""
    try:
        with open(f"/proc/self/task/{thread}/syscall") as file:
            words = file.read().split()
    except OSError:  # it has ended, or the kernel does not tell
        return ""
    if len(words) < 3:  # noqa: PLR2004  "running"
        return ""
    at = int(words[-2], 16)  # of its stack
    end = next((end for begin, end in code.mapped if begin <= at < end), 0)
    for address in range(at, min(end, at + _STACK_BYTES) - _WORD + 1, _WORD):
        word = ctypes.c_size_t.from_address(address).value
        place = bisect.bisect_right(code.begins, word) - 1
        if place >= 0 and word < code.parts[place][1]:
            for pool in _POOLS:
                if pool in code.parts[place][2]:
                    return pool
    return ""


def _code() -> _Code:
    with open("/proc/self/maps") as maps:
        rows = [line.split(maxsplit=5) for line in maps]
    spans = [tuple(int(word, 16) for word in row[0].split("-")) for row in rows]
    parts = tuple(
        (begin, end, os.path.basename(row[5]) if len(row) > 5 else "")  # noqa: PLR2004  has a file
        for (begin, end), row in zip(spans, rows, strict=True)
        if "x" in row[1]
    )
    mapped = tuple((begin, end) for begin, end in spans)
    return _Code(tuple(begin for begin, _, _ in parts), parts, mapped)
