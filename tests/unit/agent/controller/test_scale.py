"""No decision is worse than linear in ranks, and what a whole replacement takes is nearly so."""

from __future__ import annotations

import gc
from collections import defaultdict
from signal import SIGTERM
from time import process_time

import pytest
from support.histories.plain import rules

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import JobState
from worker_hooks.contract import protocol

FEW, MANY = 1024, 4096
ATTEMPTS = 5
LEAST_S = 20e-6  # shorter times are noise
MOST_PER_EVENT = 6.0  # times as long with four times the ranks
HOLDS = {"model": "12", "crc32": "abcdef"}


class Ranks:
    """A job of so many ranks, and how long its decisions take, by kind of event."""

    def __init__(self, count):
        self.count = count
        self.job = Job(rules(ranks=tuple(range(count)), max_restarts=1, is_on=True))
        self.took_s = defaultdict(list)
        self.total_s = 0.0
        self.actions = []

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


def life(count):
    ranks = Ranks(count)
    gc.disable()  # it would come amid the same decision in each life, and search all that tests left
    try:
        ranks.train()
        ranks.replace()
        ranks.leave()
    finally:
        gc.enable()
    return ranks


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


def test_no_kind_of_event_is_worse_than_linear_in_ranks():
    lives = {FEW: [], MANY: []}
    for _ in range(ATTEMPTS):
        for count, times in lives.items():
            times.append(life(count).took_s)
        if len(lives[FEW]) > 1 and not too_slow(lives):
            return
    assert too_slow(lives) == {}


def test_what_is_slow_each_time_is_told_from_what_was_disturbed_once():
    slow = {FEW: [{"Digested": [0.0001] * 9}], MANY: [{"Digested": [0.0001] * 8 + [0.0007]}]}
    assert too_slow(slow) == {"Digested": pytest.approx(7.0)}
    slow[MANY].append({"Digested": [0.0001] * 9})  # it was the machine
    assert too_slow(slow) == {}


def test_a_whole_life_is_not_quadratic_in_ranks():
    """Four times the ranks say four times as much; answers to each may not grow with them."""
    ratios = []
    for _ in range(ATTEMPTS):
        ratios.append(life(MANY).total_s / life(FEW).total_s)
        if ratios[-1] < 2 * MANY / FEW:
            return
    raise AssertionError(ratios)
