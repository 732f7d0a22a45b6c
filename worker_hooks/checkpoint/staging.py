"""Memory to which a state is copied, shared with the process that writes it to the disk.

A copy costs a fraction of copy-on-write by fork: after a fork, the next update changes the whole
state, and so causes a page fault and a copy for each of its pages.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

import torch

from worker_hooks.device import page_lock
from worker_hooks.tensors.tensor_bytes import plain


class StagingBuffer:
    """Anonymous shared memory that grows as needed; ``fd`` is its descriptor."""

    def __init__(self) -> None:
        """Allocate nothing yet.

        Raises:
            OSError: there is no descriptor.
        """
        self.fd = os.memfd_create("msrun-checkpoint", os.MFD_CLOEXEC)
        self.nbytes = 0
        self._memory: torch.Tensor | None = None
        self._is_pinned = False
        self._streams: dict[torch.device, torch.Stream] = {}

    def grow(self, nbytes: int) -> None:
        """Have at least this size.

        Raises:
            OSError: there is not enough memory.
        """
        if nbytes > self.nbytes:
            self._release()
            os.ftruncate(self.fd, nbytes)
            self.nbytes = nbytes

    def fill(
        self,
        tensors: Iterable[torch.Tensor],
        octets: Sequence[bytes | memoryview],
        ready: Sequence[torch.Event] = (),
    ) -> list[torch.Event]:
        """Copy tensors, each in the order of its elements, and then bytes.

        Args:
            tensors: on any device; with the bytes no larger than the memory.
            octets: bytes.
            ready: events that must precede reading an accelerator's memory.

        Returns:
            The events after which the copy is complete. Accelerators wait for them by themselves
            before they do what is queued from now on.
        """
        memory = self._mapped()
        at = 0
        for tensor in map(plain, tensors):
            place = memory[at : at + tensor.nbytes]
            at += tensor.nbytes
            if tensor.device.type == "cpu":
                _copy(place, tensor)
            elif tensor.nbytes:
                self._pin(memory)
                with self._stream(tensor.device, ready):
                    _copy(place, tensor, is_async=self._is_pinned)
        for each in octets:
            if len(each):
                memory[at : at + len(each)].copy_(
                    torch.frombuffer(bytearray(each), dtype=torch.uint8)
                )
            at += len(each)
        return self._copied()

    def close(self) -> None:
        """Give the memory back."""
        self._release()
        os.close(self.fd)

    def _mapped(self) -> torch.Tensor:
        if self._memory is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            whole = mmap.mmap(self.fd, max(self.nbytes, 1), flags)
            self._memory = torch.frombuffer(whole, dtype=torch.uint8)
        return self._memory

    def _release(self) -> None:
        if self._is_pinned and self._memory is not None:
            page_lock.unlock(self._memory.data_ptr())
        self._memory, self._is_pinned = None, False

    def _pin(self, memory: torch.Tensor) -> None:
        """Lock the memory, so that CUDA copies while the host continues."""
        if not self._is_pinned:
            self._is_pinned = page_lock.lock(memory.data_ptr(), memory.nbytes)

    def _stream(self, device: torch.device, ready: Sequence[torch.Event]) -> torch.Stream:
        """A stream that waits for the commit, but not for what was begun after it."""
        if device not in self._streams:
            self._streams[device] = stream = torch.Stream(device)
            events = [event for event in ready if event.device == device]
            for event in events:
                stream.wait_event(event)
            if not events:
                stream.wait_stream(torch.accelerator.current_stream(device))
        return self._streams[device]

    def _copied(self) -> list[torch.Event]:
        streams, self._streams = self._streams, {}
        events = []
        for device, stream in streams.items():
            event = torch.Event(device)
            event.record(stream)
            torch.accelerator.current_stream(device).wait_event(event)
            events.append(event)
        return events


def _copy(place: torch.Tensor, tensor: torch.Tensor, *, is_async: bool = False) -> None:
    """Copy a tensor to bytes, in the order of its elements."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        place.copy_(tensor.view(-1).view(torch.uint8), non_blocking=is_async)
    else:
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=is_async)
