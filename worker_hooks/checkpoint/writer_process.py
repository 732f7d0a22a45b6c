"""The process that writes checkpoints in the background, with ``async_save``.

Standard library only, so that it starts fast. It receives orders and answers with results, as lines
of JSON. It has a low priority, and ends with the process that it works for: nobody trusts the
unfinished folder that it then leaves.
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
from worker_hooks.checkpoint.rank_writer import Advance, write_part
from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder, decode
from worker_hooks.storage.durable_file import ThrottledProgress

ORDER, ROOM = "order", "room"
FOLDER, WARNINGS, ERROR, PASSES = "folder", "warnings", "error", "passes"
SIGN_S = 1.0
_PIECE = 4 << 20  # bytes
_NICE = 10  # a tenth of training's share of a core
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SharedContent:
    """The content of an order in shared memory: the state, its buffers, the private state."""

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
        """The last bytes of the share."""
        if self._share is None:
            return ()
        start = self._share.nbytes
        return [self._memory[start : start + self._share.buffers]]

    def payload(self) -> bytes:
        """The private state."""
        start = 0 if self._share is None else self._share.nbytes + self._share.buffers
        return bytes(self._memory[start : start + (0 if self._own is None else self._own.nbytes)])


def main() -> None:
    """Work until stdin is closed. Arguments: the memory's descriptor, the parent's pid."""
    fd, parent = map(int, sys.argv[1:3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # from a terminal, or sent to the whole job
    os.nice(_NICE)
    for line in sys.stdin:
        message = json.loads(line)
        if ROOM in message:
            _allocate(fd, message[ROOM])
        else:
            _send(_execute(decode(message[ORDER]), fd))


def _allocate(fd: int, nbytes: int) -> None:
    """Allocate the memory now: it takes time, and later training would wait for it."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        return  # the copy will fail and report it


def _execute(order: SaveOrder, fd: int) -> dict[str, object]:
    try:
        return _write_and_finalize(order, fd, ThrottledProgress(lambda _: _send({}), SIGN_S))
    except CheckpointError as error:
        return {ERROR: str(error), PASSES: error.is_passing}
    except Exception as error:  # noqa: BLE001  sent to training, which raises it
        return {ERROR: f"{order.layout.folder} cannot be saved: {error!r}", PASSES: False}


def _write_and_finalize(order: SaveOrder, fd: int, advance: Advance) -> dict[str, object]:
    # not closed: the frames of an error hold slices of it, and to close it would raise instead
    memory = memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
    write_part(order, SharedContent(order, memory), advance)
    del memory
    if order.rank:
        return {FOLDER: "", WARNINGS: []}
    done = finalize(order, advance)
    return {FOLDER: done.folder, WARNINGS: done.warnings}


def _send(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
