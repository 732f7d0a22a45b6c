"""The part of the simulated node that has hooks: ranks train in lock-step, freeze, write, and a disk keeps it.

What is true stands here: which step a rank's memory really holds, whether it is whole, which bits flipped,
what a file on the disk is made of and which dumps are complete. The controller only hears of it. Not a test
itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from support.simulator.climate import climate
from support.simulator.copies import Copies
from support.simulator.exits import Exits
from support.simulator.rejoins import Rejoins
from support.simulator.same import Reports
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.node import Node, Process

PEER_GONE = "RuntimeError: Connection closed by peer"
LONGEST_SAVE = 3.0  # times the patience with a dump that makes progress
OLD_PATH, OLD_STEP = "/old", 7  # what `msrun --resume` found


@dataclass(slots=True)
class Training:
    """An attempt's lock-step: the step that all have reached, until somebody stops."""

    base: int  # resumed from
    rate: float  # steps a second
    missing: int  # ranks that have not begun
    began_at: float | None = None
    stalled_at: float | None = None
    is_barred: bool = False  # nobody begins before all are told to
    limit: float = float("inf")  # the last step of all, or that all can come to: some stay there

    def step(self, now: float) -> int:
        if self.began_at is None:
            return self.base
        end = now if self.stalled_at is None else self.stalled_at
        return int(min(self.base + int((end - self.began_at) * self.rate), self.limit))


@dataclass(frozen=True, slots=True)
class File:
    """A rank's part of a dump, complete on disk."""

    round: int
    step: int
    parts: int
    digest: str


@dataclass(slots=True)
class Disk:
    files: dict[tuple[int, int, int], File] = field(default_factory=dict)  # dump, place, seat
    dumps: dict[str, int] = field(default_factory=dict)  # path -> step
    committing: do.CommitDump | None = None
    memory: tuple[str, int] | None = None  # what the agent's own memory holds, and of which step


class Replicas:
    """Ranks with hooks and the agent's disk, for one schedule."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.rng = node.rng
        self.climate = climate(node.rng, node.seed)
        if node.has_boxes:
            self.climate = replace(self.climate, hooks=1.0)
        self.no_memory = node.rng.random() < self.climate.no_memory
        self.disk = Disk()
        self.training = Training(0, 0.0, 0)
        self.is_searched = False
        self.asking: list[Process] = []
        self.errors = 0
        self.exits = Exits(self)
        self.rejoins = Rejoins(self)
        self.reports = Reports(self)
        self.copies = Copies(self)
        self.kept = self.copies.kept

    def begin(self, action: do.StartAttempt) -> None:
        base = 0 if action.resume is None else self.disk.dumps.get(action.resume, OLD_STEP)
        rate = self.rng.choice((0.05, 1.0, 2.0, 5.0))
        self.training = Training(base, rate, len(self.node.policy.ranks))
        self.kept.begin()
        self.reports.newcomers.clear()
        self.is_searched = action.resume is not None or self.climate.old == "nothing"
        self.asking = []

    def bar(self, base: int) -> None:
        """A round begins: all are to go on from `base`, and nobody does before all are there."""
        rate = self.rng.choice((0.05, 1.0, 2.0, 5.0))
        self.training = Training(base, rate, 0, is_barred=True)
        self.is_searched, self.asking = True, []

    # --- what ranks do by themselves

    def born(self, process: Process) -> None:
        """A rank registers a little later, and training begins when the last one is there."""
        process.has_hooks = self.rng.random() < self.climate.hooks
        self.node.after(self.rng.random(), self.join, process)
        if self.rng.random() < self.climate.hang:
            self.node.after(self.rng.random() * 15.0, self.rejoins.hang, process)

    def join(self, process: Process) -> None:
        training, node = self.training, self.node
        if not process.alive or process.attempt != node.job.attempt:
            return
        if training.is_barred:
            process.is_linked = process.has_hooks
            self.rejoins.arrive(process, process.attempt)
            return
        if process.has_hooks and not self.is_searched:
            self.asking.append(process)
            if len(self.asking) == 1:
                node.after(self.rng.random() * 2.0, self.searched, process.attempt)
            return
        if process.has_hooks:
            process.is_registered = process.is_linked = True
            told = process.rank, process.attempt, training.base, self.climate.fixed
            said = protocol.Registered(*told, self.reports.are_awaited)
            self.say(process, said._replace(keeper=self.kept.keeper()))
            if self.kept.is_on and not self.kept.is_asked:
                for _ in range(2):
                    node.after(2.0 + self.kept.costs.random() * 10.0, self.measure, process)
            if self.rng.random() < self.climate.cut:
                node.after(self.rng.random() * 20.0, self.cut, process)
        training.missing -= 1
        if not training.missing and training.stalled_at is None:
            training.began_at = node.now
            self.reports.began(training)
            self.copies.began(training)

    def measure(self, process: Process) -> None:
        """It notes, and says what that costs."""
        if process.alive and process.is_linked and not (self.kept.is_over or process.is_hung):
            self.say(process, self.kept.measured(process))

    def searched(self, attempt: int) -> None:
        """Whoever asked is told what to go on from; the controller hears of it before."""
        node = self.node
        if attempt != node.job.attempt or self.is_searched:
            return
        asked = [each for each in self.asking if each.announced_at <= node.now]
        if self.climate.old == "damage":
            ranks = tuple(each.rank for each in asked)
            node.tell(ev.StartRefused(attempt, "nothing can be trusted", ranks), node.now)
            return
        self.is_searched, self.training.base = True, OLD_STEP
        node.tell(ev.CheckpointFound(attempt, OLD_PATH, OLD_STEP), node.now)
        for process in self.asking:
            node.after(0.0, self.join, process)

    def cut(self, process: Process) -> None:
        if process.alive and process.is_linked:
            process.is_linked = False
            self.lost(process)

    def lost(self, process: Process) -> None:
        """The agent hears that a line broke, in the attempt that it counts the process to then."""

        def told() -> None:
            if process is node.processes[process.rank]:
                node.tell(ev.RankUnreachable(process.rank, process.attempt), node.now)

        node = self.node
        node.at(max(node.now + self.rng.random() * 0.3, process.announced_at), told)

    def end(self, process: Process, exit_code: int) -> None:
        """A rank's life ends by itself; one that is blocked in a collective does not come so far."""
        training = self.training
        is_stuck = training.stalled_at is not None or (
            training.is_barred and training.began_at is None
        )
        is_blocked = process.has_hooks and is_stuck
        if (exit_code == 0 and process.stays is not None) or process.is_hung:
            return
        if exit_code != 0 or not is_blocked or self.rng.random() < 0.1:
            self.fail(process, exit_code)

    def fail(self, process: Process, exit_code: int) -> None:
        """It leaves at once, or is held at its top with an exception."""
        rng = self.rng
        if not process.alive or process.is_held or process.is_hung:
            return
        if exit_code > 0 and process.is_linked and rng.random() < self.climate.raises:
            self.errors += 1  # no two are the same: a person would not be replaced into those
            self.hold(process, f"ValueError: bad value {self.errors}")
        else:
            self.node.die(process, exit_code)

    def hold(self, process: Process, error: str) -> None:
        """The main thread is held at its top; the hooks' thread still answers."""
        self.stall(process)
        process.is_held = True
        self.say(process, protocol.Raised(process.rank, process.knows, error))

    def died(self, process: Process, exit_code: int) -> None:
        """Its peers can finish no further step, and some hear that at once."""
        rng, node = self.rng, self.node
        if exit_code == 0 and self.training.stalled_at is None:
            if process.step is None:
                process.step = self.training.step(node.now)
            return  # trained to the end, or told to leave
        self.stall(process)
        if process.is_linked and rng.random() < 0.5:  # the kernel closes its socket
            process.is_linked = False
            self.lost(process)
        for peer in node.processes.values():
            if peer.alive and peer.is_registered and rng.random() < self.climate.gloo:
                node.after(rng.random() * 0.2, self.thrown_out, peer)

    def thrown_out(self, process: Process) -> None:
        if process.alive and not process.is_held and not process.is_hung:
            if process.is_linked:
                self.hold(process, PEER_GONE)
            else:
                self.node.die(process, 1)

    def stall(self, process: Process) -> None:
        """What this rank holds from now on, and that nobody gets further than one step more."""
        training, rng = self.training, self.rng
        if process.knows != self.node.job.attempt:
            return
        if training.stalled_at is None:
            training.stalled_at = self.node.now
            self.spread()
        if process.step is None:
            process.step = self.newest_commit()
            process.is_torn = rng.random() < self.climate.torn
            if process.stays is not None and process.step >= process.stays:
                process.step, process.is_torn = process.stays, False
            process.flip = rng.choice((1, 2)) if rng.random() < self.climate.flip else 0

    def newest_commit(self) -> int:
        """A rank's, if it goes no further."""
        training = self.training
        is_ahead = training.began_at is not None and self.rng.random() < self.climate.apart
        limit = min(training.limit, self.exits.limit())
        return int(min(training.step(self.node.now) + is_ahead, limit))

    def spread(self) -> None:
        """Failures come in groups: a node's memory is short, a switch breaks, people lose patience."""
        rng, node = self.rng, self.node
        if rng.random() < 0.15:
            node.stop_soon((1.0, 3.0))
        for peer in node.processes.values():
            if peer.alive and rng.random() < self.climate.chain:
                node.after(rng.random() * 3.0, node.die, peer, -9)

    def say(self, process: Process, event: ev.Event) -> None:
        """News never overtake those of the rank's birth; one another they may."""
        self.node.tell(event, max(self.node.now + self.rng.random() * 0.3, process.announced_at))

    # --- what ranks are told

    def perform(self, action: do.Action) -> None:  # noqa: C901  a row for each kind of action
        node = self.node
        match action:
            case do.Tell(message=protocol.Release()):
                self.let_leave([node.processes[rank] for rank in action.ranks], 1)
            case do.Tell(message=protocol.GoOn() | protocol.EndNotes()):
                self.rejoins.perform(action)
            case do.HoldRanks() | do.Tell():
                self.exits.perform(action)
            case do.ReplaceRanks() | do.ForgetMemory() | do.RemindReplaced():
                self.rejoins.perform(action)
            case do.FreezeRanks():
                for rank in action.ranks:
                    self.freeze(node.processes[rank], action)
            case do.SaveRanks(writers=writers):
                groups = action.groups or (writers,)
                parts = {seat: len(group) for group in groups for seat in group}
                for seat in (*writers, *action.digesters):
                    self.save(node.processes[self.rank_of(seat)], action, seat, parts.get(seat, 0))
                if self.climate.late:  # the agent writes every rank's private state meanwhile
                    after_s = 0.6 * node.policy.dump.stall_s
                    node.after(after_s, node.post, ev.DumpProgressed(action.dump_id))
            case do.CommitDump():
                self.commit(action)
            case do.AbandonDump():
                self.disk.committing = None
            case do.RefuseRanks():
                self.let_leave([node.processes[rank] for rank in action.ranks], 2)

    def let_leave(self, processes: list[Process], exit_code: int) -> None:
        for process in processes:
            if process.is_held or process in self.asking:
                self.node.after(self.rng.random(), self.node.die, process, exit_code)

    def freeze(self, process: Process, order: do.FreezeRanks) -> None:
        rng, node = self.rng, self.node
        if process.alive and process.is_linked:
            self.stall(process)
            if rng.random() >= self.climate.mute and not process.is_hung:
                longest_s = 0.3
                if rng.random() < self.climate.late:
                    longest_s = 2.0 * node.policy.dump.answer_s
                # as the pages show while the order is sent: all of what is true, or nothing yet
                steps = [each.step or 0 for each in node.processes.values()]
                limit = order.step or (max(steps) if node.seed % 3 == 0 else 0)
                if order.step:
                    node.after(rng.random() * longest_s / 2, self.go_on, process, limit)
                node.after(rng.random() * longest_s, self.frozen, process, order.dump_id, limit)

    def go_on(self, process: Process, step: int) -> None:
        """A rank that was held too early comes to the commit of others, or is torn on its way."""
        is_free = process.alive and not process.is_held and process.step is not None
        if is_free and process.step < step and self.rng.random() < 0.7:
            process.step, process.is_torn = step, self.rng.random() < self.climate.torn

    def frozen(self, process: Process, dump_id: int, limit: int) -> None:
        is_here = process.alive and process.is_linked and not process.is_hung
        if is_here and process.step is not None:
            why = "the update did not end" if process.is_torn else ""
            whole = not process.is_torn
            nbytes = (self.node.story.seed % 2) << 30
            about = process.rank, process.knows, dump_id, process.step, whole, why, nbytes, 0
            self.say(process, protocol.Frozen(*about, limit))

    def rank_of(self, seat: int) -> int:
        """Of a rank that has several parts of the state, each is ordered by itself."""
        return seat % len(self.node.policy.ranks)

    def holds(self, process: Process, order: do.SaveRanks, seat: int) -> str:
        """What its digest covers: the tensors of one part."""
        texts = self.reports.texts(process.rank)
        if order.parts:
            count = len(self.node.policy.ranks)
            mine = [part for part in order.parts if process.rank in part.ranks]
            without = mine[seat // count].without
            texts = {name: text for name, text in texts.items() if name not in without}
        flips = dict.fromkeys(list(self.reports.texts(process.rank))[:1], process.flip)
        return ",".join(f"{name}:{text}:{flips.get(name, 0)}" for name, text in texts.items())

    def save(self, process: Process, order: do.SaveRanks, seat: int, parts: int) -> None:
        """One order after the other: what the last one writes is what the file is."""
        rng, node = self.rng, self.node
        if rng.random() < self.climate.mute:
            process.busy_until = float("inf")
        took_s = rng.random() * 0.5
        if rng.random() < self.climate.late:
            took_s = rng.random() * LONGEST_SAVE * node.policy.dump.stall_s
        start = max(node.now, process.busy_until)
        process.busy_until = end = start + took_s
        if end == float("inf"):
            return
        pace_s = 0.6 * node.policy.dump.stall_s
        for tick in range(1, int(took_s / pace_s) + 1):
            node.at(start + tick * pace_s, self.progress, process, order.dump_id)
        node.at(end, self.saved, process, order, seat, parts)

    def progress(self, process: Process, dump_id: int) -> None:
        if process.alive and process.is_linked:
            self.node.post(protocol.Progress(process.rank, process.knows, dump_id, 1))

    def saved(self, process: Process, order: do.SaveRanks, seat: int, parts: int) -> None:
        if not process.alive or not process.is_linked:
            return
        rank, dump_id = process.rank, order.dump_id
        who = rank, process.knows, dump_id
        share = seat // len(self.node.policy.ranks)
        holds = process.step == order.step and not process.is_torn
        is_bad = self.no_memory if order.place == do.MEMORY else self.climate.bad[order.place]
        if parts and is_bad:
            event: ev.Event = protocol.SaveFailed(*who, "no space left", True, order.round, share)
        elif not holds or self.rng.random() < self.climate.failing:
            event = protocol.SaveFailed(*who, "out of memory", False, order.round, share)
        else:
            kind = "quick " if order.place == do.MEMORY else ""
            digest = f"{kind}{process.step}:{self.holds(process, order, seat)}"
            event = protocol.Digested(*who, digest, order.round, share)
            if parts:
                file = File(order.round, order.step, parts, digest)
                self.disk.files[dump_id, order.place, seat] = file
                event = protocol.Written(*who, "", 0, "", digest, order.round, share)
        self.say(process, event)

    def commit(self, action: do.CommitDump) -> None:
        rng, node = self.rng, self.node
        self.disk.committing = action
        if rng.random() < self.climate.mute:
            return
        took_s = rng.random() * 0.3
        if rng.random() < self.climate.late:
            took_s = rng.random() * 2.0 * node.policy.dump.stall_s
            node.after(took_s / 2, node.post, ev.DumpProgressed(action.dump_id))
        node.after(took_s, self.committed, action)

    def committed(self, action: do.CommitDump) -> None:
        """The answer to an order of one's own is heard once; that it came may be noticed late."""
        rng, node, disk = self.rng, self.node, self.disk
        if disk.committing is not action:  # given up before the rename
            return
        disk.committing = None
        if self.kept.cannot_read(action):
            why = "that of rank 0 is gone"
            node.post(ev.CommitFailed(action.dump_id, why, is_place=False, is_state=True))
            return
        if rng.random() < self.climate.no_commit:
            node.post(ev.CommitFailed(action.dump_id, "no space left", rng.random() < 0.7))
            return
        if action.from_memory and self.climate.bad[action.place]:
            node.post(ev.CommitFailed(action.dump_id, "no space left", True))
            return
        path = f"/place{action.place}/{action.dump_id}"
        if action.place == do.MEMORY:
            disk.memory = path, action.step
        else:
            disk.dumps[path] = action.step
        longest_s = 1.0 if rng.random() < self.climate.late else 0.0
        committed = ev.DumpCommitted(action.dump_id, path, is_early=action.is_early)
        node.tell(committed, node.now + rng.random() * longest_s)
        if action.is_early:
            self.copies.write(action, path, longest_s)
