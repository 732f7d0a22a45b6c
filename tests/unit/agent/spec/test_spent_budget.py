"""What a job has used up, as it goes from one controller to the next."""

from agent.nodes.line import bytes_of
from agent.nodes.run_messages import BudgetKnown
from agent.spec.spent_budget import MOST_MOMENTS, SpentBudget, ToldBudget, newer_of


def spent(*at_s, restarts=0, replaced=0):
    return SpentBudget(restarts, replaced, at_s)


def test_ages_travel_and_no_clock_is_compared_with_that_of_another_node():
    told = spent(90.0, 95.0, 95.0, restarts=1, replaced=4).told(now_s=100.0)
    assert [(each.age_s, each.times) for each in told.moments] == [(10.0, 1), (5.0, 2)]
    heard = told.heard(now_s=7.0)  # by a machine that has just started
    assert heard == spent(-3.0, 2.0, 2.0, restarts=1, replaced=4)
    assert [each.age_s for each in heard.told(now_s=27.0).moments] == [30.0, 25.0]


def test_what_is_told_has_some_hundred_bytes():
    told = spent(*range(20), replaced=20).told(now_s=3600.0)
    assert len(bytes_of(BudgetKnown(told))) < 900
    assert len(bytes_of(BudgetKnown(spent(*range(6), replaced=48).told(3600.0)))) < 350


def test_of_a_large_budget_the_oldest_count_longer_rather_than_that_much_is_told():
    many = tuple(float(each) for each in range(500))
    told = spent(*many, replaced=500).told(now_s=500.0)
    assert len(told.moments) == MOST_MOMENTS
    assert sum(each.times for each in told.moments) == 500
    heard = told.heard(now_s=500.0)
    assert all(each >= real for each, real in zip(heard.replaced_at_s, many, strict=True))
    assert heard.replaced_at_s[-10:] == many[-10:]


def test_of_what_several_nodes_know_the_most_counts():
    old, new = spent(5.0, replaced=2), spent(5.0, 9.0, replaced=4)
    again = new._replace(restarts=1)
    assert newer_of(old, new) == newer_of(new, old) == new
    assert newer_of(again, new) == newer_of(new, again) == again
    # a node that knows of a restart may not know of the newest replacement
    assert (
        newer_of(old._replace(restarts=1), new) == newer_of(new, old._replace(restarts=1)) == again
    )
    same = spent(6.0, 10.0, replaced=4)  # as heard a moment later: the first to say so counts
    assert newer_of(new, same) == new
    assert newer_of(SpentBudget(), SpentBudget()) == SpentBudget()


def test_nonsense_is_not_taken_for_a_budget():
    good = spent(1.0, restarts=2, replaced=3).told(now_s=4.0)
    assert ToldBudget().is_plausible
    assert good.is_plausible
    (moment,) = good.moments
    for wrong in (
        good._replace(restarts=-1),
        good._replace(replaced=-1),
        good._replace(moments=(moment._replace(age_s=-1.0),)),
        good._replace(moments=(moment._replace(age_s=float("inf")),)),
        good._replace(moments=(moment._replace(times=0),)),
        good._replace(moments=(moment._replace(times=1 << 30),)),
        good._replace(moments=(moment,) * 1000),
    ):
        assert not wrong.is_plausible
