"""The ranks of a job on several nodes, which need not be equal."""

import pytest

from agent.spec.job_spec import JobSpec, Program, ProgramKind

ALONE = JobSpec(Program("t.py", (), ProgramKind.SCRIPT, "python"), 3, "job", "rec")


@pytest.mark.parametrize(
    ("nodes", "node_rank", "here"),
    [
        ((3,), 0, (0, 1, 2)),
        ((3, 1), 0, (0, 1, 2)),
        ((1, 3), 1, (1, 2, 3)),
        ((2, 5, 3, 1), 2, (7, 8, 9)),
    ],
)
def test_ranks_are_numbered_through_the_nodes(nodes, node_rank, here):
    job = ALONE._replace(nodes=nodes, node_rank=node_rank)
    assert (job.ranks_here, job.first_rank) == (here, here[0])
    assert (job.world_size, job.nnodes) == (sum(nodes), len(nodes))
    assert job.policy.ranks == tuple(range(sum(nodes)))  # it is decided for all of them


def test_one_node_has_all_ranks():
    assert ALONE.ranks_here == ALONE.policy.ranks == (0, 1, 2)
    assert ALONE.policy.dump.restarts_from_memory
    assert not ALONE._replace(nodes=(3, 1)).policy.dump.restarts_from_memory
    assert (ALONE.world_size, ALONE.nnodes, ALONE.first_rank) == (3, 1, 0)


def test_a_node_saves_under_the_name_of_the_controllers_run():
    controlled = ALONE._replace(job_id="first")
    assert [job.saves_as for job in (ALONE, controlled)] == ["rec", "first"]
    assert [job.is_controlled for job in (ALONE, controlled)] == [False, True]
