"""No decision is worse than linear in ranks, and what a whole replacement takes is nearly so."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from signal import SIGKILL, SIGTERM
from time import process_time
from typing import get_args

import pytest
from support.histories.plain import rules

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import Answer, absorb, decide
from agent.controller.job import Job
from agent.controller.states import JobState
from worker_hooks.contract import protocol

FEW, MANY = 1024, 4096
ATTEMPTS = 12
AGAIN = 40  # of what looked slow, alone
LEAST_S = 20e-6  # shorter times are noise
MOST_PER_EVENT = 6.0  # times as long with four times the ranks
LEAST_QUICKER = 25  # times as quick as a decision is what is taken in a row
HOLDS = {"model": "12", "crc32": "abcdef"}


class Ranks:
    """A job of so many ranks, and how long its decisions take, by kind of event."""

    def __init__(self, count):
        self.count = count
        self.job = Job(rules(ranks=tuple(range(count)), max_restarts=1, is_on=True))
        self.took_s = defaultdict(list)
        self.heard = Counter()
        self.total_s = 0.0
        self.actions = []
        self.points = []  # the job in each state, and amid the answers to what it asked

    def hear(self, *events):
        for event in events:
            began_s = process_time()
            decision = decide(self.job, event)
            took_s = process_time() - began_s
            kind = type(event).__name__
            self.took_s[kind].append(took_s)
            self.total_s += took_s
            self.job = decision.job
            self.actions += decision.actions
            self.heard[kind, self.job.state] += 1
            if self.heard[kind, self.job.state] in {1, self.count - 3}:
                self.points.append((f"{kind} while {self.job.state.value}", self.job))

    def last(self, kind):
        return [each for each in self.actions if isinstance(each, kind)][-1]

    def all(self, kind, *about):
        return [kind(rank, *about) for rank in range(self.count)]

    def compare(self, attempt, *steps):
        for step in steps:
            self.hear(*self.all(protocol.Fingerprinted, attempt, step, HOLDS))

    def save(self, step, asked):
        dump = self.job.dump.id
        self.hear(
            *(protocol.Frozen(rank, 0, dump, step, is_whole=True, nbytes=1 << 30) for rank in asked)
        )
        order = self.last(do.SaveRanks)
        self.hear(*(protocol.Digested(rank, 0, dump, "d", order.round) for rank in order.digesters))
        for rank in order.writers:
            self.hear(protocol.Written(rank, 0, dump, "", 1, "", "d", order.round))

    def train(self):
        self.hear(ev.LaunchRequested())
        self.hear(*(ev.WorkerStarted(rank, 0, 1000 + rank) for rank in range(self.count)))
        self.hear(*self.all(protocol.Registered, 0, 0, "", True))
        self.compare(0, 1, 2)

    def replace(self, lost=3):
        """One is killed, all others raise in their collectives; it is replaced."""
        left = [rank for rank in range(self.count) if rank != lost]
        self.hear(ev.WorkerExited(lost, 0, -9, 412))
        self.hear(*(protocol.Raised(rank, 0, "lost a peer") for rank in left))
        self.save(412, left)
        assert self.job.state is JobState.COMMITTING
        self.hear(ev.DumpCommitted(self.job.dump.id, "/memory"))
        self.hear(ev.WorkerStarted(lost, 1, 9))
        self.hear(*(protocol.Rejoining(rank, 1) for rank in left))
        self.hear(*self.all(protocol.Registered, 1, 412, "", True))
        assert self.job.state is JobState.RUNNING
        self.compare(1, 413, 414)

    def leave(self):
        """A graceful exit."""
        self.hear(ev.StopRequested(SIGTERM))
        dump = self.job.dump.id
        self.hear(*self.all(protocol.Standing, 1, dump, 500))
        self.save(500, range(self.count))
        self.hear(ev.DumpCommitted(dump, "/saved"))
        self.hear(*(ev.WorkerExited(rank, 1, 0) for rank in range(self.count)))
        assert self.job.state is JobState.STOPPED, self.job.state


class InRows(Ranks):
    """The same, where answers are taken in rows as far as they can be."""

    def __init__(self, count):
        super().__init__(count)
        self.taken_s = {}  # by kind, for each that was taken

    def hear(self, *events):
        if len(events) > 1 and isinstance(events[0], Answer):
            began_s = process_time()
            self.job, count = absorb(self.job, events[:-1])
            if count:
                self.taken_s[type(events[0]).__name__] = (process_time() - began_s) / count
            events = events[count:]
        super().hear(*events)


def life(count, kind=Ranks):
    ranks = kind(count)
    gc.disable()  # it would come amid the same decision in each life, and search all that tests left
    try:
        ranks.train()
        ranks.replace()
        ranks.leave()
    finally:
        gc.enable()
    return ranks


class Lives:
    """Of few ranks and of many, in turn: all tests look at the same, and live more if need be."""

    def __init__(self):
        self.few, self.many = [], []
        self.more()
        self.more()

    def more(self):
        self.few.append(life(FEW))
        self.many.append(life(MANY))

    def times(self):
        return {FEW: [each.took_s for each in self.few], MANY: [each.took_s for each in self.many]}

    def least_s(self):
        return (min(each.total_s for each in lives) for lives in (self.few, self.many))


@pytest.fixture(scope="module")
def lives():
    return Lives()


def worst_s(times):
    """The slowest decision of a kind, each taken as it was when nothing disturbed it.

    A busy machine makes some of thousands of decisions look slow, and others in each life.
    """
    return max(map(min, zip(*times, strict=True)))


def too_slow(lives):
    found = {}
    for kind in lives[FEW][0]:
        few_s, many_s = (worst_s([each[kind] for each in lives[count]]) for count in (FEW, MANY))
        if many_s > MOST_PER_EVENT * max(few_s, LEAST_S):
            found[kind] = many_s / max(few_s, LEAST_S)
    return found


def test_no_kind_of_event_is_worse_than_linear_in_ranks(lives):
    for _ in range(ATTEMPTS):
        if not too_slow(lives.times()):
            return
        lives.more()
    assert too_slow(lives.times()) == {}


def test_what_is_slow_each_time_is_told_from_what_was_disturbed_once():
    slow = {FEW: [{"Digested": [0.0001] * 9}], MANY: [{"Digested": [0.0001] * 8 + [0.0007]}]}
    assert too_slow(slow) == {"Digested": pytest.approx(7.0)}
    slow[MANY].append({"Digested": [0.0001] * 9})  # it was the machine
    assert too_slow(slow) == {}


def test_a_whole_life_is_not_quadratic_in_ranks(lives):
    """Four times the ranks say four times as much; answers to each may not grow with them."""
    for _ in range(ATTEMPTS):
        few_s, many_s = lives.least_s()
        if many_s < 2 * MANY / FEW * few_s:
            return
        lives.more()
    raise AssertionError(few_s, many_s)


def test_what_is_taken_in_rows_costs_next_to_nothing():
    """Sets of all ranks, or new values for the job, made for each answer would take longer."""
    quicker = Counter()
    for _ in range(ATTEMPTS):
        rows, plain = life(FEW, InRows), life(FEW)
        for kind, taken_s in rows.taken_s.items():
            decided_s = sum(plain.took_s[kind]) / len(plain.took_s[kind])
            quicker[kind] = max(quicker[kind], decided_s / taken_s)
        if min(quicker.values()) > LEAST_QUICKER:
            break
    assert {kind for kind, times in quicker.items() if times > LEAST_QUICKER} == {
        kind.__name__ for kind in get_args(Answer)
    }, quicker


def test_a_life_in_rows_comes_to_what_it_comes_to_one_by_one():
    rows, plain = life(FEW, InRows), life(FEW)
    assert rows.job == plain.job
    assert [each for each in rows.actions if not isinstance(each, do.SetDeadline)] == [
        each for each in plain.actions if not isinstance(each, do.SetDeadline)
    ]


def any_event(job):
    """One of each kind, of a rank that lives, as it may come while the job is in this state."""
    rank, attempt, step = 5, job.attempt, job.newest_step()
    dump, known = (0, None) if job.dump is None else (job.dump.id, job.dump)
    number = 0 if known is None else known.round
    return [
        ev.LaunchRequested(),
        ev.WorkerStarted(rank, attempt, 1000),
        ev.StartFailed(rank, attempt, "no process"),
        ev.WorkerExited(rank, attempt, -SIGKILL, step),
        ev.StopRequested(SIGTERM),
        ev.ExitRequestedByFile(attempt, "by file"),
        ev.SignalReceived(SIGTERM),
        ev.DeadlinePassed(job.state, attempt),
        ev.CheckpointFound(attempt, "/saved", step + 1),
        ev.StartRefused(attempt, "too old", tuple(job.ranks)),
        ev.RankUnreachable(rank, attempt),
        ev.RankExiting(rank, attempt),
        ev.DumpProgressed(dump),
        ev.DumpCommitted(dump, "/memory"),
        ev.CommitFailed(dump, "full", is_place=True),
        ev.RankHung(rank, attempt, "hangs"),
        ev.ReplacementAged(),
        ev.StateCopied(attempt, step + 1, variants=(tuple(job.ranks),)),
        ev.CheckpointWritten(dump, step, "/saved"),
        ev.ShadowsChanged(attempt, step),
        ev.FolderApart("they share no folder"),
        protocol.Registered(rank, attempt, step, "", True),
        protocol.Fingerprinted(rank, attempt, step + 1, HOLDS),
        protocol.VoteOpened(rank, attempt, step),
        protocol.NotesMeasured(rank, attempt, 0.001, 0.1),
        protocol.Raised(rank, attempt, "lost a peer"),
        protocol.ExitRequested(rank, attempt, "it is told to"),
        protocol.Standing(rank, attempt, dump, step),
        protocol.Frozen(rank, attempt, dump, step, is_whole=True),
        protocol.Written(rank, attempt, dump, "", 1, "", "d", number),
        protocol.Digested(rank, attempt, dump, "d", number),
        protocol.SaveFailed(rank, attempt, dump, "full", True, number),
        protocol.Progress(rank, attempt, dump, 1),
        protocol.Rejoining(rank, attempt),
    ]


def decided_s(points, only=None):
    """How long a decision on each kind of event takes at each point, where it can happen."""
    found = {}
    for name, job in points:
        for event in any_event(job):
            title = f"{type(event).__name__} after {name}"
            if only is not None and title not in only:
                continue
            began_s = process_time()
            try:
                decide(job, event)
            except KeyError:
                continue
            found[title] = [process_time() - began_s]
    return found


def only(times, kinds):
    return {kind: times[kind] for kind in kinds}


def test_no_event_at_any_point_of_a_job_is_worse_than_linear_in_ranks(lives):
    """Also those that come seldom, and none of which was heard in the life of the job."""
    points = {FEW: lives.few[0].points, MANY: lives.many[0].points}
    gc.disable()
    try:
        times = {count: [decided_s(each) for _ in range(2)] for count, each in points.items()}
        kinds = {name.split()[0] for name in times[MANY][0]}
        slow = too_slow(times)
        for _ in range(AGAIN):
            # By itself: what the allocator gave back behind the decision before it, in each life the
            # same one, is faulted in anew, which takes several times as long as a small decision.
            if not slow:
                break
            times = {
                count: [
                    *(only(each, slow) for each in times[count]),
                    decided_s(points[count], slow),
                ]
                for count in times
            }
            slow = too_slow(times)
    finally:
        gc.enable()
    assert slow == {}
    assert kinds == {kind.__name__ for kind in get_args(ev.Event)}
    assert {job.state for _, job in points[MANY]} >= {
        JobState.STARTING,
        JobState.RUNNING,
        JobState.HOLDING,
        JobState.FREEZING,
        JobState.DUMPING,
        JobState.COMMITTING,
        JobState.REPLACING,
        JobState.STOPPING,
    }
