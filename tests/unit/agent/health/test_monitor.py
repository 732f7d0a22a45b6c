"""When the agent looks at ranks, and what it does then; time and processes are made up."""

import time
from types import SimpleNamespace

import pytest

from agent.controller.states import JobState
from agent.health import monitor
from agent.health.monitor import HealthMonitor
from agent.hooks.services import Services
from agent.hooks.status_pages import StatusPages
from agent.workers.worker import Worker
from worker_hooks.contract import protocol
from worker_hooks.contract.status_page import Page, Phase, create

RANKS = {0, 1, 2}


class Loop:
    """Timers that only :meth:`fire` runs."""

    def __init__(self):
        self.now, self.timers = time.monotonic(), []

    def time(self):
        return self.now

    def call_at(self, at_s, callback):
        timer = SimpleNamespace(at_s=at_s, callback=callback)
        timer.cancel = lambda: timer in self.timers and self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def call_later(self, after_s, callback):
        return self.call_at(self.now + after_s, callback)

    def fire(self, late_s=0.0):
        timer = min(self.timers, key=lambda each: each.at_s)
        self.timers.remove(timer)
        self.now = max(self.now, timer.at_s + late_s)  # other timers may be late, too
        timer.callback()


class Agent:
    """All that a monitor is given, and what it made of it."""

    def __init__(self, hang_s=None):
        self.loop, self.pages, self.written = Loop(), StatusPages(), []
        self.said, self.asked, self.events, self.events_posted = [], [], [], []
        self.states = dict.fromkeys(RANKS, "S")
        self.workers = {rank: Worker(rank, rank, 0) for rank in RANKS}
        self.mine = {}
        for rank in RANKS:
            fd = create(rank, 0, ())
            self.mine[rank] = Page(fd)
            self.pages.keep(rank, 0, fd)
        self.frozen = set()
        self.are_known = self.are_here = True
        self.heard_of = 99  # the newest inspection that other nodes knew when they looked
        self.unknown = set()
        processes = SimpleNamespace(
            use=lambda rank: (self.states[rank], 0.0),
            is_frozen=lambda rank: rank in self.frozen,
            are_known=self._are_known,
            are_here=lambda _: self.are_here,
        )
        journal = SimpleNamespace(event=lambda what, **more: self.events.append((what, more)))
        given = Services(self.loop, self.post, self.said.append, journal, files=None)
        self.monitor = HealthMonitor(hang_s, self.pages, self, processes, self.worker, given)
        self.monitor.watch(JobState.RUNNING, RANKS, are_all=True)

    def _are_known(self, ranks, inspection=0):
        is_new = self.heard_of >= inspection
        return self.are_known and is_new and not self.unknown & set(ranks)

    def send_all(self, ranks, message):
        self.asked.extend(ranks)
        self.inspection = message.id

    def post(self, event):
        self.events_posted.append(event)

    def worker(self, rank):
        return self.workers[rank]

    def train(self, steps, own_ms=None):
        """Every rank makes so many steps more; then rank 1 is in forward, the others wait for it."""
        for rank, page in self.mine.items():
            for _ in range(steps):
                step = page.heartbeat().step + 1
                page.beat(step, 0, step, Phase.FORWARD)
                if own_ms is not None:
                    at = step % 64 * 4
                    page._paces[at + 1] = 100_000_000
                    page._paces[at + 2] = 100_000_000 - own_ms[rank] * 1_000_000
            page.enter(Phase.FORWARD if rank == 1 else Phase.BACKWARD)
        self.monitor.refresh(self.workers)

    def answer(self, where, **more):
        for rank, is_in_collective in where.items():
            self.monitor.hear(
                protocol.Stack(rank, 0, self.inspection, is_in_collective, f"at {rank}", **more)
            )

    def named(self, what):
        return [more for name, more in self.events if name == what]


@pytest.fixture
def start():
    made = []
    yield lambda hang_s=None: made.append(Agent(hang_s)) or made[-1]
    for each in made:
        each.pages.clear()
        for page in each.mine.values():
            page.close()


@pytest.fixture
def agent(start):
    return start()


def test_no_timer_runs_before_steps_are_seen_nor_once_the_job_does_not_run(agent):
    agent.monitor.refresh(agent.workers)
    assert agent.loop.timers == []
    agent.train(3)
    assert len(agent.loop.timers) == 1
    agent.loop.fire()
    assert len(agent.loop.timers) == 1
    agent.monitor.watch(JobState.FREEZING, RANKS, are_all=True)
    assert agent.loop.timers == []
    agent.monitor.refresh(agent.workers)
    assert agent.loop.timers == []


def test_no_timer_runs_before_all_have_registered(agent):
    agent.monitor.forget()
    agent.monitor.watch(JobState.RUNNING, {0, 1}, are_all=False)
    agent.train(3)
    assert agent.loop.timers == []
    agent.monitor.watch(JobState.RUNNING, RANKS, are_all=True)
    agent.monitor.watch(JobState.RUNNING, {0, 1}, are_all=False)  # one is done
    agent.train(3)
    assert len(agent.loop.timers) == 1


def test_hang_timeout_0_looks_at_nobody(start):
    agent = start(hang_s=0.0)
    agent.train(3)
    assert agent.loop.timers == []


def until_asked(agent, looks):
    """The seconds until the ranks are asked; fails after so many looks."""
    began = agent.loop.now
    for _ in range(looks):
        agent.loop.fire()
        if agent.asked:
            return agent.loop.now - began
    raise AssertionError("nobody was asked")


def test_a_stopped_rank_is_posted_once_all_others_have_answered(agent):
    agent.train(3)
    agent.states[1] = "T"
    assert 1.4 < until_asked(agent, 6) < 2.0
    assert agent.asked == [0, 1, 2]
    for rank in (0, 2):
        assert agent.events_posted == []
        agent.monitor.hear(protocol.Stack(rank, 0, agent.inspection, True, "a\nb"))
    (hung,) = agent.events_posted
    assert (hung.rank, hung.attempt) == (1, 0)
    assert agent.workers[1].hung == hung.why
    assert agent.named("HangJudged")[0]["stacks"] == {0: ["a", "b"], 2: ["a", "b"]}
    assert len(agent.loop.timers) == 1  # no deadline is left


def test_who_gives_no_answer_is_waited_for_a_second(agent):
    agent.train(3)
    assert 14 < until_asked(agent, 60) < 17
    agent.monitor.hear(protocol.Stack(0, 0, agent.inspection - 1, False, "of another inspection"))
    asked = agent.loop.now
    for rank in (0, 2):
        agent.monitor.hear(protocol.Stack(rank, 0, agent.inspection, True, "a"))
    while not agent.events_posted:
        agent.loop.fire()
    assert agent.loop.now - asked <= 1.01
    assert [hung.rank for hung in agent.events_posted] == [1]


def test_a_look_that_is_late_blames_nobody(agent):
    agent.train(3)
    agent.states[1] = "T"
    agent.loop.fire()
    agent.loop.fire(late_s=500.0)
    assert agent.asked == []
    assert 1.4 < until_asked(agent, 7) < 2.3


def test_nobody_is_blamed_while_a_node_says_nothing(agent):
    agent.train(3)
    agent.states[1] = "T"
    agent.loop.fire()
    agent.are_known = False
    for _ in range(40):
        agent.loop.fire()
    assert agent.asked == []
    agent.are_known = True
    assert 1.4 < until_asked(agent, 7) < 2.3


def test_other_nodes_have_longer_to_answer_and_are_not_judged_if_they_fall_silent(agent):
    agent.are_here = False
    agent.train(3)
    until_asked(agent, 60)
    asked = agent.loop.now
    agent.answer({0: True, 2: True})
    while not agent.events_posted:
        agent.loop.fire()
    assert 2.9 < agent.loop.now - asked < 3.1
    agent.train(3)
    agent.asked.clear()
    agent.events_posted.clear()
    until_asked(agent, 60)
    agent.heard_of = agent.inspection - 1  # that it does nothing is no news since
    agent.answer(dict.fromkeys(RANKS, True) | {1: False})
    while len(agent.named("HangJudged")) < 2:
        agent.loop.fire()
    assert agent.events_posted == []
    assert agent.named("HangJudged")[1]["reason"] == monitor.LATE


def test_a_judgement_that_is_late_blames_nobody(agent):
    """All was stopped, msrun too: when all continue, the ranks have had no time to answer."""
    agent.train(3)
    until_asked(agent, 60)
    agent.answer({0: True, 2: True})
    deadline = min(agent.loop.timers, key=lambda each: each.at_s)
    while deadline.callback != agent.monitor._judge:
        agent.loop.fire()
        deadline = min(agent.loop.timers, key=lambda each: each.at_s)
    agent.loop.fire(late_s=500.0)
    assert agent.events_posted == []
    assert agent.named("HangJudged")[0]["reason"] == monitor.LATE
    agent.asked.clear()
    assert 14 < until_asked(agent, 60) < 17


def test_a_frozen_rank_is_not_judged(agent):
    agent.train(3)
    agent.frozen = {1}
    for _ in range(2):
        agent.asked.clear()
        until_asked(agent, 900)
        agent.answer({0: True, 2: True})
        while agent.monitor._answers is not None:
            agent.loop.fire()
    assert agent.events_posted == []
    (said,) = agent.said
    assert said.startswith("rank 1 is frozen by its control group: msrun ends no rank, and waits")
    assert agent.named("HangJudged")[0]["unanswered"] == [1]


def test_who_is_at_a_prompt_is_not_judged(agent):
    agent.train(3)
    until_asked(agent, 60)
    agent.answer({0: True, 2: True})
    agent.answer({1: False}, is_at_prompt=True)
    assert agent.events_posted == []
    (said,) = agent.said
    assert said.startswith("rank 1 waits for a person, in a debugger or for input from the term")


def test_an_outage_and_its_end_are_said_once(agent):
    agent.train(3)
    for page in agent.mine.values():
        page.enter(Phase.DATA)
    for _ in range(3):
        agent.asked.clear()
        until_asked(agent, 900)
        agent.answer(dict.fromkeys(RANKS, False))
    assert (agent.events_posted, len(agent.named("HangJudged"))) == ([], 3)
    (said,) = agent.said
    assert said.endswith("waits; rank 0 at at 0; rank 1 at at 1; rank 2 at at 2")
    assert agent.named("JobStandsStill") == [{"reason": said}]
    assert agent.named("HangJudged")[0]["stacks"][1] == ["at 1"]
    agent.train(1)
    for _ in range(3):
        agent.loop.fire()
    assert "there is progress again, 4" in agent.said[1]
    assert len(agent.said) == 2
    assert len(agent.named("JobMovesAgain")) == 1


def test_a_pause_is_said_once(agent):
    agent.train(3)
    agent.states = dict.fromkeys(RANKS, "T")
    for _ in range(20):
        agent.loop.fire()
    assert (len(agent.said), len(agent.named("JobPaused")), agent.asked) == (1, 1, [])


def test_stopped_ranks_are_no_pause_while_one_on_its_way_out_runs(agent):
    agent.train(3)
    agent.monitor.watch(JobState.RUNNING, {1, 2}, are_all=False)
    agent.states |= {1: "T", 2: "T"}
    assert monitor.OTHERS_S < until_asked(agent, 20) < monitor.OTHERS_S + 3
    assert [hung.rank for hung in agent.events_posted] == [1, 2]  # who is stopped is not waited for
    assert (agent.said, agent.named("JobPaused")) == ([], [])


def test_what_a_node_told_of_a_finished_rank_long_ago_does_not_count(agent):
    agent.train(3)
    agent.monitor.watch(JobState.RUNNING, {1, 2}, are_all=False)
    agent.states |= {1: "T", 2: "T"}
    for _ in range(5):
        agent.loop.fire()
    agent.unknown = {0}
    for _ in range(20):
        agent.loop.fire()
    assert (len(agent.named("JobPaused")), agent.asked) == (1, [])


def test_a_node_that_is_not_heard_for_long_is_said_once(agent):
    agent.train(3)
    agent.are_known = False
    for _ in range(400):
        agent.loop.fire()
    assert agent.said == [monitor.UNHEARD]


def test_the_last_ranks_that_train_can_be_paused(agent):
    agent.train(3)
    agent.monitor.watch(JobState.RUNNING, {1, 2}, are_all=False)
    agent.states = {0: "X", 1: "T", 2: "T"}
    for _ in range(20):
        agent.loop.fire()
    assert (len(agent.named("JobPaused")), agent.asked) == (1, [])


def test_a_straggler_is_named_in_the_journal_when_it_begins_and_when_it_ends(agent):
    agent.train(64, own_ms=(50, 50, 80))
    for _ in range(2):
        agent.train(16, own_ms=(50, 50, 80))
    (named,) = agent.named("StragglerNamed")
    assert (named["rank"], named["own_s"], named["peers_s"]) == (2, 0.08, 0.05)
    assert [worker.is_slow for worker in agent.workers.values()] == [False, False, True]
    assert agent.workers[2].tempo.own_median_s == pytest.approx(0.08)
    agent.train(64, own_ms=(50, 50, 50))
    assert agent.named("StragglerEnded") == [{"rank": 2}]
    assert not agent.workers[2].is_slow
