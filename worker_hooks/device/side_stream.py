"""What an accelerator is read with while other work there never ends.

A device that waits for a dead peer may give no memory, and may not load a kernel that it never ran.
So all of this is made, and used once, while training begins: a stream of its own, memory for sums
there, and page-locked memory of the host. Nothing is ever queued on the stream that waits for other
work: whoever uses it has seen that the device has passed what is to be read.

A device may do nothing at all beside what hangs there (with CUDA_DEVICE_MAX_CONNECTIONS=1, say).
Then the stream is late, and whoever wanted sums reads the memory itself, as without this stream.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

import torch

WAIT_S = 2.0  # a part of 64 MiB is summed up in less than a millisecond
_POLL_S = 2e-5

Buffer = memoryview | mmap.mmap


class SideStream:
    """Reads one accelerator beside its other work. Any thread may use it."""

    def __init__(
        self,
        stream: torch.Stream,
        done: torch.Event,
        sums: torch.Tensor,
        landing: torch.Tensor,
        buffers: Iterable[Buffer] = (),
    ) -> None:
        """Nothing was used yet: :meth:`warm` does that.

        Args:
            stream: is used for nothing else.
            done: an event of the device.
            sums: int64 memory of the device.
            landing: as large, memory of the host.
            buffers: memory of the host that is page-locked, one piece of a reader each.
        """
        self.stream = stream
        self.idle: SimpleQueue[Buffer] = SimpleQueue()  # buffers that nobody uses
        for buffer in buffers:
            self.idle.put(buffer)
        self.most_rows = 0  # of a table to be summed up: no more than were before
        self._done = done
        self._sums = sums
        self._landing = landing
        self._lock = threading.Lock()  # of the last two
        self._is_late = False

    @property
    def is_stuck(self) -> bool:
        """Whether it has yet to do what it did not do in time.

        Raises:
            RuntimeError: the device has failed.
        """
        return self._is_late and not self._done.query()

    def warm(self, table: torch.Tensor) -> None:
        """Sum up tables of all sizes up to this one, so that nothing is lacking later.

        Raises:
            RuntimeError: the device cannot do that, or not beside its other work.
        """
        rows = most = min(len(table), self._sums.numel() - table.shape[1])
        while rows:
            if self.sums(table[:rows]) is None:
                raise RuntimeError(f"it did not sum up {rows} rows within {WAIT_S:.0f} s")
            rows //= 2
        self.most_rows = most

    def sums(self, table: torch.Tensor) -> torch.Tensor | None:
        """The sums of the rows of a table of int64, and behind them those of its columns.

        ``table``: in memory of the device that holds what is to be read.

        Returns:
            A copy of them in host memory; ``None``: they do not come.

        Raises:
            RuntimeError: the device has failed.
        """
        rows, columns = table.shape
        if not self._lock.acquire(timeout=WAIT_S):
            return None
        try:
            with self.stream:
                torch.sum(table, 1, out=self._sums[:rows])
                torch.sum(table, 0, out=self._sums[rows : rows + columns])
                self._done.record(self.stream)
                self._is_late = not self._is_done()
                if self._is_late:
                    return None
                landing = self._landing[: rows + columns]
                landing.copy_(self._sums[: rows + columns])
                return landing.clone()
        finally:
            self._lock.release()

    def _is_done(self) -> bool:
        # by asking: who waits inside of the driver can give up no more
        end_s = time.monotonic() + WAIT_S
        while not self._done.query():
            if time.monotonic() >= end_s:
                return False
            time.sleep(_POLL_S)
        return True


class DeviceAccess(NamedTuple):
    """How accelerators are to be read."""

    ready: Sequence[torch.Event] = ()  # what they must have passed
    sides: Mapping[torch.device, SideStream] = MappingProxyType({})


HOST = DeviceAccess()
"""Without an accelerator, or as it comes: behind all that is queued there by now."""
