"""Processes that are stopped for a while: their machines answer, and they hear everything later.

What is said of others' silence is what `MuteNodes` and `MuteController` find. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent.nodes.line import CALM, LIMIT_S, MUTE, VERY_CALM, Loss, LossKind
from agent.seat.records import NodeShare
from support.node_simulator.network import JITTER_S

if TYPE_CHECKING:
    from support.node_simulator.msrun import Msrun
    from support.node_simulator.network import Line
    from support.node_simulator.simulation import Simulation

FENCED = Loss(LossKind.SILENCE, "has said nothing", LIMIT_S)
LONGEST_S = 90.0  # that one is stopped
NOTICED_S = LIMIT_S / 2  # that a process is stopped, until it doubts what it finds


class Stops:
    """Of one process."""

    def __init__(self, sim: Simulation, process: Msrun) -> None:
        self._sim = sim
        self._process = process
        self._since_s = 0.0
        self._times = 0
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.is_stopped = False
        self._is_waking = False

    def defers(self, happens: Callable[..., None], *about: Any) -> bool:
        """Whether this happens once the process is continued."""
        if self.is_stopped:
            self._later.append((happens, about))
        return self.is_stopped

    def judged(self, loss: Loss) -> Loss:
        """What it takes a line for that was closed while it was stopped."""
        if not self._is_waking or loss.kind is not LossKind.PROOF:
            return loss
        if self._process.what == "controls":
            return Loss(LossKind.SILENCE, f"{loss.why} while this one was stopped")
        return Loss(LossKind.GIVEN_UP, loss.why)

    def stop(self, seconds: float) -> None:
        """It does nothing for so long."""
        if self.is_stopped or not self._process.is_alive:
            return
        self._sim.note(f"process {self._process.number} is stopped for {seconds:.1f} s")
        self.is_stopped, self._since_s = True, self._sim.clock.now
        self._times += 1
        for line in self._sim.network.lines:
            if self._process in line.ends and all(line.open.values()):
                self._watch(line)
        self._sim.clock.after(seconds, self._go_on)

    def _go_on(self) -> None:
        self.is_stopped = False
        later, self._later = self._later, []
        if not self._process.is_alive:
            return
        self._is_waking = self._sim.clock.now - self._since_s > NOTICED_S
        for happens, about in later:
            happens(*about)
        self._is_waking = False
        for line in self._sim.network.lines:
            other = line.other(self._process) if self._process in line.ends else None
            if other is not None and other.stops.is_stopped and all(line.open.values()):
                other.stops._watch(line)

    def _watch(self, line: Line) -> None:
        """Who is at the other end notices after a while."""
        other = line.other(self._process)
        if other.what == "controls":  # sooner where somebody waits for it
            limit_s = LIMIT_S * self._sim.rng.choice((1, CALM))
        else:
            nodes = 2 if other.world is None else len(other.world.members)
            is_most = NodeShare.of(nodes - 1, nodes) is NodeShare.MOST
            may_go_on = is_most or other.what == "waits" or bool(other.term)
            limit_s = LIMIT_S * (CALM if may_go_on else VERY_CALM)
        jitter_s = JITTER_S * self._sim.rng.random()
        self._sim.clock.after(limit_s + jitter_s, self._notice, line, other, self._times)

    def _notice(self, line: Line, other: Msrun, times: int) -> None:
        is_same = self.is_stopped and times == self._times
        if not is_same or not other.is_alive or other.stops.is_stopped or not line.open[other]:
            return
        if other.what not in {"controls", "takes part", "waits"}:
            return
        line.close(other)
        other.lost(line, FENCED if other.what == "controls" else MUTE)
