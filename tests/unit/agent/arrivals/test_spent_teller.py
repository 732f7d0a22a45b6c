"""What the job has used up is told to all other nodes, once."""

from types import SimpleNamespace

import pytest

from agent.arrivals.spent_teller import SpentTeller
from agent.nodes.run_messages import BudgetKnown
from agent.spec.spent_budget import SpentBudget


@pytest.fixture
def job():
    found = SimpleNamespace(spent=SpentBudget(), said=[], late=[], now_s=100.0)
    node = SimpleNamespace(pass_on=found.said.append)
    found.teller = SpentTeller(lambda: found.spent, [node], lambda: found.now_s)
    found.new = SimpleNamespace(pass_on=found.late.append)
    return found


def test_nobody_is_told_of_nothing(job):
    job.teller.tell()
    job.teller.came(job.new)
    assert job.said == job.late == []


def test_all_are_told_of_more_and_of_nothing_twice(job):
    for spent in (SpentBudget(replaced=1, replaced_at_s=(90.0,)), SpentBudget(1, 1, (90.0,))):
        job.spent = spent
        job.teller.tell()
        job.teller.tell()
        assert job.said.pop() == BudgetKnown(spent.told(100.0))
    assert job.said == []


def test_that_a_replacement_counts_no_more_each_finds_by_itself(job):
    job.spent = SpentBudget(replaced=1, replaced_at_s=(90.0,))
    job.teller.tell()
    job.said.clear()
    job.spent = job.spent._replace(replaced_at_s=())
    job.teller.tell()
    assert job.said == []


def test_a_node_that_comes_late_is_told_as_of_then(job):
    job.spent = SpentBudget(replaced=1, replaced_at_s=(90.0,))
    job.teller.tell()
    job.now_s = 130.0
    job.teller.came(job.new)
    (known,) = job.late
    assert [each.age_s for each in known.spent.moments] == [40.0]
