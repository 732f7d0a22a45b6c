"""A device that does its work later, in virtual time: a double of an accelerator. Not a test.

Its queue holds kernels that take time and write memory, collectives that end when all have come,
or never, and marks. A copy reads memory while the queue is worked off. After an abort a collective
ends with garbage, and what is queued behind it runs on that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

GARBAGE = -1


class Clock:
    """Virtual seconds; whatever is registered gets on with its work as they pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.devices: list[Device] = []

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for device in self.devices:
            device.catch_up()


@dataclass
class Work:
    """One entry of the queue; it begins when it is at the front."""

    takes_s: float = 0.0
    effect: Callable[[], None] = lambda: None
    is_ready: Callable[[], bool] = lambda: True  # of a collective: all have come
    ends_s: float | None = None


@dataclass
class DeviceMark:
    """As ``torch.Event``."""

    device: Device
    is_passed: bool = False

    def query(self) -> bool:
        if self.device.error:
            raise RuntimeError(self.device.error)
        return self.is_passed


@dataclass
class Device:
    """One stream of one device, and its memory."""

    clock: Clock
    memory: dict[str, int] = field(default_factory=dict)
    queue: deque[Work] = field(default_factory=deque)
    error: str = ""  # sticky
    is_aborted: bool = False
    free_s: float = 0.0  # when the work before the front was done

    def __post_init__(self) -> None:
        self.clock.devices.append(self)

    def kernel(self, takes_s: float, **writes: int) -> None:
        """Queue a kernel; it writes as it ends, as its end is all that can be seen of it."""
        self.queue.append(Work(takes_s, lambda: self._write(writes)))

    def run(self, takes_s: float, effect: Callable[[], None]) -> None:
        """Queue a kernel that does this at its end."""
        self.queue.append(Work(takes_s, effect))

    def collective(self, takes_s: float, is_ready: Callable[[], bool]) -> None:
        self.queue.append(Work(takes_s, is_ready=lambda: self.is_aborted or is_ready()))

    def mark(self) -> DeviceMark:
        mark = DeviceMark(self)

        def passed() -> None:
            mark.is_passed = True

        self.queue.append(Work(effect=passed))
        return mark

    def abort(self) -> None:
        self.is_aborted = True
        self.catch_up()

    def catch_up(self) -> None:
        """Do what is done by now."""
        while self.queue and not self.error:
            work = self.queue[0]
            if work.ends_s is None:
                if not work.is_ready():
                    self.free_s = self.clock.now_s
                    return
                work.ends_s = self.free_s + work.takes_s
            if work.ends_s > self.clock.now_s:
                return
            self.free_s = work.ends_s
            self.queue.popleft()
            work.effect()

    def _write(self, writes: dict[str, int]) -> None:
        self.memory.update(dict.fromkeys(writes, GARBAGE) if self.is_aborted else writes)
