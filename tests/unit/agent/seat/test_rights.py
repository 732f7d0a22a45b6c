"""Who may go on with half of the nodes: histories of what happens, and what is done about it."""

import pytest

from agent.seat.records import HeldSeat, NodeShare, Seat, SeatRecord
from agent.seat.rights import (
    AGAIN_S,
    ASK_S,
    DEAF_S,
    MOST_ASK_S,
    UNHEARD,
    DenyPlaces,
    GrantPlaces,
    NodeZeroRight,
    RenewSeat,
    SayOfStore,
    SuccessorRight,
    TakeSeat,
    TellTerm,
)

T1, T2 = HeldSeat("1-a", "9"), HeldSeat("2-b", "10")
THEIRS = SeatRecord("2-x", Seat("j", "mn1", "10.0.0.2", 41000, 5))
HALF, MOST, FEW = NodeShare.HALF, NodeShare.MOST, NodeShare.FEW


class History:
    """Node 0 with nodes b and c, which knows that it has the seat."""

    def __init__(self, *nodes):
        self.right, self.now = NodeZeroRight(None, 0.0), 0.0
        assert self.right.passed(0.0) == [TakeSeat("")]
        for node in nodes:
            assert self.right.came(node) == []
        told = self.right.took(T1, 0.1)
        assert told == ([TellTerm(nodes, T1.term, 1)] if nodes else [])

    def answered(self, until_s):
        """The store answers until then."""
        while self.now < until_s:
            self.now += 1.0
            for each in self.right.passed(self.now):
                assert each == RenewSeat(self.right.held)
                assert self.right.renewed(self.now, is_held=True) == []

    def deaf(self, until_s):
        """It does not; what is done about that."""
        done = []
        while self.now < until_s:
            self.now += 1.0
            for each in self.right.passed(self.now):
                if isinstance(each, TakeSeat | RenewSeat):
                    done += self.right.failed("does not answer", self.now)
                else:
                    done.append(each)
        return done


def test_the_lease_is_renewed_in_time_and_nothing_is_said():
    history = History("b")
    history.answered(100.0)
    assert history.right.held == T1


def test_half_is_silent_and_the_store_grants_it():
    history = History("b")
    history.right.lost("b", is_silent=True)
    assert history.right.judged(HALF, 12.0) == [TakeSeat(T1.term)]
    assert history.right.took(T2, 12.1) == [GrantPlaces()]
    # b knows of the old term alone, so it gets nothing; nothing has to be asked again
    assert history.right.judged(HALF, 13.0) == [GrantPlaces()]


def test_the_others_were_first():
    history = History("b", "c")
    history.right.lost("b", is_silent=True)
    assert history.right.judged(HALF, 12.0) == [TakeSeat(T1.term)]
    said, told, denied = history.right.refused(THEIRS, 12.1)
    assert isinstance(said, SayOfStore)
    assert told == TellTerm(("c",), "", 2)
    assert isinstance(denied, DenyPlaces)
    assert "mn1 (10.0.0.2:41000) goes on" in denied.why


def test_a_store_that_does_not_answer_denies_it_and_the_wait_is_bounded():
    history = History("b")
    history.answered(3.0)
    history.right.lost("b", is_silent=True)
    (ask,) = history.right.judged(HALF, 3.0)
    assert ask == TakeSeat(T1.term)
    done = history.right.failed("does not answer", 3.5) + history.deaf(3.0 + ASK_S + 2 * AGAIN_S)
    assert [type(each) for each in done] == [SayOfStore, DenyPlaces]


def test_a_term_is_not_asked_for_where_nobody_else_may_ask():
    history = History("b")
    history.right.lost("b", is_silent=False)  # it is gone
    assert history.right.judged(HALF, 12.0) == [GrantPlaces()]


def test_the_store_falls_silent_and_counts_no_more_once_all_know_that():
    history = History("b", "c")
    said, told = history.deaf(DEAF_S + 5.0)
    assert said == SayOfStore("the store does not answer: the job goes on without it")
    assert told == TellTerm(("b", "c"), "", 2)
    history.right.knows("b", 1)  # late: of what it was told before
    history.right.knows("c", 2)
    history.right.lost("c", is_silent=True)
    assert history.right.judged(HALF, 20.0) == [GrantPlaces()]  # c will not ask
    history.right.lost("b", is_silent=True)
    assert history.right.judged(HALF, 21.0) == [TakeSeat(T1.term)]  # b may
    history.right.failed("does not answer", 21.5)
    assert history.deaf(100.0) == [DenyPlaces(UNHEARD)]


def test_it_answers_again_and_counts_again():
    history = History("b")
    history.deaf(30.0)
    assert history.right.held is None
    history.right.knows("b", 2)
    history.now += 1
    (ask,) = history.right.passed(history.now)
    assert ask == TakeSeat("")  # nobody can ask for any term: whichever is there
    said, told = history.right.took(T2, history.now)
    assert said == SayOfStore("the store counts again")
    assert told == TellTerm(("b",), T2.term, 3)
    assert history.deaf(300.0)[0].text.endswith("the job goes on without it")


def test_a_lease_that_ended_is_followed_by_another_term():
    history = History("b")
    history.answered(3.0)
    assert history.right.renewed(4.0, is_held=False) == [TellTerm(("b",), "", 2)]
    assert history.right.passed(4.1) == [TakeSeat(T1.term)]
    assert history.right.took(T2, 4.2) == [TellTerm(("b",), T2.term, 3)]


def test_whoever_comes_is_told():
    history = History("b")
    assert history.right.came("c") == [TellTerm(("c",), T1.term, 2)]


def test_more_than_half_begins_a_term_before_a_silent_node_is_replaced():
    history = History("b", "c")
    history.right.lost("b", is_silent=True)
    assert history.right.judged(MOST, 12.0) == [TakeSeat(T1.term)]
    assert history.right.took(T2, 12.1) == [TellTerm(("c",), T2.term, 2), GrantPlaces()]


def test_more_than_half_does_not_wait_long_for_the_store():
    history = History("b", "c")
    history.answered(3.0)
    history.right.lost("b", is_silent=True)
    assert history.right.judged(MOST, 3.0) == [TakeSeat(T1.term)]
    done = history.right.failed("does not answer", 3.5)
    done += history.deaf(3.0 + MOST_ASK_S + 2 * AGAIN_S)
    assert done == [GrantPlaces()]
    history.right.lost("c", is_silent=True)  # then it is half, and waits
    assert GrantPlaces() not in history.right.judged(HALF, history.now)


def test_a_seat_that_another_job_has_just_left_is_awaited_without_a_word():
    right = NodeZeroRight(None, 0.0)
    assert right.passed(0.0) == [TakeSeat("")]
    assert right.refused(THEIRS, 0.1) == []
    assert right.passed(5.0) == [TakeSeat("")]
    assert [type(each) for each in right.refused(THEIRS, 2 * DEAF_S + 1)] == [SayOfStore]
    assert right.passed(40.0) == [TakeSeat("")]
    assert right.refused(THEIRS, 40.1) == []  # it was said


# --- the node that takes node 0's part ------------------------------------------------------------


def test_without_a_store_more_than_half_goes_on_as_ever():
    right = SuccessorRight("")
    assert [right.may_go_on(each) for each in (FEW, HALF, MOST)] == [False, False, True]
    assert [right.wish(each, 0.0) for each in (FEW, HALF, MOST)] == [None] * 3
    assert right.why_not(HALF) == ""


def test_half_waits_until_the_seat_is_free_and_then_goes_on():
    right = SuccessorRight(T1.term)
    assert right.wish(FEW, 0.0) is None
    assert right.wish(HALF, 0.0) == TakeSeat(T1.term, if_free=True)
    assert right.wish(HALF, 0.5) is None  # the store has not answered
    right.refused(THEIRS._replace(term=T1.term), 1.0)
    assert not right.may_go_on(HALF)
    assert "node 0 is there" in right.why_not(HALF)
    assert right.wish(HALF, 1.5) is None
    assert right.wish(HALF, 2.0) == TakeSeat(T1.term, if_free=True)
    right.took(T2, 2.1)
    assert [right.may_go_on(each) for each in (FEW, HALF, MOST)] == [False, True, True]
    assert right.wish(HALF, 3.0) is None
    assert right.wish(HALF, 6.0) == RenewSeat(T2)
    right.renewed(6.1)
    assert right.wish(FEW, 10.0) == RenewSeat(T2)


def test_who_came_too_late_never_goes_on_not_even_with_more_than_half():
    right = SuccessorRight(T1.term)
    assert right.wish(MOST, 0.0) == TakeSeat(T1.term, if_free=False)
    right.refused(THEIRS, 0.1)
    for now in range(1, 100):
        assert right.wish(MOST, float(now)) is None
    assert [right.may_go_on(each) for each in (HALF, MOST)] == [False, False]
    assert right.why_not(MOST) == "the store says that mn1 (10.0.0.2:41000) goes on"


@pytest.mark.parametrize("needs_store", [False, True])
def test_more_than_half_goes_on_without_a_store_that_does_not_answer(needs_store):
    right, now = SuccessorRight(T1.term, needs_store=needs_store), 0.0
    while now < MOST_ASK_S + 3:
        if right.wish(MOST, now):
            right.failed(now + 0.1)
        assert now >= MOST_ASK_S or not right.may_go_on(MOST)
        now += AGAIN_S / 2
    assert right.may_go_on(MOST) is not needs_store
    assert not right.may_go_on(HALF)
    assert right.why_not(HALF) == "the store does not answer"
