"""Reads tensors' bytes in order, piece by piece, on any device and with any strides.

Contiguous tensors in host memory are read in place. Everything else is copied, a few megabytes at
a time, into buffers that are reused: freed buffers would stay with the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import torch

from worker_hooks.device.side_stream import HOST, Buffer, DeviceAccess, SideStream
from worker_hooks.tensors.tensor_bytes import plain, view

PIECE = 4 << 20  # bytes; the size limit of one piece
_ALIGNED = 64  # bytes


class Reader:
    """Reads tensors of one device or several; nobody may change them meanwhile."""

    def __init__(self, access: DeviceAccess = HOST) -> None:
        """Begin. ``access``: how accelerators are to be read."""
        self._access = access
        self._is_there: dict[torch.device, bool] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._idle: SimpleQueue[Buffer] = SimpleQueue()
        self._loan: _Loan | None = None

    def side(self, device: torch.device) -> SideStream | None:
        """What a device is read with that has passed what must precede it; ``None``: nothing is.

        Raises:
            RuntimeError: the device has failed.
        """
        side = self._access.sides.get(device)
        if side is None or side.is_stuck:
            return None
        if device not in self._is_there:
            events = [event for event in self._access.ready if event.device == device]
            if not events:
                torch.accelerator.current_stream(device).synchronize()
            self._is_there[device] = all(event.query() for event in events)
        return side if self._is_there[device] else None

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor, in the order of its elements, at most 4 MiB at a time.

        A piece stays unchanged and in memory as long as it is referenced.
        """
        tensor = plain(tensor)
        if tensor.device.type != "cpu" and (memory := in_memory_order(tensor)) is not None:
            # The host puts the elements in order, and holds this one tensor for that. A device
            # would need memory, which it may not give before all of its work is done, also a
            # collective that never ends.
            copy = torch.empty(memory.shape, dtype=memory.dtype, device="cpu")
            at = 0
            for part in _parts(memory):
                octets = self._copied(part)
                view(copy)[at : at + len(octets)] = octets
                at += len(octets)
            tensor = copy.as_strided(tensor.shape, tensor.stride())
        for part in _parts(tensor):
            is_resolved = not (part.is_conj() or part.is_neg())
            if part.device.type == "cpu" and part.is_contiguous() and is_resolved:
                yield view(part)
            else:
                yield self._copied(part)

    def _copied(self, part: torch.Tensor) -> memoryview:
        loan, is_on_host = self._loan, part.device.type == "cpu"
        if loan is None or loan.used + part.nbytes > PIECE:
            side = None if is_on_host else self.side(part.device)
            self._loan = loan = _Loan(self._idle if side is None else side.idle, self._idle)
        copy = torch.frombuffer(loan.buffer, dtype=torch.uint8, count=part.nbytes, offset=loan.used)
        loan.used += -(-part.nbytes // _ALIGNED) * _ALIGNED
        copy = copy.view(part.dtype).view(part.shape)
        if is_on_host:
            copy.copy_(part)
        else:
            # Into pageable memory, if none was page-locked before: that may wait for all work of
            # the device, and a collective that lost its peer never ends.
            with self._stream(part.device):
                copy.copy_(part)
        return view(copy, loan)

    def _stream(self, device: torch.device) -> torch.Stream:
        """A stream behind the last update that does not wait for what was begun after it."""
        if (side := self.side(device)) is not None:
            return side.stream
        if device not in self._streams:
            self._streams[device] = stream = torch.Stream(device)
            events = [event for event in self._access.ready if event.device == device]
            for event in events:
                stream.wait_event(event)
            if not events:
                stream.wait_stream(torch.accelerator.current_stream(device))
        return self._streams[device]


class _Loan:
    """A buffer that returns to the idle ones when nothing refers to it any more."""

    def __init__(self, *idle: SimpleQueue[Buffer]) -> None:
        """Take the first one that is idle; a new one goes to the last of these."""
        self.used = 0
        self.buffer: Buffer
        for self._idle in idle:
            try:
                self.buffer = self._idle.get_nowait()
            except Empty:
                continue
            return
        self.buffer = mmap.mmap(-1, PIECE)

    def __del__(self) -> None:
        self._idle.put(self.buffer)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor whose elements are in another order, as one dimension.

    ``None``: they are in order, or there are gaps, or elements that share memory, or a pending
    conjugation or negation.
    """
    if tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    dense = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride != dense:
            return None
        dense *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Consecutive parts, none larger than a piece."""
    most = PIECE // tensor.itemsize
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(most)  # type: ignore[no-untyped-call]
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    row = tensor.numel() // tensor.shape[dim]
    if row > most:
        for each in tensor.unbind(dim):
            yield from _parts(each)
    else:
        yield from tensor.split(most // row, dim)  # type: ignore[no-untyped-call]
