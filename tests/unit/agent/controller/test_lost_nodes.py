"""What the loss of a node costs of the budget of replacements: one, as the death of a rank does."""

from itertools import accumulate, pairwise
from time import process_time

import pytest
from support.histories.replacements import asked

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.replaceable import units
from agent.controller.states import JobState, RankState
from agent.ranks.rank_set import RankSet
from agent.spec.job_spec import JobSpec, Program, ProgramKind
from worker_hooks.contract import protocol

GONE = "node 1 (b) is gone: its msrun closed the line"
SPENT = "all {} replacements within 3600 s are spent"


class Nodes:
    """A job whose nodes have so many ranks each; ranks answer what they are asked, at once."""

    def __init__(self, *sizes, most=20):
        firsts = accumulate(sizes, initial=0)
        self.ranks_of = [range(*ends) for ends in pairwise(firsts)]
        about = {"nodes": sizes, "has_nodes": True, "node_wait_s": 600.0, "near": self.ranks_of[0]}
        self.job = Job(asked(sum(sizes), max_replacements=most, **about))
        self.step = 5
        self.actions = []
        self.hear(ev.LaunchRequested())
        self.hear(*(ev.WorkerStarted(rank, 0, 1000 + rank) for rank in self.job.ranks))
        self.hear(*(protocol.Registered(rank, 0, self.step) for rank in self.job.ranks))

    def hear(self, *events):
        for event in events:
            decision = decide(self.job, event)
            self.job = decision.job
            self.actions += decision.actions

    def last(self, kind):
        return [each for each in self.actions if isinstance(each, kind)][-1]

    def lose(self, *nodes):
        for node in nodes:
            self.hear(*(self.loss(rank) for rank in self.ranks_of[node]))

    def loss(self, rank):
        """A rank that is lost with its node: a start that was not heard of, or a process."""
        now = self.job.attempt
        if self.job.ranks[rank] is RankState.PENDING:
            return ev.StartFailed(rank, now, GONE, lost=GONE)
        return ev.WorkerExited(rank, now, -9, self.step, lost=GONE)

    def kill(self, *ranks):
        self.hear(*(ev.WorkerExited(rank, self.job.attempt, -9, self.step) for rank in ranks))

    def save(self):
        """The survivors freeze and save into memory; then the round begins, if one can."""
        dump, left = self.job.dump.id, self.job.reachable()
        self.hear(*(protocol.Frozen(rank, 0, dump, self.step, is_whole=True) for rank in left))
        order = self.last(do.SaveRanks)
        if order.place != do.MEMORY:
            return
        self.hear(
            *(
                protocol.Written(rank, 0, dump, "", 0, "", "a", order.round)
                for rank in order.writers
            )
        )
        self.hear(*(protocol.Digested(rank, 0, dump, "a", order.round) for rank in order.digesters))
        self.hear(ev.DumpCommitted(dump, "/memory"))

    def start(self, *ranks):
        """Newcomers come to life, and join."""
        self.hear(*(ev.WorkerStarted(rank, self.job.attempt, 9) for rank in ranks))
        self.join(*ranks)

    def join(self, *ranks):
        self.hear(*(protocol.Registered(rank, self.job.attempt, self.step) for rank in ranks))

    def go_on(self):
        """All join; then they train a step on."""
        replacement, now = self.job.since_restart.replacement, self.job.attempt
        self.start(*self.job.having(RankState.PENDING))
        self.hear(*(protocol.Rejoining(rank, now) for rank in replacement.leaving))
        self.join(*self.job.ranks)
        assert self.job.state is JobState.RUNNING
        self.step += 1

    @property
    def reminders(self):
        return sum(isinstance(each, do.RemindReplaced) for each in self.actions)


@pytest.mark.parametrize("size", [1, 8, 21, 32])
def test_a_lost_node_is_one_replacement_whatever_its_ranks(size):
    job = Nodes(size, size, most=3)
    for times in (1, 2, 3):
        job.lose(1)
        job.save()
        assert (job.job.state, job.job.replaced) == (JobState.REPLACING, times)
        assert job.last(do.ReplaceRanks).newcomers == tuple(job.ranks_of[1])
        assert (job.reminders, job.job.replaced_in_all) == (times, times * size)
        job.go_on()
    job.lose(1)
    job.save()
    assert job.job.now.not_replaced == SPENT.format(3)


def test_it_counts_no_more_after_its_period():
    job = Nodes(8, 8, most=1)
    job.lose(1)
    job.save()
    job.go_on()
    job.hear(ev.ReplacementAged())
    assert job.job.replaced == 0
    job.lose(1)
    job.save()
    assert job.job.state is JobState.REPLACING


def test_nodes_that_are_lost_at_once_are_one_each():
    job = Nodes(8, 32, 8, 32, most=3)
    job.lose(1, 3, 2)
    job.save()
    assert (job.job.state, job.job.replaced, job.reminders) == (JobState.REPLACING, 3, 3)
    assert len(job.last(do.ReplaceRanks).newcomers) == 72
    job = Nodes(8, 32, 8, 32, most=2)
    job.lose(1, 3, 2)
    job.save()
    assert job.job.now.not_replaced == SPENT.format(2)


def test_a_node_and_ranks_of_another_one():
    job = Nodes(8, 32, 8)
    job.lose(1)
    job.kill(3, 45)
    job.save()
    assert (job.job.state, job.job.replaced, job.reminders) == (JobState.REPLACING, 3, 3)
    assert job.last(do.ReplaceRanks).newcomers == (3, *range(8, 40), 45)


def test_ranks_that_died_just_before_their_node_are_of_its_loss():
    job = Nodes(8, 8, most=1)
    job.kill(9, 10)
    job.hear(*(job.loss(rank) for rank in job.ranks_of[1] if rank not in {9, 10}))
    job.save()
    assert (job.job.state, job.job.replaced) == (JobState.REPLACING, 1)


def test_ranks_that_die_while_their_node_lives_are_one_each():
    job = Nodes(8, 8, most=8)
    job.kill(*job.ranks_of[1])
    job.save()
    assert (job.job.state, job.job.replaced, job.reminders) == (JobState.REPLACING, 8, 8)
    job = Nodes(8, 8, most=7)
    job.kill(*job.ranks_of[1])
    job.save()
    assert job.job.now.not_replaced == SPENT.format(7)


def test_a_node_that_is_lost_amid_a_replacement_is_one_more():
    """Its ranks are heard to be lost one by one: not even then does it count as more than one."""
    job = Nodes(8, 8, 8, most=3)
    job.lose(1)
    job.save()
    job.start(*job.ranks_of[1][:3])  # the others of the new node have not joined yet
    job.hear(*(ev.WorkerStarted(rank, 1, 9) for rank in job.ranks_of[1][3:]))
    job.lose(2)
    assert job.job.state is JobState.REPLACING
    job.hear(*(ev.WorkerExited(rank, 1, -9) for rank in job.ranks_of[1][3:]))
    assert (job.job.attempt, job.job.state) == (2, JobState.REPLACING)
    # 1 at first; then both: the rest of the first one begins anew, as it cannot join any more
    assert (job.job.replaced, job.reminders) == (3, 3)
    job.go_on()


def test_once_all_have_joined_the_death_of_a_rank_of_the_new_node_is_one():
    job = Nodes(8, 8)
    job.lose(1)
    job.save()
    job.go_on()
    job.kill(8, 9)
    job.save()
    assert (job.job.state, job.job.replaced) == (JobState.REPLACING, 3)


def test_on_one_node_nothing_else_is_counted():
    job = Job(asked(4))
    assert units(job, (0, 1, 3)) == 3
    job = job._replace(since_restart=job.since_restart._replace(without_node=RankSet((0, 1))))
    assert units(job, (0, 1, 3)) == 3


def test_a_place_without_ranks_is_no_node_of_any():
    """The scheduler that stands apart has none."""
    job = Job(asked(4, nodes=(0, 2, 2), has_nodes=True))
    job = job._replace(since_restart=job.since_restart._replace(without_node=RankSet((2,))))
    assert units(job, (0, 1)) == 2
    assert units(job, (0, 2, 3)) == 2


def test_the_policy_knows_whose_ranks_are_whose():
    spec = JobSpec(Program("t.py", (), ProgramKind.SCRIPT, "python"), 2, "run", "id", nodes=(2, 3))
    assert spec.policy.replace.nodes == (2, 3)
    assert spec._replace(nodes=()).policy.replace.nodes == ()


def test_the_cost_of_counting_is_linear_in_ranks():
    took_s = {}
    for count in (256, 1024):
        job = Job(asked(8 * count, nodes=(8,) * count, has_nodes=True))
        gone = RankSet(range(8, 8 * count))
        job = job._replace(since_restart=job.since_restart._replace(without_node=gone))
        times = []
        for _ in range(5):
            began_s = process_time()
            assert units(job, gone) == count - 1
            times.append(process_time() - began_s)
        took_s[count] = min(times)
    assert took_s[1024] < 8 * took_s[256]
