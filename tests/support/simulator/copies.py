"""The part of the simulated node that copies the state while training goes on, and what is promised of it.

Not a test itself.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from signal import SIGKILL
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import Job
from agent.controller.replication import groups_to_copy
from agent.controller.states import JobState
from agent.spec.job_spec import CopyMode
from support.simulator.kept import KeptMemory
from support.simulator.same import TRAINING
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.promises import Watch
    from support.simulator.replicas import Replicas, Training

ASKED = (
    ev.StopRequested | ev.ExitRequestedByFile | protocol.ExitRequested
)  # of ranks that hold nothing
GIVEN_UP = (JobState.STARTING, JobState.STOPPING, JobState.FAILED, JobState.STOPPED)


class Copies:
    """Copies that are complete at some steps of one schedule; its own dice leave the others as they are."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.node = replicas.node
        self.rng = Random(f"copies {replicas.node.seed}")
        self.are_taken = self.rng.random() < 0.4
        ways = (CopyMode.COPY, CopyMode.COPY, CopyMode.AUTO)
        self.mode = self.rng.choice(ways) if self.are_taken else CopyMode.OFF
        self.kept = KeptMemory(replicas.node.seed, is_copied=self.are_taken)
        if self.kept.is_on:
            self.mode = CopyMode.LIVE if self.kept.is_asked else CopyMode.AUTO
        self.losses = Random(f"node deaths {replicas.node.seed}")
        self.are_nodes_lost = self.are_taken and self.losses.random() < 0.2

        self.are_read_early = self.are_taken and self.losses.random() < 0.5

    def write(self, action: do.CommitDump, path: str, least_s: float) -> None:
        """What ranks restart from in memory is on the disk sooner or later, or never."""
        written = ev.CheckpointWritten(action.dump_id, action.step, path)
        if self.losses.random() < 0.2:
            written = replace(written, why_not="no space left")
        self.node.tell(written, self.node.now + least_s + self.losses.random() * 20.0)

    def why_lost(self, exit_code: int) -> str:
        """Why nobody saw a rank end: sometimes it was its node that died."""
        is_lost = exit_code == -SIGKILL and self.are_nodes_lost and self.losses.random() < 0.4
        return "its node is gone" if is_lost else ""

    def began(self, training: Training) -> None:
        """All train: some steps are copied."""
        for _ in range(self.rng.choice((1, 2, 3)) if self.are_taken else 0):
            self.node.after(self.rng.random() * self.rng.choice((2.0, 10.0)), self.take, training)

    def take(self, training: Training) -> None:
        node, rng, job = self.node, self.rng, self.node.job
        is_going = training is self.replicas.training and training.stalled_at is None
        step = training.step(node.now)
        if not is_going or step == training.base or job.state is not JobState.RUNNING:
            return
        if not all(each.is_linked and each.alive for each in node.processes.values()):
            return
        groups = groups_to_copy(job)
        if groups and node.watch.same.trial is not None:
            node.watch.broken("copies are taken of a replacement that is not confirmed")
        if groups:
            variants = tuple((rng.choice(group),) for group in groups)
            why_not = "no memory is left" if rng.random() < 0.05 else ""
            copied = ev.StateCopied(job.attempt, step, 1, variants, why_not=why_not)
            node.after(rng.random() * rng.choice((0.1, 1.0)), node.post, copied)
            if rng.random() < 0.3:  # it is said again
                node.after(rng.random() * 5.0, node.post, copied)


class CopyWatch:
    """The promises, in the plainest way."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.node = watch.node
        self.broken = watch.broken
        self.before = JobState.NEW
        self.begin()

    def begin(self) -> None:
        """All ranks are started anew, and nothing is known of what an earlier attempt copied."""
        self.newest: ev.StateCopied | None = None
        self.order: do.CommitDump | None = None

    def heard(self, before: Job, event: ev.Event) -> None:
        self.before = before.state
        if isinstance(event, ev.StateCopied):
            self.note(event)
        is_over = self.before in TRAINING and self.node.job.state in GIVEN_UP
        is_plain = self.before is JobState.RUNNING and isinstance(event, ASKED)
        is_later = self.node.job.now.is_kept_next  # as the watch of kept memory sees to
        if (
            is_over
            and not (is_plain or is_later or self.watch.stop.is_now)
            and (copy := self.due())
        ):
            self.broken(f"{self.node.job.state} at {event}, and {copy} is not saved")

    def note(self, event: ev.StateCopied) -> None:
        is_now = event.attempt == self.watch.attempt and self.before in TRAINING
        is_newer = self.newest is None or event.step > self.newest.step
        if is_now and is_newer and not event.why_not:
            self.newest = event
            self.watch.dump.reached(event.step)

    def lost(self, event: ev.WorkerExited) -> None:
        """A copy dies with the node that has a part of it, unless it is being saved already."""
        if event.lost and (self.order is None or not self.watch.dump.open):
            self.newest = None

    def due(self) -> ev.StateCopied | None:
        """The newest copy, if it is of all parts, and newer than what is saved."""
        copy = self.newest
        if copy is None or copy.step <= max(self.watch.dump.saved, 0):
            return None
        of_all = all(self.wrote(copy, group) for group in self.watch.same.alike())
        return copy if of_all else None

    def wrote(self, copy: ev.StateCopied, group: set[int]) -> bool:
        return any({*ranks} <= group for ranks in copy.variants)

    def check(self, action: do.CommitDump) -> None:
        """Where no rank can save a newer step, the newest copy, once in each place."""
        watch, dump, copy = self.watch, self.watch.dump, self.due()
        if copy is None or (action.step, action.variants) != (copy.step, copy.variants):
            self.broken(f"{action}, but the newest copy is {self.newest}")
        if self.order is None:
            if dump.open or action.dump_id <= dump.last_id:
                self.broken(f"{action} while dump {dump.last_id} is open or known")
            if self.before is JobState.RUNNING and dump.reachable():
                self.broken(f"{action}, but {sorted(dump.reachable())} can be asked")
            orders = dump.orders
            dump.begin(action.dump_id)
            dump.orders = orders  # ranks that leave know what became of it
            watch.replacing.is_begun = True
        if self.order is not None and action.dump_id != self.order.dump_id:
            self.broken(f"{action} after {self.order}")
        if dump.commit is not None or action.place != len(dump.full):
            self.broken(f"{action} twice, or places {dump.full} are full")
        sides = [
            group for each in action.variants for group in watch.same.alike() if {*each} <= group
        ]
        if [set(each) for each in action.holders] != (sides if len(sides) > 1 else []):
            self.broken(f"{action}, but its holders are {sides}")
        may_restart = watch.starts <= self.node.policy.max_restarts and not watch.stop.is_asked
        if action.is_early and not (may_restart and self.node.replicas.copies.are_read_early):
            self.broken(f"{action}, but no restart follows")
        if action.is_disputed or action.odd:
            self.broken(f"{action}, is not disputed: each part is its own")
        self.order, dump.open, dump.is_fall = action, True, True
        dump.step, dump.commit = action.step, action
