"""The process that writes checkpoints beside training, with ``async_save``.

Standard library only, so it is there in a moment. It is told orders, and tells what became of
them, in lines of JSON. Its work gives way to everything else on the machine, and ends with the
process it works for: what that leaves unfinished, nobody trusts.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from worker_hooks.checkpoint.finalize import finalize
from worker_hooks.checkpoint.rank_writer import Advance, carry_out
from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder, decoded
from worker_hooks.storage.durable_file import ThrottledProgress

ORDER, ROOM = "order", "room"
FOLDER, WARNINGS, ERROR = "folder", "warnings", "error"
SIGN_S = 1.0
_PIECE = 4 << 20  # bytes
_NICE = 10  # a tenth of what training gets, where they meet on a core
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Mapped:
    """What an order is about, in shared memory: the state, its buffers, the private state."""

    def __init__(self, order: SaveOrder, memory: memoryview) -> None:
        self._share = order.share
        self._own = order.own
        self._memory = memory

    def state(self) -> Iterator[tuple[memoryview, bool]]:
        """The state in pieces."""
        at = 0
        for count, is_mine in self._share.spans if self._share is not None else ():
            for start in range(at, at + count, _PIECE):
                yield self._memory[start : min(start + _PIECE, at + count)], is_mine
            at += count

    def buffers(self) -> Sequence[memoryview]:
        """The share's last bytes."""
        if self._share is None:
            return ()
        start = self._share.nbytes
        return [self._memory[start : start + self._share.buffers]]

    def payload(self) -> bytes:
        """The private state."""
        start = 0 if self._share is None else self._share.nbytes + self._share.buffers
        return bytes(self._memory[start : start + (0 if self._own is None else self._own.nbytes)])


def main() -> None:
    """Work until the other end is closed. Arguments: the memory's descriptor, and for whom."""
    fd, parent = map(int, sys.argv[1:3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's, or for the whole job: not for it
    os.nice(_NICE)
    for line in sys.stdin:
        said = json.loads(line)
        if ROOM in said:
            _take(fd, said[ROOM])
        else:
            _tell(_done(decoded(said[ORDER]), fd))


def _take(fd: int, nbytes: int) -> None:
    """Take the memory now, which costs time, not when training waits for it."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        return  # whoever copies will meet it


def _done(order: SaveOrder, fd: int) -> dict[str, object]:
    try:
        return _carried_out(order, fd, ThrottledProgress(lambda _: _tell({}), SIGN_S))
    except CheckpointError as error:
        return {ERROR: str(error)}
    except Exception as error:  # noqa: BLE001  said where training can raise it
        return {ERROR: f"{order.layout.folder} cannot be saved: {error!r}"}


def _carried_out(order: SaveOrder, fd: int, advance: Advance) -> dict[str, object]:
    with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as whole:
        memory = memoryview(whole)
        content = Mapped(order, memory)
        try:
            carry_out(order, content, advance)
        finally:
            del content
            memory.release()
    if order.rank:
        return {FOLDER: "", WARNINGS: []}
    done = finalize(order, advance)
    return {FOLDER: done.folder, WARNINGS: done.warnings}


def _tell(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
