"""What runs in a rank of a launched function: its place, its streams, the function, the answer.

The answer is eight bytes of length and a pickle, written into a pipe that only the parent reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TextIO

LENGTH = 8  # bytes in front of an answer
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Ends(NamedTuple):
    """Descriptors that a rank writes into."""

    answer: int
    out: int
    err: int


class Outcome(NamedTuple):
    """What the function came to."""

    value: Any = None
    exit_code: int = 0
    error: str = ""
    traceback: str = ""
    origin: str = ""


def serve(call: Callable[[], Any], ends: Ends, environ: Mapping[str, str], parent: int) -> NoReturn:
    """Run ``call`` as a rank, answer, and end this process.

    Args:
        call: the function with its arguments.
        ends: where to write.
        environ: variables to set.
        parent: the launching process; the rank dies with it.
    """
    code = 1
    try:
        _settle(parent)
        os.environ.update(environ)
        for fd, wanted in ((os.open(os.devnull, os.O_RDONLY), 0), (ends.out, 1), (ends.err, 2)):
            os.dup2(fd, wanted)
        # a notebook's own streams belong to threads that a fork does not have
        sys.stdout, sys.stderr = _stream(1), _stream(2)
        if torch := sys.modules.get("torch"):  # this is a fork, without the parent's threads
            torch.set_num_threads(1)
        answer = _answer(call)
        code = answer.exit_code
        _write(ends.answer, _packed(answer))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)  # what the parent registered to be done at its exit is not the rank's to do


def spawned(payload: int, rank: int, ends: Ends, parent: int) -> NoReturn:
    """The same in a fresh interpreter; ``payload``: a file with the function and its arguments."""
    from multiprocessing import spawn

    content = os.pread(payload, os.fstat(payload).st_size, 0)
    preparation, environs, pickled = pickle.loads(content)  # noqa: S301  written by our parent

    def call() -> Any:
        spawn.prepare(preparation)
        function, args, kwargs = pickle.loads(pickled)  # noqa: S301  the same
        return function(*args, **kwargs)

    serve(call, ends, environs[rank], parent)


def _settle(parent: int) -> None:
    """Lead an own session, die with the parent, and take signals as a new program does."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _stream(fd: int) -> TextIO:
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _answer(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(call())
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return Outcome()
        code = error.code if isinstance(error.code, int) else 1
        return _failed(error)._replace(exit_code=code & 0xFF or 1)
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent is to know
        return _failed(error)


def _failed(error: BaseException) -> Outcome:
    first, seen = error, {id(error)}
    while (earlier := first.__cause__ or first.__context__) is not None and id(earlier) not in seen:
        first = earlier
        seen.add(id(first))  # `raise e from e` makes a circle
    return Outcome(
        exit_code=1,
        error=_line(error),
        traceback="".join(traceback.format_exception(error)),
        origin=_line(first),
    )


def _line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _packed(answer: Outcome) -> bytes:
    """Plain pickle: by multiprocessing's own, a tensor would be a file that ends with its rank."""
    try:
        return pickle.dumps(tuple(answer))
    except Exception as error:  # noqa: BLE001  what a user's object raises
        return pickle.dumps(tuple(_failed(error)))


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(len(content).to_bytes(LENGTH, "big") + content)
    while rest:
        rest = rest[os.write(fd, rest) :]
