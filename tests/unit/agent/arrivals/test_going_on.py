"""Whether node 0 goes on with nodes silent: by count, and by what a store says."""

from types import SimpleNamespace

import pytest

from agent.arrivals.going_on import OUTVOTED, GoingOn
from agent.arrivals.places import SURE_S, LostPlaces
from agent.controller.states import JobState
from agent.nodes.run_messages import NodeFacts
from agent.seat.records import NodeShare

NODES = [NodeFacts(rank, f"mn{rank}", f"10.0.0.{rank}", 2, 9) for rank in range(4)]
WAIT_S = 100.0


class FakeTenure:
    """What a store says is what the test says."""

    held = "the seat"

    def __init__(self):
        self.known, self.asked, self.closed = [], None, None

    def attach(self, _loop, tell):
        self.tell = tell

    def came(self, node):
        self.known.append(("came", node.rank))

    def lost(self, node, *, is_silent):
        self.known.append(("lost", node.rank, is_silent))

    def knows(self, node, number):
        self.known.append(("knows", node.rank, number))

    def judge(self, share, go_on, give_up):
        self.asked = share, go_on, give_up

    def close(self, **about):
        self.closed = about


class Loop:
    now = 0.0

    def time(self):
        return self.now

    def call_soon(self, happens):
        happens()


class Job:
    def __init__(self, nodes, tenure=None, wait_s=WAIT_S):
        self.places = LostPlaces(nodes, wait_s)
        self.done, self.loop, self.told = [], Loop(), []
        self.tenure = tenure
        seat = lambda: self.done.append("seat")  # noqa: E731
        self.going_on = GoingOn(self.places, tenure, seat, self.done.append)
        others = {}
        for facts in NODES[1:nodes]:
            others[facts.rank] = SimpleNamespace(facts=facts, know_term=self.told.append)
        self.going_on.attach(self.loop, others)

    def lose(self, rank, is_silent=True, has_hooks=True, was_heard=True):
        now = self.loop.time()
        self.places.lose(rank, now, is_silent=is_silent, was_heard=was_heard)
        self.going_on.lost(NODES[rank], has_hooks=has_hooks, is_silent=is_silent)

    def place(self, rank):
        return self.places.place(NODES, 2, "", rank)


@pytest.mark.parametrize(("lost", "outvoted"), [((1,), False), ((1, 2), False), ((1, 2, 3), True)])
def test_without_a_store_node_0_goes_on_with_half(lost, outvoted):
    job = Job(4)
    for rank in lost:
        job.lose(rank)
    assert job.done == [OUTVOTED] * outvoted
    assert job.going_on.is_outvoted is outvoted
    for state, is_to_end in (
        (JobState.FAILED, False),
        (JobState.SUCCEEDED, False),
        (JobState.FAILED, True),
    ):
        ending = SimpleNamespace(state=state, is_to_end=is_to_end)
        gives_way = outvoted and state is JobState.FAILED and not is_to_end
        assert job.going_on.gives_way(ending) is gives_way
    assert job.place(1) == 1
    assert job.going_on.held is None
    job.going_on.close(goes_on=False, is_done=True, saved="")


def test_with_one_no_place_is_given_away_before_it_says_so():
    job = Job(2, FakeTenure())
    assert job.tenure.known == [("came", 1)]
    job.lose(1)
    share, go_on, _ = job.tenure.asked
    assert (share, job.place(1), job.done) == (NodeShare.HALF, None, [])
    go_on()
    assert (job.place(1), job.done) == (1, ["seat"])
    assert job.going_on.held == "the seat"


def test_what_it_denies_is_given_up():
    job = Job(2, FakeTenure())
    job.lose(1)
    job.tenure.asked[2]("the others go on")
    assert job.done == ["the others go on"]
    assert job.place(1) is None


def test_more_than_half_asks_too_and_too_few_are_too_few():
    job = Job(4, FakeTenure())
    shares = []
    for rank in (1, 2):
        job.lose(rank)
        shares.append(job.tenure.asked[0])
    assert shares == [NodeShare.MOST, NodeShare.HALF]
    job.tenure.asked = None
    job.lose(3)
    assert (job.tenure.asked, job.done) == (None, [OUTVOTED])


def test_where_no_state_can_be_saved_no_others_go_on_and_nobody_is_asked():
    job = Job(2, FakeTenure())
    job.lose(1, has_hooks=False)
    assert (job.tenure.asked, job.place(1)) == (None, 1)


def test_where_no_node_is_awaited_there_is_nothing_to_ask():
    job = Job(2, FakeTenure(), wait_s=0.0)
    job.lose(1, was_heard=False)
    assert (job.tenure.asked, job.done) == (None, [])


def test_a_silent_node_that_never_spoke_may_not_know_of_this_job():
    job = Job(4)
    job.lose(1, was_heard=False)
    assert job.done == [OUTVOTED]


def test_only_the_node_that_is_meant_is_told():
    job = Job(2, FakeTenure())
    job.tenure.tell(NODES[1], "told")
    job.tenure.tell(NODES[1]._replace(pid=77), "told to the one before")
    assert job.told == ["told"]
    job.going_on.came(NODES[1])
    job.going_on.knows(NODES[1], 3)
    assert job.tenure.known[-2:] == [("came", 1), ("knows", 1, 3)]


@pytest.mark.parametrize("is_done", [True, False])
def test_the_store_hears_of_the_end(is_done):
    job = Job(2, FakeTenure())
    job.going_on.close(goes_on=False, is_done=is_done, saved="/ckpt")
    assert job.tenure.closed == {"goes_on": False, "is_done": is_done, "saved": "/ckpt"}


def test_who_comes_in_the_place_of_a_silent_node_does_not_count_for_a_while():
    job = Job(3)
    job.lose(1)
    job.lose(2, is_silent=False)
    assert [job.places.is_haunted(rank, 0.0) for rank in (1, 2)] == [True, False]
    job.places.settle(1)
    assert job.places.is_haunted(1, WAIT_S + SURE_S - 1)
    assert not job.places.is_haunted(1, WAIT_S + SURE_S + 1)
    pair = Job(2)
    pair.lose(1)
    assert not pair.places.is_haunted(1, 0.0)  # one of two asks the store, or has ended
