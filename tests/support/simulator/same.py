"""The part of the simulated node in which ranks say what they hold, and what the controller promises then.

A schedule's ranks say nothing, hold the same, hold parts of their own, share parts in replica groups, or
hold the same until one is replaced: a script that keeps something for itself. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import itemgetter
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
        self.has_boxes = replicas.node.has_boxes
        if self.has_boxes:
            self.kind = CUT
        self.newcomers: set[int] = set()

    @property
    def are_awaited(self) -> bool:
        return self.kind != SILENT

    def texts(self, rank: int) -> dict[str, str]:
        """What this rank holds, by the tensors' names."""
        count = len(self.node.policy.ranks)
        is_cut = self.kind == CUT or (self.is_wide and count > WIDE)
        if self.has_boxes:
            return {name: f"part {of[rank]}" for name, of in self.boxes(count).items()}
        part = rank % self.parts if is_cut else rank if self.kind == OWN else 0
        return {"w": f"part {part}"}

    @cache  # noqa: B019  as long as the schedule
    def boxes(self, count: int) -> dict[str, list[int]]:
        """By tensor and rank, which box of it."""
        rng = Random(f"boxes {self.node.seed}")
        names = "abcd"[: rng.choice((2, 2, 3, 4))]
        found = {}
        for name in names:
            # like the dimensions of a mesh, or anything
            every = [rank // 2 % 2 for rank in range(count)], [rank % 2 for rank in range(count)]
            ways = (*every, [rng.randrange(rng.choice((1, 2, 2, 3))) for _ in range(count)])
            found[name] = rng.choice(ways)
        return found

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
            texts = self.texts(process.rank)
            if self.kind == FORGETFUL:
                texts["lr"] = f"={0.1 * (1 + (process.rank in self.newcomers))}"
            said = protocol.Fingerprinted(process.rank, attempt, step, texts)
            self.replicas.say(process, said)


class SameWatch:
    """The promises, in the plainest way.

    A part of the state is what a set of ranks holds of some tensor, for the smallest sets that a rank is in. A rank that
    is in several parts has a seat in each, whose number is the rank's plus the count of ranks for each earlier part.
    """

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
        self.blocks: dict[str, list[set[int]]] = {}  # name -> the ranks that hold it alike
        self.parts: list[list[int]] = []  # once it is known that not all hold the same
        self.seats: list[set[int]] = []  # of each part
        self.said: dict[int, dict[int, dict[str, str]]] = {}
        self.trial: do.ReplaceRanks | None = None
        self.had: do.CommitDump | None = None

    def begin_round(self, action: do.ReplaceRanks) -> None:
        if self.has_diverged or not self.can_replace():
            self.broken(f"{action}, but ranks do not hold the same")
        self.said = {}
        self.trial = action if self.awaited else None
        self.had = self.watch.dump.had
        self.divide()

    def divide(self) -> None:
        """Find the parts."""
        everybody = set(self.node.policy.ranks)
        found: set[tuple[int, ...]] = set()
        for rank in everybody:
            held = [block for blocks in self.blocks.values() for block in blocks if rank in block]
            smallest = [one for one in held if not any(other < one for other in held)]
            found |= {tuple(sorted(each)) for each in smallest}
        self.parts = [list(each) for each in sorted(found)]
        if self.parts == [sorted(everybody)]:
            self.parts = []
        had, self.seats = dict.fromkeys(everybody, 0), []
        for part in self.parts:
            self.seats.append({rank + len(everybody) * had[rank] for rank in part})
            for rank in part:
                had[rank] += 1

    def alike(self) -> list[set[int]]:
        """Ranks that hold the same of everything."""
        found = [set(self.node.policy.ranks)]
        for blocks in self.blocks.values():
            found = [both for one in found for other in blocks if (both := one & other)]
        return sorted(found, key=min)

    def rank_of(self, seat: int) -> int:
        return seat % len(self.node.policy.ranks)

    def seats_of(self, ranks: Iterable[int]) -> set[int]:
        """All seats of some ranks."""
        if not self.seats:
            return set(ranks)
        mine = set(ranks)
        return {seat for seats in self.seats for seat in seats if self.rank_of(seat) in mine}

    def seat(self, event: protocol.Written | protocol.Digested | protocol.SaveFailed) -> int:
        return int(event.rank + len(self.node.policy.ranks) * event.share)

    def no_holder(self) -> bool:
        return bool(self.parts) or (bool(self.awaited) and not self.is_known)

    def replicas(self) -> list[set[int]]:
        """Seats that can save for each other, as far as is known."""
        everybody = set(self.node.policy.ranks)
        if self.no_holder():
            return self.seats or [{rank} for rank in everybody]
        return [everybody]

    def sharing(self) -> list[set[int]]:
        """Seats that share the writing."""
        return self.seats or [set(self.node.policy.ranks)]

    def covers(self, ranks: set[int]) -> bool:
        """Whether each box of each tensor has one of these ranks, if these hold all that they have."""
        if not self.no_holder():
            return bool(ranks)
        everybody = set(self.node.policy.ranks)
        if not self.parts:
            return ranks >= everybody
        return all(ranks & block for blocks in self.blocks.values() for block in blocks)

    def can_replace(self) -> bool:
        has_replicas = bool(self.parts) and all(len(part) > 1 for part in self.parts)
        return (has_replicas or not self.no_holder()) and not self.has_diverged

    def keeps_memory(self) -> bool:
        return self.trial is not None and self.node.job.state in TRAINING

    def may_give_up(self) -> bool:
        """Whether a dump may be abandoned although ranks could write what they hold."""
        return self.has_diverged or not self.covers(self.watch.dump.able_ranks())

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
        said[event.rank] = event.texts
        are_all = len(said) == len(self.node.policy.ranks)
        if self.trial is None:
            self.is_known |= are_all
            if are_all:
                self.note(said)
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
            self.broken(f"{event}: undone, but every replica is alike")

    def note(self, said: dict[int, dict[str, str]]) -> None:
        """All have reported a step; what is being written has the parts of before, if ranks have several."""
        for name in said[0]:
            found = [
                {r for r in said if said[r][name] == text}
                for text in {*map(itemgetter(name), said.values())}
            ]
            known = self.blocks.get(name, [set(said)])
            self.blocks[name] = [both for one in known for other in found if (both := one & other)]
        before = self.parts, self.seats
        self.divide()
        count = len(self.node.policy.ranks)
        are_shared = any(seat >= count for seats in (*before[1], *self.seats) for seat in seats)
        if self.node.job.state in {JobState.DUMPING, JobState.COMMITTING} and are_shared:
            self.parts, self.seats = before

    def differ_inside(self, said: dict[int, dict[str, str]]) -> bool:
        """Whether two that held something alike said something different of it."""
        others = self.parts or [list(self.node.policy.ranks)]
        return any(
            len({said[rank][name] for rank in block if rank in said}) > 1
            for name in next(iter(said.values()))
            for block in (self.cut(name) or others)
        )

    def cut(self, name: str) -> list[set[int]]:
        """Who holds a tensor alike, if not all do."""
        blocks = self.blocks.get(name, [])
        return blocks if len(blocks) > 1 else []

    def undo(self, event: protocol.Fingerprinted) -> None:
        """Nobody goes on with replicas that differ."""
        if self.node.job.state not in {JobState.COMMITTING, JobState.STOPPING}:
            self.broken(f"{event}: ranks differ after a replacement, and train on")
        watch, dump = self.watch, self.watch.dump
        watch.was_frozen = True
        watch.stop.was_disturbed = True
        assert self.trial is not None
        dump.memory, dump.had, dump.commit, dump.is_fall = self.trial.path, self.had, None, False

    def check_save(self, action: do.SaveRanks, seats: set[int]) -> None:
        ranks = {*map(self.rank_of, seats)}
        if self.no_holder() and not self.covers(ranks):
            self.broken(f"{action}, but nobody holds some part of {self.parts}")
