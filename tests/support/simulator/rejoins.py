"""The part of the simulated node in which ranks are replaced: leave, join, come back, or do not; and hang.

Not a test itself.
"""

from __future__ import annotations

from signal import SIGUSR1
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.node import Process
    from support.simulator.replicas import Replicas

LOOKS = 50  # at one rank that hangs
HUNG = "made no progress for 2.1 s (stopped)"


class Rejoins:
    """What ranks do when some of them are started anew, in one schedule."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.node = replicas.node
        self.rng = replicas.rng
        self.arrived: set[int] = set()  # at the new group, which forms when all are there
        self.is_trained = False  # the memory holds the last step: scripts end once they joined

    def perform(self, action: do.Action) -> None:
        node = self.node
        match action:
            case do.ReplaceRanks():
                self.replace(action)
            case do.Tell(message=protocol.GoOn()):
                training = self.replicas.training
                if training.stalled_at is None:
                    training.began_at = node.now
                    self.replicas.reports.began(training)
                    self.replicas.copies.began(training)
            case do.Tell():
                self.replicas.kept.is_over = True
            case do.ForgetMemory():
                self.replicas.disk.memory = None
            case do.RemindReplaced():
                node.after(action.after_s, node.post, ev.ReplacementAged())

    def replace(self, action: do.ReplaceRanks) -> None:
        node, rng = self.node, self.rng
        self.replicas.bar(action.step)
        self.arrived = set()
        self.is_trained = rng.random() < self.replicas.climate.clumsy
        self.replicas.reports.newcomers |= set(action.newcomers)
        for rank in action.survivors:
            process = node.processes[rank]
            process.attempt = action.attempt  # as the agent knows it from now on
            if rng.random() >= self.replicas.climate.mute:
                late = rng.random() < self.replicas.climate.late
                longest_s = 1.3 * node.policy.replace.rejoin_s if late else 0.3
                node.after(rng.random() * longest_s, self.told, process, action.attempt)
        for rank in action.newcomers:
            if rng.random() < self.replicas.climate.clumsy:
                failed = ev.StartFailed(rank, action.attempt, "no memory")
                node.tell(failed, node.now + rng.random())
            else:
                node.start(rank, action.attempt)
        self.shake(action)

    def shake(self, action: do.ReplaceRanks) -> None:
        """What can go wrong meanwhile: a survivor fails or cannot be reached, or people ask."""
        node, rng = self.node, self.rng
        if rng.random() < self.replicas.climate.shaken and action.survivors:
            process = node.processes[rng.choice(action.survivors)]
            if rng.random() < 0.7:
                node.after(rng.random() * 3.0, self.replicas.fail, process, rng.choice((1, -9)))
            else:
                node.after(rng.random() * 3.0, self.replicas.cut, process)
        if rng.random() < 0.15:
            node.stop_soon((0.5, 3.0))
        if rng.random() < 0.05:
            asked = ev.ExitRequestedByFile(action.attempt, "a file")
            node.after(rng.random() * 2.0, node.post, asked)
        if rng.random() < 0.05:
            node.after(rng.random() * 2.0, node.post, ev.SignalReceived(SIGUSR1))

    def is_here(self, process: Process, attempt: int) -> bool:
        """Whether a rank can go on with a round: its listener hears, and the round is not over."""
        is_now = process.attempt == attempt == self.node.job.attempt
        return process.alive and process.is_linked and not process.is_hung and is_now

    def told(self, process: Process, attempt: int) -> None:
        """A survivor hears of it, and leaves its training function; who was held there, too."""
        if not self.is_here(process, attempt):
            return
        process.knows = attempt
        process.is_held = process.is_torn = process.is_done = False
        process.step = process.stays = None
        process.flip, process.busy_until = 0, self.node.now
        self.replicas.say(process, protocol.Rejoining(process.rank, attempt))
        self.node.after(self.rng.random() * 0.5, self.arrive, process, attempt)

    def arrive(self, process: Process, attempt: int) -> None:
        """It waits for the others in the new group, unless it fails there."""
        node, rng = self.node, self.rng
        if not self.is_here(process, attempt) or process.is_held:
            return
        if rng.random() < self.replicas.climate.clumsy:
            if rng.random() < 0.8:
                self.replicas.fail(process, rng.choice((1, -11)))
            elif rng.random() < 0.5:  # its script ends instead
                self.replicas.say(process, ev.RankExiting(process.rank, process.knows))
            return
        self.arrived.add(process.rank)
        if len(self.arrived) == len(node.policy.ranks):
            for each in node.processes.values():
                node.after(rng.random(), self.come_back, each, attempt)

    def come_back(self, process: Process, attempt: int) -> None:
        """Its state is as of the memory, or not, and it waits to be let go on."""
        rng, replicas = self.rng, self.replicas
        if not self.is_here(process, attempt) or process.is_held:
            return
        step = replicas.training.base
        if rng.random() < replicas.climate.astray:
            step -= 1
        process.is_registered = True
        self.node.after(20.0 + rng.random(), replicas.end, process, 0)
        replicas.say(
            process,
            protocol.Registered(
                process.rank,
                attempt,
                step,
                replicas.climate.fixed,
                replicas.reports.are_awaited,
            ),
        )
        if self.is_trained:  # its link keeps the order
            self.node.after(0.3 + rng.random(), self.leave, process, attempt)

    def leave(self, process: Process, attempt: int) -> None:
        """Its script ends: nothing was left to train."""
        if self.is_here(process, attempt) and not process.is_held:
            self.replicas.say(process, ev.RankExiting(process.rank, attempt))

    # --- hangs

    def hang(self, process: Process) -> None:
        """A rank stops in the middle of training; or it is only taken for one that did."""
        replicas, node = self.replicas, self.node
        training = replicas.training
        if self.rng.random() < 0.2:
            self.told_of(process)
            return
        is_well = process.alive and process.is_linked and process.stays is None
        is_armed = training.began_at is not None and training.step(node.now) > training.base
        if is_well and is_armed and training.stalled_at is None and not process.is_held:
            process.is_hung = True
            replicas.stall(process)
            node.after(self.rng.random() * 2.0, self.look, process, LOOKS)

    def look(self, process: Process, more: int) -> None:
        """The agent notices, while the job trains as far as it knows."""
        node = self.node
        if process.alive and node.story.ended_at is None and more:
            if node.job.state is JobState.RUNNING:
                self.told_of(process)
            node.after(3.0, self.look, process, more - 1)

    def told_of(self, process: Process) -> None:
        """It asks all for their stacks before, which takes its time."""
        node, hung = self.node, ev.RankHung(process.rank, process.attempt, HUNG)
        node.tell(hung, max(node.now + self.rng.random(), process.announced_at))
