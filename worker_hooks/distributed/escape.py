"""What to do about a main thread that does not come out of a collective that was broken for it.

It is rare: once in some hundreds of broken collectives gloo (torch 2.13) forgets to wake a sender
whose socket is gone. Nothing else can be done for such a thread; its process is ended, and will be
replaced like any other that died.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from worker_hooks.distributed import stacks

FREE_S = 1.5  # for a thread whose sockets are gone; it takes milliseconds, at most groups.CONNECT
LOOK_S = 0.25  # between two looks at where it is
_USER, _SYSTEM = 11, 12  # of proc(5), counted behind the name


def insist(is_out: threading.Event) -> None:
    """End this process if its main thread stays in a collective.

    Args:
        is_out: set when the main thread is out.
    """
    before = None
    patience_s = FREE_S
    while not is_out.wait(patience_s):
        patience_s = LOOK_S
        place = _place() if stacks.waits_for_peers() else None
        if place is not None and place == before:
            stacks.write("the main thread cannot be freed from a broken collective: it is killed")
            os.kill(os.getpid(), signal.SIGKILL)
        before = place


def _place() -> tuple[int, int, int] | None:
    """The instruction that the main thread is at, and the processor time that it has had.

    One that computes, in a long backward say, or spins until its device is done, is not stuck.
    """
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)  # noqa: SLF001
    try:
        with open(f"/proc/self/task/{main.native_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    return None if frame is None else (id(frame), frame.f_lasti, ticks)
