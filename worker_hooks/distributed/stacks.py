"""The stacks of this process's threads as text, and whether its main thread waits for peers.

The listener calls this while the main thread may be stuck, so nothing here takes a lock that
another thread may hold. If the interpreter itself is stuck, there is no answer at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from worker_hooks.contract import protocol
from worker_hooks.contract.rank_lines import ENDS_ITSELF, STACK
from worker_hooks.machine.thread_frames import main_frame, thread_frames

INNERMOST = 4  # frames that are sent to the agent
LONGEST = 1500  # characters of these frames
STDERR = 2
MOST_GAP_S = 0.05  # between two looks that follow each other: those of a freeze are 0.02 s apart


class MainCall(NamedTuple):
    """One frame: ``text`` is its line of source."""

    file: str
    line: int
    function: str
    text: str


# end of the file's path, function ("": any): a main thread inside it waits for other ranks
_COLLECTIVES = (
    ("torch/distributed/", ""),
    ("torch/nn/parallel/distributed.py", ""),
    ("torch/nn/modules/_functions.py", ""),  # SyncBatchNorm
    ("torch/autograd/graph.py", "_engine_run_backward"),  # in DDP's all-reduce, or computing
    ("worker_hooks/guard/peer_wait.py", "await_peers"),  # for their votes, or for all nodes
    ("worker_hooks/distributed/kept_groups.py", "join"),  # for peers that connect
    ("worker_hooks/guard/gate.py", "wait_until"),  # for its device, which mostly waits for peers
    *((f"torch/{kind}/__init__.py", "synchronize") for kind in ("accelerator", "cuda", "xpu")),
    *((f"torch/{kind}/streams.py", "synchronize") for kind in ("cuda", "xpu")),
)
# calls in the innermost line, if that is the script's own: they are not written in Python, so they
# have no frame; the waits of threading and queues have one
_WAITS = (".wait(", "wait_tensor(", ".item(", ".cpu(", ".tolist(", "synchronize(", ".barrier(")
_STDLIB = sysconfig.get_paths()["stdlib"]
# part of a file's path, and functions: a main thread inside one talks with a person
_DEBUGGERS = (
    *("/bdb.py", "/pdb.py", "/cmd.py", "/code.py", "/getpass.py"),
    *("/IPython/", "/pudb/", "pydevd"),
)
_PROMPTS = frozenset(
    {
        *("interaction", "cmdloop", "_cmdloop", "interact", "mainloop", "prompt_for_code"),
        *("do_wait_suspend", "_do_wait_suspend", "getpass", "unix_getpass"),
    }
)
_READS_TERMINAL = re.compile(r"(?<![\w.])input\(|\bsys\.stdin\b")  # neither has a frame


def is_in_collective(calls: Sequence[MainCall]) -> bool:
    """Whether a stack, innermost call last, is in a collective or waits for its device.

    Frames of torch and of the standard library are skipped. A frame of the script inside a
    collective (a hook, a module) is work.
    """
    for depth, (file, _, function, text) in enumerate(reversed(calls)):
        path = PurePath(file).as_posix()
        for end, name in _COLLECTIVES:
            if f"/{end}" in path and name in {"", function}:
                return True
        is_known = "/torch/" in path or (path.startswith(_STDLIB) and "-packages" not in path)
        if not is_known and depth == 0 and any(wait in text for wait in _WAITS):
            return True
        if not is_known:
            return False
    return False


def is_at_prompt(calls: Sequence[MainCall]) -> bool:
    """Whether a stack, innermost call last, is in a debugger's prompt or reads the terminal."""
    if calls and _READS_TERMINAL.search(calls[-1].text):
        return True
    return any(call.function in _PROMPTS and _is_debugger(call.file) for call in calls)


def _is_debugger(file: str) -> bool:
    return any(part in file for part in _DEBUGGERS)


def waits_for_peers() -> bool:
    """Whether this process's main thread is in a collective at this moment."""
    _, calls = _stacks().get(threading.main_thread().ident or 0, ("", []))
    return is_in_collective(calls) and not is_at_prompt(calls)


def main_instruction() -> tuple[int, int] | None:
    """The instruction that the main thread is at; ``None``: there is no main thread any more."""
    frame = main_frame()
    return None if frame is None else (id(frame), frame.f_lasti)


class MainThread:
    """The main thread, as seen in repeated looks at it."""

    def __init__(self) -> None:
        self._instruction, self._looked, self._still_s = main_instruction(), time.monotonic(), 0.0

    def still_s(self) -> float:
        """How long it has been at one instruction, as far as the looks can tell.

        A process that gets no processor for a while is not still, so a look counts for a short
        while only.
        """
        now = time.monotonic()
        gap_s, self._looked = now - self._looked, now
        self._still_s += min(gap_s, MOST_GAP_S)
        if (instruction := main_instruction()) != self._instruction:
            self._instruction, self._still_s = instruction, 0.0
        return self._still_s


def words(calls: Iterable[MainCall]) -> list[str]:
    """One line for each frame, innermost last."""
    return [
        f"{file}:{line} {function}" + (f": {text}" if text else "")
        for file, line, function, text in calls
    ]


def inspect(
    rank: int, attempt: int, order: protocol.Inspect, *, is_device_busy: bool = False
) -> protocol.Stack:
    """Write all threads' stacks to the rank's log; answer with the main thread's. Never raises.

    The stack of the calling listener is left out.

    Args:
        is_device_busy: an accelerator has not done what was queued. After so long it waits in a
            collective, whatever call of the script waits for it: ``loss.item()``, ``print(loss)``.
    """
    calls = write(f"rank {rank} is inspected, as the job makes no progress")
    at_prompt = is_at_prompt(calls)
    if at_prompt:  # where the script stands tells more than where the debugger does
        calls = [call for call in calls if not _is_debugger(call.file)]
    text = "\n".join(words(calls[-INNERMOST:]))[-LONGEST:]
    return protocol.Stack(
        rank=rank,
        attempt=attempt,
        id=order.id,
        is_in_collective=is_device_busy or is_in_collective(calls),
        text=text,
        is_at_prompt=at_prompt,
    )


def write(why: str) -> list[MainCall]:
    """Write the stacks of all other threads to the rank's log; return the main thread's."""
    stacks = _stacks()
    main = threading.main_thread().ident or 0
    lines = [f"{why}; all threads:"]
    for ident, (name, calls) in stacks.items():
        lines.append(f"  thread {name}{' (main)' if ident == main else ''}, innermost last:")
        lines += [f"    {line}" for line in words(calls)]
    _write("".join(f"msrun: {STACK}{line}\n" for line in lines))
    return stacks.get(main, ("", []))[1]


def _stacks() -> dict[int, tuple[str, list[MainCall]]]:
    """The other threads' names and calls, innermost last; the main thread comes first."""
    # not enumerate(), which takes a lock
    names = {ident: thread.name for ident, thread in list(threading._active.items())}  # type: ignore[attr-defined]  # noqa: SLF001
    main = threading.main_thread().ident
    found: dict[int, tuple[str, list[MainCall]]] = {}
    for ident, frame in sorted(thread_frames().items(), key=lambda pair: pair[0] != main):
        if ident != threading.get_ident():
            summary = traceback.extract_stack(frame)
            calls = [
                MainCall(each.filename, each.lineno or 0, each.name, each.line or "")
                for each in summary
            ]
            found[ident] = names.get(ident, f"{ident}"), calls
    return found


def say(what: str) -> None:
    """Write one line to the rank's log."""
    _write(f"msrun: {what}\n")


def end_process(why: str) -> None:
    """Say why, and end this process at once: it cannot continue, and a new one can."""
    say(f"{ENDS_ITSELF}{' '.join(why.split())}")  # one line: the agent reads the last one
    os.kill(os.getpid(), signal.SIGKILL)


def _write(text: str) -> None:
    """Write to the descriptor: the stuck thread may hold the lock of ``sys.stderr``."""
    octets = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while octets:
            octets = octets[os.write(STDERR, octets) :]
