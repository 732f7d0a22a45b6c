"""The part of the simulated node that leaves gracefully: ranks stay, go on to one step, leave, or do not.

Not a test itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent.controller import actions as do
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.node import Process
    from support.simulator.replicas import Replicas


class Exits:
    """What ranks do that are asked to leave at one step, in one schedule."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.node = replicas.node
        self.rng = replicas.rng

    def limit(self) -> float:
        """Nobody commits a step that somebody who stays has no part in."""
        stays = [each.stays for each in self.node.processes.values() if each.alive]
        return min((each for each in stays if each is not None), default=float("inf"))

    def perform(self, action: do.Action) -> None:
        node = self.node
        match action:
            case do.HoldRanks():
                self.shake(action)
                for rank in action.ranks:
                    self.hear(node.processes[rank], self.told_to_stay, action.dump_id)
            case do.Tell(message=protocol.Proceed(dump_id, step)):
                for rank in action.ranks:
                    self.hear(node.processes[rank], self.told_to_proceed, dump_id, step)
            case do.Tell(message=protocol.Leave()):
                for rank in action.ranks:
                    self.hear(node.processes[rank], self.told_to_leave)
            case do.Tell(message=protocol.Dismiss()):
                for rank in action.ranks:
                    self.hear(node.processes[rank], node.die, -15)

    def hear(self, process: Process, does: Callable[..., None], *told: Any) -> None:
        """A rank's listener hears an order, unless its line is cut or it hangs."""
        rng, is_here = self.rng, process.alive and process.is_linked and not process.is_hung
        if is_here and rng.random() >= self.replicas.climate.mute:
            late = rng.random() < self.replicas.climate.late
            longest_s = 1.2 * self.node.policy.timeouts.exit_s if late else 0.3
            self.node.after(rng.random() * longest_s, does, process, *told)

    def asked(self, process: Process) -> None:
        """A signal reached the rank alone, and it catches that."""
        if process.alive and process.is_linked and process.attempt == self.node.job.attempt:
            why = f"rank {process.rank} received SIGUSR1"
            self.replicas.say(process, protocol.ExitRequested(process.rank, process.knows, why))

    def shake(self, action: do.HoldRanks) -> None:
        """What can go wrong until all have come to one step."""
        rng, node, replicas = self.rng, self.node, self.replicas
        if rng.random() < replicas.climate.shaken:
            process = node.processes[rng.choice(action.ranks)]
            happens = rng.choice((replicas.cut, replicas.fail, replicas.fail))
            told = () if happens == replicas.cut else (rng.choice((1, -9, -11)),)
            node.after(rng.random() * rng.choice((0.5, 3.0)), happens, process, *told)

    def told_to_stay(self, process: Process, dump_id: int) -> None:
        """It says at the end of which step it stays; who has none to begin is done."""
        training, node, rng = self.replicas.training, self.node, self.rng
        if not process.alive or not process.is_linked or process.attempt != node.job.attempt:
            return
        step = self.replicas.newest_commit() if process.step is None else process.step
        if training.limit == float("inf") and rng.random() < self.replicas.climate.last:
            training.limit = step + rng.choice((0, 1))
        process.is_done = step >= training.limit
        process.stays = step if process.is_done else step + 1
        standing = protocol.Standing(process.rank, process.knows, dump_id, process.stays)
        self.replicas.say(process, standing)
        if process.is_done and rng.random() < 0.5:
            node.after(rng.random() * 3.0, self.finish, process)

    def finish(self, process: Process) -> None:
        """Its training is over: it leaves, unless it fails before."""
        if process.alive and not process.is_held and self.replicas.training.stalled_at is None:
            self.node.die(process, 0)

    def told_to_proceed(self, process: Process, dump_id: int, step: int) -> None:
        node = self.node
        if not process.alive or process.attempt != node.job.attempt or process.stays is None:
            return
        if process.stays > step:
            node.watch.broken(f"rank {process.rank} commits {process.stays}, they agreed on {step}")
        if process.is_done and process.stays < step:
            node.after(self.rng.random(), self.finish, process)
        elif self.rng.random() < self.replicas.climate.astray:
            self.replicas.say(process, frozen(process, dump_id, step + 1))
        else:
            process.stays = step
            self.arrive(process, dump_id)

    def arrive(self, process: Process, dump_id: int) -> None:
        """Once nobody stays behind, all commit the step."""
        training, node, step = self.replicas.training, self.node, process.stays
        assert step is not None
        if not process.alive or not process.is_linked or process.is_held:
            return
        if process.step is None and min(training.step(node.now), self.limit()) < step:
            if training.stalled_at is None:
                node.after(0.3, self.arrive, process, dump_id)
            return
        if process.step is None:
            process.step = step
            process.flip = (
                self.rng.choice((1, 2)) if self.rng.random() < self.replicas.climate.flip else 0
            )
        if process.step == step and not process.is_torn:
            self.replicas.say(process, frozen(process, dump_id, step))

    def told_to_leave(self, process: Process) -> None:
        rng = self.rng
        if rng.random() < self.replicas.climate.clumsy:
            if rng.random() < 0.5:
                self.node.after(rng.random(), self.node.die, process, rng.choice((1, -11)))
            return
        self.node.after(rng.random() * 2.0, self.node.die, process, 0)


def frozen(process: Process, dump_id: int, step: int) -> protocol.Frozen:
    return protocol.Frozen(process.rank, process.knows, dump_id, step, True)
