"""The memory of the simulated node's dead ranks, and what is promised of it.

Not a test itself.
"""

from __future__ import annotations

from random import Random
from signal import SIGKILL
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import Job
from agent.controller.states import JobState
from agent.spec.job_spec import CopyMode
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.node import Process
    from support.simulator.promises import Watch

TRAINING = (JobState.RUNNING, JobState.HOLDING, JobState.FREEZING, JobState.DUMPING)
OVER = (JobState.STARTING, JobState.FAILED, JobState.STOPPED)


class KeptMemory:
    """Whose memory outlives it, in one schedule; its own dice leave the others as they are."""

    def __init__(self, seed: int, *, is_copied: bool) -> None:
        self.rng = Random(f"kept {seed}")
        self.is_on = is_copied and self.rng.random() < 0.4
        self.lacking = self.rng.choice((0.0, 0.0, 0.1))
        costs = Random(f"note costs {seed}")
        self.costs = costs
        self.is_asked = costs.random() < 0.5  # else it is kept if that is cheap
        self.cost_s = costs.choice((0.0002, 0.0002, 0.0008, 0.003))  # in steps of 0.1 s
        self.reads = Random(f"kept reads {seed}")
        self.unread = self.reads.choice((0.0, 0.3, 0.6))
        self.is_over = False

    def begin(self) -> None:
        """All ranks are started anew."""
        self.is_over = False

    def keeper(self) -> int:
        """Of a rank that registers; 0: it has none, or is told to end it."""
        return int(self.is_on and self.rng.random() >= self.lacking) * (not self.is_over)

    def measured(self, process: Process) -> protocol.NotesMeasured:
        """What a rank finds that notes cost it; ranks differ, and so does one from time to time."""
        costs, told = self.costs, (process.rank, process.attempt)
        if costs.random() < 0.02:
            return protocol.NotesMeasured(*told, why_not="its elements are in another order")
        cost_s = self.cost_s * (0.7 + costs.random())
        return protocol.NotesMeasured(*told, cost_s, 0.1 * (0.9 + costs.random() / 5))

    def left(self, process: Process, exit_code: int) -> tuple[int, ...]:
        """The steps that its memory holds; it was killed amid a commit, or an update, sometimes."""
        step = process.step
        if not (self.is_on and exit_code == -SIGKILL and process.is_registered) or step is None:
            return ()
        drawn = self.rng.random()
        newest = step if drawn < 0.8 else step - 1
        return () if drawn > 0.95 else tuple(max(newest - back, 0) for back in range(2))

    def cannot_read(self, action: do.CommitDump) -> bool:
        """Whether what was left of this step turns out to be gone, or not the same in all."""
        return action.is_kept and self.reads.random() < self.unread


def is_end(action: do.Action) -> bool:
    """Whether ranks are told to note no more."""
    return isinstance(action, do.Tell) and isinstance(action.message, protocol.EndNotes)


class KeptWatch:
    """The promises, in the plainest way."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.broken = watch.broken
        self.before = JobState.NEW
        self.restart()

    def restart(self) -> None:
        """All ranks are started anew."""
        self.told: dict[int, protocol.NotesMeasured] = {}
        self.was_dear = self.has_ended = False
        self.begin()
        self.keepers: set[int] = set()

    def begin(self) -> None:
        """Ranks are started anew, all or some: what dead ones had is freed."""
        self.left: dict[int, tuple[int, ...]] = {}
        self.is_killing = False
        self.order: do.CommitDump | None = None
        self.unread: int | None = None  # a step that could not be read, nor could newer ones

    def heard(self, before: Job, event: ev.Event) -> None:
        self.before = before.state
        now = self.watch.node.job.state
        if isinstance(event, ev.WorkerExited) and event.attempt == self.watch.attempt:
            self.left.setdefault(event.rank, event.kept)
        if isinstance(event, protocol.Registered) and event.attempt == self.watch.attempt:
            is_kept = event.keeper and not self.has_ended  # the agent tells it so at once
            (self.keepers.add if is_kept else self.keepers.discard)(event.rank)
        if isinstance(event, protocol.NotesMeasured) and event.attempt == self.watch.attempt:
            self.measured(event)
        is_next = self.is_unread(event)
        is_read = self.before in TRAINING or (self.is_killing and self.before is JobState.STOPPING)
        is_read |= is_next
        if self.before in TRAINING and now is JobState.STOPPING and self.is_silent_lost():
            self.broken(f"{event}, and nobody reads what {self.silent()} hold")
        if not (is_read and now in OVER) or self.watch.stop.is_now or self.watch.dump.full:
            return
        if self.order is None and (due := self.due()):
            self.broken(f"{now} at {event}, and step {due} is not read in the memory of the dead")
        if (self.is_killing or is_next) and (copy := self.watch.copies.due()):
            self.broken(f"{now} at {event}, and {copy} is not saved")

    def is_unread(self, event: ev.Event) -> bool:
        """Whether the step that was to be read is not there, after all."""
        order = self.order
        is_answer = isinstance(event, ev.CommitFailed) and event.is_state and order is not None
        if (
            not is_answer
            or event.dump_id != order.dump_id
            or self.before is not JobState.COMMITTING
        ):
            return False
        self.unread, self.order = order.step, None
        return True

    def measured(self, event: protocol.NotesMeasured) -> None:
        """All ranks end their notes together, as soon as one of the job's steps is held up."""
        mode, running = self.watch.node.policy.dump.copies, self.watch.running
        if event.rank not in running or mode is not CopyMode.AUTO:
            return
        self.told[event.rank] = event
        self.was_dear |= self.is_dear()
        ended = [each for each in self.watch.actions if is_end(each)]
        if ended and self.before is not JobState.RUNNING:
            self.broken(f"{ended} after {event}")
        if ended and any(self.left.values()):
            self.broken(f"{ended}, and what {self.left} holds is freed")
        if ended and not self.was_dear:
            self.broken(f"{ended}, but notes are cheap: {self.told}")
        is_calm = self.before is JobState.RUNNING and not any(self.left.values())
        if self.keepers and is_calm and self.was_dear:
            if not ended or {*ended[0].ranks} != running:
                self.broken(f"{running} note on, and that is dear: {self.told}")
            self.keepers.clear()
            self.has_ended = True

    def is_dear(self) -> bool:
        """For one of them."""
        if any(each.why_not for each in self.told.values()):
            return True
        if {*self.watch.node.policy.ranks} - self.told.keys():
            return False
        told = self.told.values()
        return max(e.cost_s for e in told) > 0.005 * min(e.step_s for e in told)

    def may_kill(self, action: do.SignalRanks) -> bool:
        """Whether those that live are killed so that what they hold can be read with the rest."""
        is_meant = {*action.ranks} == self.watch.running <= self.keepers
        is_needed = any(self.left.values()) or self.silent() or self.watch.dump.failed
        self.is_killing |= is_meant and bool(is_needed)
        return self.is_killing

    def silent(self) -> set[int]:
        """Who was to answer, or to write, and is not known to have done or refused so."""
        watch, dump = self.watch, self.watch.dump
        stuck = dump.failed if isinstance(watch.event, ev.DeadlinePassed) else set()
        return watch.running & (
            watch.replacing.hung | stuck | (dump.reachable() - dump.frozen.keys())
        )

    def is_silent_lost(self) -> bool:
        """Whether ranks are asked to exit that cannot hear it, and what they hold is of use."""
        watch = self.watch
        killed = any(isinstance(e, do.SignalRanks) and e.signum == SIGKILL for e in watch.actions)
        is_late = isinstance(watch.event, ev.DeadlinePassed) and not watch.stop.is_now
        is_all = len(watch.heard_of) == len(watch.node.policy.ranks)
        is_all &= watch.running <= self.keepers and is_late and not killed
        there = watch.running | {rank for rank, steps in self.left.items() if steps}
        is_all &= watch.same.is_known or not watch.same.awaited
        is_all &= self.before is JobState.FREEZING or watch.dump.step > watch.dump.saved
        is_whole = all(there & group for group in watch.same.alike())
        return is_all and is_whole and bool(self.silent()) and not watch.dump.full

    def due(self) -> int:
        """The newest step that they hold together, if it is newer than what is saved; 0: none."""
        watch = self.watch
        if watch.running or (watch.same.awaited and not watch.same.is_known):
            return 0
        held = [
            {step for rank in group for step in self.left.get(rank, ())}
            for group in watch.same.alike()
        ]
        steps = set.intersection(*held)
        step = max((each for each in steps if self.unread is None or each < self.unread), default=0)
        return step if step > max(watch.dump.saved, 0) else 0

    def check(self, action: do.CommitDump) -> None:
        """Where none lives, what they have left, and not twice; the copy if that is as new."""
        watch, dump, copy = self.watch, self.watch.dump, self.watch.copies.due()
        if watch.running or action.step != self.due():
            self.broken(f"{action}, but {watch.running} live and {self.left} is left")
        if copy is not None and copy.step >= action.step:
            self.broken(f"{action}, but {copy} is as new")
        for (rank,), group in zip(action.variants, self.parts(action), strict=True):
            if rank not in group or action.step not in self.left[rank]:
                self.broken(f"{action}, but {self.left} is left")
        if self.order is not None and action.dump_id != self.order.dump_id:
            self.broken(f"{action} after {self.order}")
        if action.is_disputed or action.odd or action.is_copy or not action.from_memory:
            self.broken(f"{action} is not what was left")
        if self.order is None:
            dump.begin(action.dump_id)
        if dump.commit is not None or action.place != len(dump.full):
            self.broken(f"{action} twice, or places {dump.full} are full")
        self.order, dump.open, dump.is_fall = action, True, True
        dump.step, dump.commit = action.step, action
        watch.replacing.is_begun = True

    def parts(self, action: do.CommitDump) -> list[set[int]]:
        """The groups, in the order of who writes for them."""
        every = self.watch.same.alike()
        return [next((g for g in every if each[0] in g), set()) for each in action.variants]
