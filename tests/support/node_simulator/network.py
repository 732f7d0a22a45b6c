"""Machines, what connects them, and lines between processes on them. Not a test itself.

A line behaves as TCP with keepalive: the end of a process is noticed at once where it can be heard,
a cut only by silence, what was sent meanwhile arrives if it is mended before that, and an end that
has given the line up is a proof for the other one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

from agent.nodes.line import LATE_S, LIMIT_S, Loss, LossKind

LATENCY_S = 0.05
JITTER_S = LATE_S  # by which ends notice silence at different times
GONE = Loss(LossKind.PROOF, "closed the line")
SILENT = Loss(LossKind.SILENCE, "is lost")


class Clock:
    """Jumps from one happening to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, happens: Callable[..., None], *about: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, happens, about))

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, happens, about = heapq.heappop(self._queue)
            happens(*about)
        self.now = until_s

    def clear(self) -> None:
        self._queue.clear()


class Line:
    """Between two processes; each end is told once that it is lost, unless it has closed it."""

    def __init__(self, network: Network, *ends: Any) -> None:
        self.network = network
        self.ends = ends
        self.open = dict.fromkeys(ends, True)
        self._arrival_s = dict.fromkeys(ends, 0.0)
        self._waiting: list[tuple[Any, Callable[..., None], tuple[Any, ...]]] = []
        self._cuts = 0
        network.lines.append(self)
        if not network.reach(*ends):
            self.cut()

    def other(self, end: Any) -> Any:
        return self.ends[self.ends[0] is end]

    def send(self, sender: Any, hear: Callable[..., None], *about: Any) -> None:
        """Have the other end hear something, now or once the line is mended."""
        if self.open[sender]:
            self._deliver(self.other(sender), hear, about)

    def _deliver(self, to: Any, hear: Callable[..., None], about: tuple[Any, ...]) -> None:
        if self.network.reach(*self.ends):
            clock = self.network.clock
            at_s = max(clock.now + LATENCY_S * self.network.rng.random(), self._arrival_s[to])
            self._arrival_s[to] = at_s  # what was sent first comes first
            clock.after(at_s - clock.now, self._arrive, to, hear, about)
        else:
            self._waiting.append((to, hear, about))

    def _arrive(self, to: Any, hear: Callable[..., None], about: tuple[Any, ...]) -> None:
        if to.stops.defers(self._arrive, to, hear, about):
            return
        if self.open[to] and to.is_alive:
            hear(*about)

    def close(self, end: Any) -> None:
        """This end hears nothing any more; the other one hears that, if it can."""
        if self.open[end]:
            self.open[end] = False
            self._deliver(self.other(end), self._lose, (self.other(end), GONE))

    def _lose(self, end: Any, loss: Loss) -> None:
        if end.stops.defers(self._lose, end, loss):
            return
        if self.open[end] and end.is_alive:
            self.close(end)
            end.lost(self, end.stops.judged(loss))

    def cut(self) -> None:
        self._cuts += 1
        for end in self.ends:
            over_s = JITTER_S * self.network.rng.random()
            self.network.clock.after(LIMIT_S + over_s, self._silent, end, self._cuts, over_s)

    def _silent(self, end: Any, cuts: int, over_s: float) -> None:
        if cuts == self._cuts:
            self._lose(end, SILENT._replace(over_s=over_s))

    def mend(self) -> None:
        self._cuts += 1
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._deliver(*each)


class Network:
    """Which machines hear each other."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self.clock = clock
        self.rng = rng
        self.lines: list[Line] = []
        self._groups: dict[int, int] = {}  # machine -> the part that it is in
        self._off: set[int] = set()

    def reach(self, one: Any, other: Any) -> bool:
        """Whether two processes' machines hear each other."""
        here, there = one.machine, other.machine
        if {here, there} & self._off:
            return False
        return self._groups.get(here, 0) == self._groups.get(there, 0)

    def is_off(self, machine: int) -> bool:
        return machine in self._off

    def change(self, groups: dict[int, int] | None = None, off: int | None = None) -> None:
        """Other machines are together, or one is off for good."""
        self.lines = [each for each in self.lines if any(each.open.values())]
        before = [self.reach(*each.ends) for each in self.lines]
        if groups is not None:
            self._groups = groups
        if off is not None:
            self._off.add(off)
        for line, was in zip(self.lines, before, strict=True):
            if was != (now := self.reach(*line.ends)):
                line.mend() if now else line.cut()

    def ended(self, process: Any) -> None:
        """Its kernel closes what it had open."""
        for line in self.lines:
            if process in line.ends:
                line.close(process)
