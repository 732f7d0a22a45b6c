"""What the controller promises about saving, checked at every step of a simulated schedule.

Kept in the plainest way: what was told so far, beside what is true on the simulated disk. Not a test itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import Job
from agent.controller.states import JobState
from support.simulator.kinds import is_order
from support.simulator.memory_promises import check_fall, check_leaving
from support.simulator.replicas import OLD_PATH
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.promises import Watch

ENDING = (JobState.STOPPING, JobState.KILLING)
BEGUN = (JobState.STARTING, JobState.RUNNING)
ASKED = (JobState.HOLDING, JobState.FREEZING, JobState.DUMPING)
BUSY = (JobState.FREEZING, JobState.DUMPING, JobState.COMMITTING)


class DumpWatch:
    """The promises about freezing, dumping, committing, resuming and crash loops."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.node = watch.node
        self.broken = watch.broken
        # --- of an attempt
        self.registered: set[int] = set()
        self.cut: set[int] = set()
        self.held: set[int] = set()  # with an exception, as far as told
        self.newest = -1
        # --- of a dump
        self.last_id = 0
        self.open = False
        self.is_held = False  # ranks stay, and nothing is ordered to be written yet
        self.step = -1  # that is saved, in memory or on disk
        self.since = 0  # orders before are of another place, their digests of another kind
        self.memory = ""  # the path of a checkpoint that is complete there
        self.had: do.CommitDump | None = None  # its order
        self.is_fall = False  # it goes to disk
        self.frozen: dict[int, protocol.Frozen] = {}
        self.again: do.FreezeRanks | None = None  # those that were behind, and may go on
        self.behind: set[int] = set()  # those that have not answered to that
        self.is_late = False  # nobody is awaited to freeze any more
        self.orders: list[do.SaveRanks] = []
        self.asked: set[int] = set()  # for a digest or a part
        self.digests: dict[int, str] = {}
        self.written: dict[tuple[int, int], str] = {}  # rank, round
        self.stuck: Counter[int] = Counter()  # orders in a place
        self.failed: set[int] = set()  # as they said, or out of patience
        self.full: set[int] = set()  # places
        self.commit: do.CommitDump | None = None
        self.gave_up_commit = False
        # --- of the job
        self.path = self.node.job.resume
        self.saved = self.node.job.saved_step
        self.best = max(self.saved, 0)
        self.stalled = 0
        self.ever_registered = False
        self.is_refused = False
        self.is_disputed = False  # nobody knows which of the saved states is right
        self.paths: dict[int, str] = {}
        self.unwritten: set[str] = set()  # folders that can take nothing, as was heard

    def reachable(self) -> set[int]:
        return self.watch.running & self.registered - self.cut - self.watch.replacing.hung

    def holders(self) -> set[int]:
        """The seats of who can still write the step that is being saved."""
        return self.watch.same.seats_of(self.able_ranks())

    def able_ranks(self) -> set[int]:
        """Who can still write it."""
        step = self.step if self.step >= 0 else self.newest_covered()
        whole = {r for r, each in self.frozen.items() if each.is_whole and each.step == step}
        return whole & self.reachable() - self.failed

    def newest_covered(self) -> int:
        """Of which every part is held whole; else the newest that anybody holds whole."""
        alive, steps = self.reachable(), sorted({*self.steps()}, reverse=True)
        for step in steps:
            at = {r for r, each in self.frozen.items() if each.is_whole and each.step == step}
            if self.watch.same.covers(at & alive - self.failed):
                return step
        return max(steps, default=-1)

    def steps(self) -> list[int]:
        alive = self.reachable()
        return [each.step for r, each in self.frozen.items() if each.is_whole and r in alive]

    # --- what the controller was told

    def heard(self, before: Job, event: ev.Event) -> None:
        rank = getattr(event, "rank", None)
        match event:
            case ev.WorkerExited():
                self.reached(event.step)
            case ev.CheckpointFound() | ev.StartRefused() if self.is_now(event):
                self.searched(before, event)
            case protocol.Registered() if self.is_alive(event):
                self.registered.add(event.rank)
                self.cut.discard(event.rank)
                self.reached(event.step)
            case ev.RankUnreachable() if self.is_alive(event):
                self.cut.add(event.rank)
                self.failed |= {event.rank} if before.state is JobState.DUMPING else set()
            case protocol.Raised() if self.is_alive(event):
                self.raised(before, event)
            case ev.DumpCommitted() if event.dump_id == self.last_id:
                self.committed(event)
            case ev.CheckpointWritten() if event.why_not:
                self.unwritten.add(event.path)
            case ev.DeadlinePassed() if event.state is before.state and self.is_now(event):
                self.out_of_patience(event.state)
            case _ if self.is_asked and getattr(event, "dump_id", None) == self.last_id:
                self.answered(before, event, rank)

    @property
    def is_asked(self) -> bool:
        """Whether ranks may say what they hold."""
        return self.open or self.node.job.state is JobState.HOLDING or self.is_held

    def searched(self, before: Job, event: ev.CheckpointFound | ev.StartRefused) -> None:
        if isinstance(event, ev.StartRefused):
            self.is_refused = self.is_refused or before.state in BEGUN
            return
        if self.path is not None and event.step <= self.saved:
            return
        self.path, self.saved, self.best = event.path, event.step, max(self.best, event.step)
        if (self.node.job.resume, self.node.job.saved_step) != (self.path, self.saved):
            self.broken(f"{event} is forgotten")

    def is_now(self, event: Any) -> bool:
        return event.attempt == self.watch.attempt

    def is_alive(self, event: protocol.Registered | ev.RankUnreachable | protocol.Raised) -> bool:
        known = event.rank in self.watch.running or event.rank not in self.watch.heard_of
        return self.is_now(event) and known and event.rank not in self.watch.exits

    def raised(self, before: Job, event: protocol.Raised) -> None:
        state = self.node.job.state
        if before.state in ENDING and event.rank not in self.held:
            if not any(
                is_order(each, protocol.Release) and event.rank in each.ranks
                for each in self.watch.actions
            ):
                self.broken(f"rank {event.rank} is held for ever while the job is {state.value}")
        else:
            self.held.add(event.rank)

    def answered(self, before: Job, event: ev.Event, rank: int | None) -> None:
        match event:
            case protocol.Frozen() if before.state in ASKED and rank in self.watch.running:
                self.froze(before, event)
            case protocol.Written() if self.is_awaited(before, event):
                seat = self.watch.same.seat(event)
                self.digests[seat] = event.digest
                self.written[seat, event.round] = event.digest
            case protocol.Digested(round=number) if before.state is JobState.DUMPING:
                seat = self.watch.same.seat(event)
                if number >= self.since and seat in self.asked and self.is_asked_still(rank):
                    self.digests[seat] = event.digest
            case protocol.SaveFailed() if before.state is JobState.DUMPING:
                self.said_to_fail(event)
            case ev.CommitFailed() if before.state is JobState.COMMITTING and self.commit:
                if event.is_place or self.commit.place == do.MEMORY:
                    self.full.add(self.commit.place)
                else:
                    self.gave_up_commit = True
                self.commit = None

    def froze(self, before: Job, event: protocol.Frozen) -> None:
        """The first answer counts, and the one to a second order."""
        is_again = event.rank in self.behind and before.state is JobState.FREEZING
        if is_again and self.again is not None and event.limit >= self.again.step:
            self.behind.discard(event.rank)
            self.frozen[event.rank] = event
        elif event.rank not in self.frozen:
            self.frozen[event.rank] = event
        self.reached(event.step)

    def said_to_fail(self, event: protocol.SaveFailed) -> None:
        order = self.orders[-1] if self.orders else self.broken(f"{event}: nobody was asked")
        seat = self.watch.same.seat(event)
        is_writer = seat in order.writers
        if (is_writer and event.round != order.round) or event.round < self.since:
            return
        if is_writer and event.is_place and not self.complete(order.place):
            self.full.add(order.place)
        elif seat not in self.digests or is_writer:
            self.failed.add(event.rank)

    def is_asked_still(self, rank: int | None) -> bool:
        return rank in self.reachable() - self.failed

    def is_awaited(self, before: Job, event: protocol.Written) -> bool:
        order, seat = self.orders[-1] if self.orders else None, self.watch.same.seat(event)
        is_due = order is not None and seat in order.writers and event.round == order.round
        return before.state is JobState.DUMPING and is_due

    def out_of_patience(self, state: JobState) -> None:
        if state is JobState.FREEZING:
            self.is_late = True
        elif state is JobState.DUMPING and not self.orders:
            self.broken("nobody was asked to write")
        elif state is JobState.DUMPING:
            order = self.orders[-1]
            wrote = {seat for seat, number in self.written if number == order.round}
            rank_of = self.watch.same.rank_of
            writing = {
                *map(rank_of, {*order.writers} - wrote)
            } - self.failed  # nobody is stuck twice
            self.failed |= writing or {*map(rank_of, self.asked - self.digests.keys())}
            if writing and not self.complete(order.place):
                self.stuck[order.place] += 1
                if self.stuck[order.place] > 1 and order.place + 1 < self.node.policy.dump.places:
                    self.full.add(order.place)
        elif state is JobState.COMMITTING:
            self.gave_up_commit = True

    def complete(self, place: int) -> bool:
        """Whether a whole state is written there, as far as told."""

        def has(group: set[int]) -> bool:
            here = [each for each in self.orders if each.place == place]
            said = [
                {self.written.get((rank, each.round)) for rank in {*each.writers} & group}
                for each in here
            ]
            done = {next(iter(each)) for each in said if len(each) == 1}
            # what another group has written stands for what this one holds as well
            return bool((done - {None}) & {self.digests.get(rank) for rank in group})

        everything = set(self.node.policy.ranks)
        return has(everything) if not self.watch.same.parts else self.has_all(has)

    def has_all(self, has: Callable[[set[int]], bool]) -> bool:
        return all(has(seats) for seats in self.watch.same.seats)

    def committed(self, event: ev.DumpCommitted) -> None:
        is_memory = self.commit is None or self.commit.place == do.MEMORY
        if is_memory or event.path == self.memory:
            return
        if self.paths.setdefault(event.dump_id, event.path) != event.path:
            self.broken(f"two dumps have the id {event.dump_id}")
        assert self.commit is not None
        self.path, self.saved, self.open = event.path, self.commit.step, False
        self.is_disputed = self.commit.is_disputed
        if (self.node.job.resume, self.node.job.saved_step) != (self.path, self.saved):
            self.broken(f"{event} is forgotten")

    def reached(self, step: int | None) -> None:
        if step is not None:
            self.ever_registered = True
            self.newest = max(self.newest, step)

    # --- what the controller ordered

    def ordered(self, action: do.Action) -> None:
        match action:
            case do.FreezeRanks():
                self.freeze(action)
            case do.SaveRanks():
                self.save(action)
            case do.CommitDump():
                self.check_commit(action)
            case do.AbandonDump():
                self.abandon(action)
            case do.RefuseRanks():
                if not self.is_refused or set(action.ranks) - self.watch.running:
                    self.broken(f"{action}: nobody waits for that")
            case do.Tell(message=protocol.Release()):
                loose = set(action.ranks) - self.watch.running - self.held
                if loose or not action.ranks:
                    self.broken(f"{action}: ranks {sorted(loose)} are not held")

    def hold(self, dump_id: int) -> None:
        """Ranks are to stay at one step; it is saved under this id."""
        if self.open:
            self.broken(f"ranks are held while dump {self.last_id} is open")
        self.begin(dump_id)
        self.is_held = True

    def begin_round(self) -> None:
        """Of the last attempt only the step that was reached is known."""
        self.registered, self.cut, self.held = set(), set(), set()

    def freeze(self, action: do.FreezeRanks) -> None:
        if action.step:
            self.freeze_again(action)
            return
        if self.open or action.dump_id <= self.last_id:
            self.broken(f"{action} while dump {self.last_id} is open or known")
        if not action.ranks or set(action.ranks) != self.reachable():
            self.broken(f"{action}, but {sorted(self.reachable())} can be asked")
        self.begin(action.dump_id)
        self.open = True

    def freeze_again(self, action: do.FreezeRanks) -> None:
        """Once, to a step that others hold, and only those that did not know of it."""
        if not self.open or action.dump_id != self.last_id or self.again or self.orders:
            self.broken(f"{action}, but nobody is to be frozen once more")
        if not action.ranks or {*action.ranks} != self.left_behind():
            self.broken(f"{action}, but {sorted(self.left_behind())} are behind")
        if action.step != self.newest_covered():
            self.broken(f"{action}, but others hold {self.newest_covered()}")
        self.again, self.behind = action, {*action.ranks}

    def left_behind(self) -> set[int]:
        """Who was held before the step that is saved, and did not know of it."""
        step, able = self.newest_covered(), self.reachable() - self.held
        return {
            rank
            for rank, each in self.frozen.items()
            if rank in able and each.is_whole and max(each.step, each.limit) < step
        }

    def begin(self, dump_id: int) -> None:
        self.last_id, self.is_held = dump_id, False
        self.again, self.behind, self.is_late = None, set(), False
        self.frozen, self.orders, self.digests, self.written = {}, [], {}, {}
        self.stuck.clear()
        self.asked, self.failed, self.full = set(), set(), set()
        self.commit, self.gave_up_commit = None, False
        self.step, self.since, self.memory, self.had, self.is_fall = -1, 0, "", None, False

    def save(self, action: do.SaveRanks) -> None:
        ranks = {*action.writers, *action.digesters}
        if self.orders and self.orders[-1].place == do.MEMORY != action.place:
            check_leaving(self, action)
        first = not self.orders
        was_frozen = first and not self.is_held
        if was_frozen and not (self.again or self.is_late) and self.left_behind():
            self.broken(f"{action}, but {sorted(self.left_behind())} could go on to it")
        if was_frozen and not self.is_late and self.behind & self.reachable():
            self.broken(f"{action}, but {sorted(self.behind)} are on their way to it")
        if self.is_held:  # all stay at one step, and it is saved now
            self.open, self.is_held = True, False
        if not self.open or self.commit is not None or action.dump_id != self.last_id:
            self.broken(f"{action}: no such dump is being written")
        if not action.writers or len(ranks) < len(action.writers) + len(action.digesters):
            self.broken(f"{action}: a rank twice, or nobody writes")
        self.check_step(action)
        if first:
            self.watch.same.check_save(action, ranks)
        if ranks - self.holders() or (first and ranks != self.holders()):
            self.broken(f"{action}, but the holders are {sorted(self.holders())}")
        self.check_count(action, is_first=first)
        self.check_again(action)
        last = self.orders[-1].round if self.orders else self.since - 1
        place = min({0, 1, 2} - self.full)
        is_there = action.place == (place if place < self.node.policy.dump.places else -2)
        is_memory = action.place == do.MEMORY and do.MEMORY not in self.full
        if action.round != last + 1 or not (is_there or is_memory):
            self.broken(f"{action} after {last}, places {self.full} are full")
        self.orders.append(action)
        self.asked |= ranks

    def check_count(self, action: do.SaveRanks, *, is_first: bool) -> None:
        """Not more ranks write than are needed."""
        same, rules = self.watch.same, self.node.policy.dump
        is_last = action.place + 1 == rules.places
        is_stuck = is_last and self.stuck[action.place] > 0  # then all that are left try at once
        is_each = same.no_holder() and not (same.parts or is_first)  # nobody has compared them
        enough = rules.memory_writers if action.place == do.MEMORY else 1
        most = max(len(group & {*action.writers}) for group in same.sharing())
        if most > enough and not (rules.split or is_stuck or is_each):
            self.broken(f"{action}: {enough} are enough")

    def check_again(self, action: do.SaveRanks) -> None:
        """A file that is part of something complete is not replaced."""
        for each in self.orders if self.watch.same.parts else ():
            for group in (each.groups or (each.writers,)) if each.place == action.place else ():
                wrote = {self.written.get((rank, each.round)) for rank in group}
                if None not in wrote and len(wrote) == 1 and {*group} & {*action.writers}:
                    self.broken(f"{action}: ranks {sorted(group)} have written it")

    def check_step(self, action: do.SaveRanks) -> None:
        """The newest, on disk only if it is not there; and all of a dump is of one."""
        is_memory = action.place == do.MEMORY
        newest = self.newest_covered() if self.step < 0 else self.step
        if (action.step <= max(self.saved, 0) and not is_memory) or action.step != newest:
            self.broken(f"{action}: not the newest step, or a saved one")
        if self.step < 0 and is_memory != self.watch.replacing.can_begin(newest):
            self.broken(f"{action}: on disk or in memory, the other is due")
        self.step = action.step

    def check_commit(self, action: do.CommitDump) -> None:
        if action.is_copy:
            self.watch.copies.check(action)
            return
        if action.is_kept:
            self.watch.kept.check(action)
            return
        if action.from_memory:
            check_fall(self, action)
            return
        if not self.open or self.commit is not None or action.dump_id != self.last_id:
            self.broken(f"{action}: no such dump is being written")
        writers = [rank for variant in action.variants for rank in variant]
        if not action.variants or not all(action.variants) or len(writers) != len(set(writers)):
            self.broken(f"{action}: nobody wrote it, or twice")
        digests = [self.check_variant(action, variant) for variant in action.variants]
        if len(set(digests)) != len(digests):
            self.broken(f"{action}: the same state twice")
        still = self.watch.same.seats_of(self.reachable() - self.failed)
        reports = self.node.replicas.reports
        boxes = {
            f"{name}:{text}:"
            for rank in self.node.policy.ranks
            for name, text in reports.texts(rank).items()
            if reports.has_boxes and self.watch.same.is_known
        }
        if lacking := [box for box in boxes if not any(box in each for each in digests)]:
            self.broken(f"{action}, but nobody wrote {lacking}")
        owing = self.asked & still - self.digests.keys()
        if owing:
            self.broken(f"{action}, but ranks {sorted(owing)} have not said what they hold")
        self.check_vote(action, digests)
        self.commit = action

    def check_variant(self, action: do.CommitDump, variant: tuple[int, ...]) -> str:
        """Full coverage is what the disk says: every part, of one step and one state."""
        disk = self.node.replicas.disk
        files = [disk.files.get((action.dump_id, action.place, rank)) for rank in variant]
        parts = {(each.step, each.parts, each.digest, each.round) for each in files if each}
        expected = (action.step, len(variant))
        if None in files or len(parts) != 1 or next(iter(parts))[:2] != expected:
            self.broken(f"{action} without coverage: {files}")
        return next(iter(parts))[2]

    def check_vote(self, action: do.CommitDump, digests: Sequence[str]) -> None:
        said = f"{action}, but they said {self.digests}"
        wanted: set[str] = set()
        odd: list[int] = []
        is_disputed, groups = False, self.watch.same.replicas()
        for group in groups:
            votes = Counter(self.digests[r] for r in sorted(group) if r in self.digests)
            if not votes:
                self.broken(f"{action}, but nobody wrote the part of {sorted(group)}")
            best, count = votes.most_common(1)[0]
            is_settled = 2 * count > votes.total()
            is_disputed |= not is_settled
            able = self.holders()
            here = {d for d in votes if any(self.digests.get(r) == d for r in able)}
            kept = {best} if is_settled else here & {*votes} or ({*digests} & {*votes})
            if not kept <= set(digests):
                self.broken(said)
            wanted |= kept | ({*digests} & {*votes} if not is_settled else set())
            one = best if is_settled else digests[0] if len(digests) == 1 else None
            odd += [r for r in group if one is not None and self.digests.get(r, one) != one]
        odd = sorted({*map(self.watch.same.rank_of, odd)})
        if set(digests) != wanted or action.odd != tuple(odd):
            self.broken(said)
        if action.is_disputed != is_disputed:
            self.broken(f"{action}, is not disputed: each part is its own, {self.digests}")
        if is_disputed and len(groups) == 1:
            votes = Counter(self.digests.values())
            if list(digests) != sorted(digests, key=lambda d: -votes[d]):
                self.broken(said)
        if len(groups) > 1 and len(digests) > 1 and not is_disputed:
            of = {d: {r for g in groups for r in g if self.digests_of(g) == d} for d in digests}
            of = {d: {*map(self.watch.same.rank_of, each)} for d, each in of.items()}
            if [set(each) for each in action.holders] != [of[d] for d in digests]:
                self.broken(f"{action}, but its holders are {of}")

    def digests_of(self, group: set[int]) -> str:
        """What most of a replica group hold."""
        return Counter(self.digests[r] for r in group if r in self.digests).most_common(1)[0][0]

    def abandon(self, action: do.AbandonDump) -> None:
        if not self.open or action.dump_id != self.last_id:
            self.broken(f"{action}: no such dump is open")
        self.open = False
        if self.watch.stop.is_now or self.gave_up_commit:
            return
        if self.is_fall and len(self.full) < self.node.policy.dump.places:
            self.broken(f"{action}, but there are other places")
        if self.is_fall or 0 <= self.step <= max(self.saved, 0):
            return
        if self.watch.same.may_give_up():
            return
        if self.commit is not None:
            self.broken(f"{action} in the middle of its commit")
        if not self.orders:
            lost = [step for step in self.steps() if step > max(self.saved, 0)]
        else:
            of = [self.able(group) for group in self.watch.same.replicas()]
            lost = [rank for each in of for rank in each] if all(of) else []
        if lost and len(self.full - {do.MEMORY}) < self.node.policy.dump.places:
            self.broken(f"{action}, but {lost} could be saved")

    # --- attempts and the end

    def able(self, group: set[int]) -> set[int]:
        """Those of a replica group that hold what is right."""
        said = {r: self.digests[r] for r in group if r in self.digests}
        votes = Counter(said.values()).most_common(1)
        right = votes[0][0] if votes and 2 * votes[0][1] > len(said) else None
        return {r for r in self.holders() & group if right in {None, said.get(r, right)}}

    def start(self, action: do.StartAttempt) -> None:
        if self.is_disputed:
            self.broken(f"{action}, but nobody knows which replica is right")
        if self.open:
            self.broken(f"{action} while dump {self.last_id} is open")
        if action.resume != self.path:
            self.broken(f"{action}, but the newest dump is {self.path}")
        if self.watch.starts > 0 and self.is_hopeless(self.watch.starts - 1):
            self.broken(f"{action}: a crash loop")
        self.registered, self.cut, self.held, self.newest = set(), set(), set(), -1

    def is_hopeless(self, attempt: int) -> bool:
        """At an attempt's end: whether another one would meet the same."""
        policy, self_first = self.node.policy, attempt == 0
        if self.is_refused or self.is_disputed:
            return True
        if not self.ever_registered:
            return False
        self.stalled = 0 if self.newest > self.best else self.stalled + 1
        self.best = max(self.best, self.newest)
        no_commit = self_first and self.best == 0 and not policy.dump.restarts_explicit
        return self.stalled >= policy.stalls or no_commit

    def end(self, finish: do.Finish) -> None:
        if self.open:
            self.broken(f"{finish} while dump {self.last_id} is open")
        if finish.state is JobState.SUCCEEDED:
            return
        where = "in memory only" if self.path in self.unwritten else self.path
        if where is not None and where not in finish.reason:
            self.broken(f"{finish} does not name {self.path}")
        if self.ever_registered and "step" not in finish.reason and "commit" not in finish.reason:
            self.broken(f"{finish} does not say what became of the state")
        last = self.watch.starts - 1
        is_early = last < self.node.policy.max_restarts and not self.watch.stop.is_asked
        if is_early and "cannot be killed" not in finish.reason and not self.is_hopeless(last):
            self.broken(f"{finish} while the budget is left")

    def over(self) -> None:
        dumps = self.node.replicas.disk.dumps
        if self.path not in {None, OLD_PATH} and dumps.get(self.path) != self.saved:
            self.broken(f"{self.path} is not what it was said to be")
        if len(dumps) > self.last_id:
            self.broken(f"{len(dumps)} dumps of {self.last_id} ids")
