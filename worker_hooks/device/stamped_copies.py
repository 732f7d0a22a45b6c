"""Copies of a device's memory to a status page that the main thread does not wait for.

The device makes them as it comes to them in its queue, and writes a stamp before and one behind
them, so that a reader knows which step they are of, and that they are complete::

    queue    | forward n | gather, stamp, bytes, stamp | backward n, all-reduce n | update n | ...

They are queued in front of backward. Whoever holds step n on its device has this rank's gradients
of n, so this rank's device has passed its copies of step n.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker_hooks.contract.status_page import DeviceArea, Page, stamp
from worker_hooks.device import page_lock
from worker_hooks.device.timeline import Mark

_LOOK_S = 0.001
_STAMP_BYTES = 8


class CopyQueue(Protocol):
    """The queue of one device."""

    def begin(self) -> bool:
        """Continue behind all that this thread has queued; false: nothing may be queued now."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue what this call of torch does."""

    def copy(self, target: Tensor, source: Callable[[], Tensor]) -> None:
        """Queue a copy of bytes to host memory."""

    def end(self) -> Mark:
        """Leave a mark behind what was queued."""


class StreamQueue:
    """The stream of a device on which the main thread queues its work at the time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._event: torch.Event | None = None

    def begin(self) -> bool:
        """See :class:`CopyQueue`. Copies stay in order if the script changes its stream."""
        if torch.cuda.is_current_stream_capturing():
            return False  # a replay would repeat the copies with the stamps of this step
        stream = torch.accelerator.current_stream(self._device)
        if self._event is not None and stream != self._stream:
            stream.wait_event(self._event)
        self._stream = stream
        return True

    def run(self, work: Callable[[], None]) -> None:
        """See :class:`CopyQueue`."""
        work()

    def copy(self, target: Tensor, source: Callable[[], Tensor]) -> None:
        """See :class:`CopyQueue`."""
        target.copy_(source(), non_blocking=True)

    def end(self) -> Mark:
        """See :class:`CopyQueue`."""
        self._event = torch.Event(self._device)
        self._event.record(self._stream)
        return self._event


class Gathered(NamedTuple):
    """Tensors that are adjacent on the page."""

    offset: int
    nbytes: int
    octets: list[Tensor]  # each one's own memory as bytes


class Single(NamedTuple):
    """A tensor that is copied by itself."""

    offset: int
    nbytes: int
    octets: Callable[[], Tensor]


class StampedCopies:
    """Writes the areas of one page, which stays mapped until :meth:`close`."""

    def __init__(self, page: Page, device: torch.device | None) -> None:
        """Lock the page's memory. Where that cannot be, each copy waits for the device.

        ``device``: where all that is copied lies; ``None``: on more than one, and copies wait.
        """
        self._page: Page | None = page
        self._address, nbytes = page.memory
        self._process = os.getpid()
        self._device = device
        self._queue: CopyQueue | None = None
        if device is not None and page_lock.lock(self._address, nbytes):
            self._queue = StreamQueue(device)
        self._turn = 0
        self._staging: Tensor | None = None
        self._stamp: Tensor | None = None
        self._last: Mark | None = None

    def copy(
        self,
        area: DeviceArea,
        step: int,
        gathered: Sequence[Gathered],
        singles: Callable[[], Sequence[Single]],
        *,
        is_here: bool = True,
    ) -> None:
        """Copy the bytes of a step to an area of the page.

        Args:
            gathered: what is always copied, in the order of the page, from its first byte.
            singles: returns what else is copied; called if a copy is possible.
            is_here: all of it is on this device; otherwise the copy waits.
        """
        self._turn += 1
        number = stamp(step, self._turn)
        if self._queue is None or not is_here:
            self.wait()
            self._copy_now(area, number, gathered, singles())
        elif self._queue.begin():
            self._enqueue(self._queue, area, number, gathered, singles())

    def wait(self) -> None:
        """Wait until the device has made all copies. For the main thread, seldom."""
        while self._last is not None and not self._last.query():
            time.sleep(_LOOK_S)  # peers may be waited for: other threads must run
        self._last = None

    def close(self) -> None:
        """Wait for the device, and give the page's memory back. Not in a forked child."""
        if self._page is not None and self._process == os.getpid():
            self.wait()
            if self._queue is not None:
                page_lock.unlock(self._address)
            self._page = None

    def _enqueue(
        self,
        queue: CopyQueue,
        area: DeviceArea,
        number: int,
        gathered: Sequence[Gathered],
        singles: Sequence[Single],
    ) -> None:
        nbytes = max((each.offset + each.nbytes for each in gathered), default=0)
        if self._stamp is None:
            self._stamp = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        mark, staging = self._stamp, self._staging

        def gather() -> None:
            mark.fill_(number)
            for each in gathered:
                torch.cat(each.octets, out=staging[each.offset : each.offset + each.nbytes])

        queue.run(gather)
        queue.copy(memory(area.begin, _STAMP_BYTES), lambda: mark.view(torch.uint8))
        if nbytes:
            queue.copy(memory(area.octets, nbytes), lambda: staging[:nbytes])
        for each in singles:
            queue.copy(memory(area.octets + each.offset, each.nbytes), each.octets)
        queue.copy(memory(area.end, _STAMP_BYTES), lambda: mark.view(torch.uint8))
        self._last = queue.end()

    def _copy_now(
        self,
        area: DeviceArea,
        number: int,
        gathered: Sequence[Gathered],
        singles: Sequence[Single],
    ) -> None:
        begin, end = map(ctypes.c_int64.from_address, (area.begin, area.end))
        begin.value = number
        for run in gathered:
            devices = {each.device for each in run.octets}
            octets = [each.cpu() for each in run.octets] if len(devices) > 1 else run.octets
            memory(area.octets + run.offset, run.nbytes).copy_(torch.cat(octets))
        for each in singles:
            memory(area.octets + each.offset, each.nbytes).copy_(each.octets())
        end.value = number


def memory(address: int, nbytes: int) -> Tensor:
    """Bytes of a page as a tensor."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
