"""The queue of copies to a status page, worked off by the double of a device. Not a test.

A copy is made in two halves, and a device can stop between them, as a rank that is killed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from support.device_double import Device, DeviceMark


class DoubleQueue:
    """As ``worker_hooks.device.stamped_copies.StreamQueue``."""

    def __init__(self, device: Device, takes_s: Callable[[], float] = lambda: 0.0) -> None:
        self.device, self.takes_s = device, takes_s
        self.is_open = True
        self.copied: list[int] = []  # sizes, as they are queued

    def begin(self) -> bool:
        return self.is_open

    def run(self, work: Callable[[], None]) -> None:
        self.device.run(self.takes_s(), work)

    def copy(self, target: Tensor, source: Callable[[], Tensor]) -> None:
        self.copied.append(target.nbytes)
        half = target.nbytes // 2 if target.nbytes > 8 else 0  # stamps are written at once
        for part in (slice(half), slice(half, None)) if half else (slice(None),):
            self._copy(target, source, part)

    def _copy(self, target: Tensor, source: Callable[[], Tensor], part: slice) -> None:
        def effect() -> None:
            target[part].copy_(source()[part])

        self.device.run(self.takes_s(), effect)

    def end(self) -> DeviceMark:
        return self.device.mark()


class WithoutBeginStamp(DoubleQueue):
    """A mutant: the first stamp is written when all else was."""

    first: tuple[Tensor, Callable[[], Tensor]] | None = None

    def copy(self, target: Tensor, source: Callable[[], Tensor]) -> None:
        if self.first is None:
            self.first = target, source
        else:
            super().copy(target, source)

    def end(self) -> DeviceMark:
        assert self.first is not None
        super().copy(*self.first)
        self.first = None
        return super().end()
