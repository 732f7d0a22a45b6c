"""The part of the simulated node in which ranks say what they hold, and what the controller promises then.

A schedule's ranks say nothing, hold the same, hold parts of their own, share parts in replica groups, or
hold the same until one is replaced: a script that keeps something for itself. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import Job
from agent.controller.states import JobState
from support.simulator.kinds import is_order
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.node import Process
    from support.simulator.promises import Watch
    from support.simulator.replicas import Replicas, Training

SILENT, EQUAL, OWN, CUT, FORGETFUL = "silent", "equal", "own", "cut", "forgetful"
TRAINING = {JobState.RUNNING, JobState.HOLDING, JobState.FREEZING, JobState.DUMPING}
COMMITS = (1, 2)  # that are reported
WIDE = 3  # with more ranks there can be replica groups of which none is alone


class Reports:
    """What ranks say that they hold, in one schedule."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.node = replicas.node
        self.rng = Random(f"same {replicas.node.seed}")
        kinds = (*[SILENT] * 7, *[EQUAL] * 6, OWN, CUT, CUT, *[FORGETFUL] * 4)
        self.kind = self.rng.choice(kinds)
        self.parts = self.rng.choice((2, 2, 2, 3))  # if they share them
        # a job of many ranks shares them in any case
        self.is_wide = self.kind in {EQUAL, FORGETFUL} and self.rng.random() < 0.5
        self.newcomers: set[int] = set()

    @property
    def are_awaited(self) -> bool:
        return self.kind != SILENT

    def part(self, rank: int) -> int:
        """Which part of the state this rank holds."""
        is_wide = self.is_wide and len(self.node.policy.ranks) > WIDE
        if self.kind == CUT or is_wide:
            return rank % self.parts
        return rank if self.kind == OWN else 0

    def began(self, training: Training) -> None:
        """All have begun: they come to their first commits."""
        for commit in COMMITS if self.are_awaited else ():
            self.node.after(commit / training.rate, self.committed, training, commit)

    def committed(self, training: Training, commit: int) -> None:
        if training is self.replicas.training and training.stalled_at is None:
            for process in self.node.processes.values():
                told = process, process.knows, training.base + commit
                self.node.after(0.1 * self.rng.random(), self.say, *told)

    def say(self, process: Process, attempt: int, step: int) -> None:
        is_here = process.alive and process.is_registered and process.is_linked
        if is_here and not process.is_hung and process.knows == attempt:
            texts = {"w": f"part {self.part(process.rank)}"}
            if self.kind == FORGETFUL:
                texts["lr"] = f"={0.1 * (1 + (process.rank in self.newcomers))}"
            said = protocol.Fingerprinted(process.rank, attempt, step, texts)
            self.replicas.say(process, said)


class SameWatch:
    """The promises, in the plainest way."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.node = watch.node
        self.broken = watch.broken
        self.has_diverged = False  # ever
        self.begin()

    def begin(self) -> None:
        """All ranks are started anew."""
        self.awaited: set[int] = set()
        self.is_known = False
        self.groups: list[set[int]] = []  # that hold the same, once it is known that not all do
        self.said: dict[int, dict[int, object]] = {}
        self.trial: do.ReplaceRanks | None = None
        self.had: do.CommitDump | None = None

    def begin_round(self, action: do.ReplaceRanks) -> None:
        if self.has_diverged or not self.can_replace():
            self.broken(f"{action}, but ranks do not hold the same")
        self.said = {}
        self.trial = action if self.awaited else None
        self.had = self.watch.dump.had

    def no_holder(self) -> bool:
        return bool(self.groups) or (bool(self.awaited) and not self.is_known)

    def replicas(self) -> list[set[int]]:
        """Ranks that can save for each other, as far as is known."""
        everybody = set(self.node.policy.ranks)
        if self.no_holder():
            return self.groups or [{rank} for rank in everybody]
        return [everybody]

    def sharing(self) -> list[set[int]]:
        """Ranks that share the writing."""
        return self.groups or [set(self.node.policy.ranks)]

    def covers(self, ranks: set[int]) -> bool:
        return all(ranks & group for group in self.replicas())

    def can_replace(self) -> bool:
        has_replicas = bool(self.groups) and all(len(group) > 1 for group in self.groups)
        return (has_replicas or not self.no_holder()) and not self.has_diverged

    def keeps_memory(self) -> bool:
        return self.trial is not None and self.node.job.state in TRAINING

    def may_give_up(self) -> bool:
        """Whether a dump may be abandoned although ranks could write what they hold."""
        return self.has_diverged or not self.covers(self.watch.dump.holders())

    def heard(self, before: Job, event: ev.Event, actions: Sequence[do.Action]) -> None:
        match event:
            case protocol.Registered() if self.watch.dump.is_alive(event) and event.compares:
                self.awaited.add(event.rank)
            case protocol.Fingerprinted() if self.watch.dump.is_alive(event):
                self.compare(before, event, actions)

    def compare(
        self, before: Job, event: protocol.Fingerprinted, actions: Sequence[do.Action]
    ) -> None:
        said = self.said.setdefault(event.step, {})
        said[event.rank] = tuple(event.texts.items())
        are_all, differ = len(said) == len(self.node.policy.ranks), len(set(said.values())) > 1
        if self.trial is None:
            self.is_known |= are_all
            if are_all and differ:
                found = [{r for r in said if said[r] == text} for text in {*said.values()}]
                self.groups = [a & b for a in self.sharing() for b in found if a & b]
        elif self.differ_inside(said) and not self.has_diverged:
            self.has_diverged = True
            if before.state in TRAINING:
                self.undo(event)
        elif (
            are_all
            and not self.differ_inside(said)
            and event.step >= self.trial.step + max(COMMITS)
        ):
            self.trial = None
            freed = [each for each in actions if is_order(each, do.ForgetMemory)]
            if before.state is JobState.RUNNING and not freed:
                self.broken(f"{event}: all hold the same, and the memory is kept")
        if self.node.job.diverged and not self.has_diverged:
            self.broken(f"{event}: undone, but every replica group is alike")

    def differ_inside(self, said: dict[int, object]) -> bool:
        """Whether two of a replica group said something different."""
        of = ({said[rank] for rank in group if rank in said} for group in self.sharing())
        return any(len(each) > 1 for each in of)

    def undo(self, event: protocol.Fingerprinted) -> None:
        """Nobody goes on with replicas that differ."""
        if self.node.job.state not in {JobState.COMMITTING, JobState.STOPPING}:
            self.broken(f"{event}: ranks differ after a replacement, and train on")
        watch, dump = self.watch, self.watch.dump
        watch.was_frozen = True
        watch.stop.was_disturbed = True
        assert self.trial is not None
        dump.memory, dump.had, dump.commit, dump.is_fall = self.trial.path, self.had, None, False

    def check_save(self, action: do.SaveRanks, ranks: set[int]) -> None:
        if self.no_holder() and not self.covers(ranks):
            lost = [sorted(group) for group in self.replicas() if not group & ranks]
            self.broken(f"{action}, but nobody holds the part of {lost}")
