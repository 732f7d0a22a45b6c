"""What a node has prepared for the job that would have followed."""

import signal
import subprocess
from types import SimpleNamespace

from agent.launch import succession
from agent.nodes.line import CLOSED
from agent.nodes.run_messages import NodeFacts
from agent.spec.job_spec import ClusterSpec, JobSpec, Program, ProgramKind, ReplaceSpec
from agent.supervisor.job_view import JobView
from agent.supervisor.run_controlled import NextJob


def test_of_a_job_that_does_not_follow_no_process_is_left():
    """A forkserver that still imports does not notice the end of its msrun."""
    done = []
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as importing:
        following = NextJob.__new__(NextJob)
        following._early = SimpleNamespace(
            forkserver=SimpleNamespace(pid=importing.pid, forget=lambda: done.append("forgotten")),
            hooks_listener=SimpleNamespace(close=lambda: done.append("closed")),
        )
        following._met = SimpleNamespace(door=None)
        following.call_off()
        assert importing.wait(30) == -signal.SIGKILL
    assert done == ["forgotten", "closed"]


def test_who_had_taken_node_0s_part_counts_as_node_0_where_nodes_meet_again():
    nodes = tuple(NodeFacts(rank, "", f"10.0.0.{rank}", 2, 9, door=70 + rank) for rank in range(3))
    asked = JobSpec(
        Program("train.py", (), ProgramKind.SCRIPT, "python"),
        2,
        "r",
        "r",
        cluster=ClusterSpec(3),
        nodes=(2, 2, 2),
        node_rank=0,  # it has the place of the node 0 that was lost before
        master_addr="node0",
        master_port=29500,
        replace=ReplaceSpec(node_wait_s=60.0),
    )
    met = SimpleNamespace(
        prepared=SimpleNamespace(spec=asked, is_late=False),
        asked=asked,
        roster=SimpleNamespace(nodes=nodes),
        door=None,
        token=b"",
    )
    starter = SimpleNamespace(keep=lambda: True, kept=lambda: None)
    following = NextJob(met, {}, SimpleNamespace(say=print), starter, None)
    lost = SimpleNamespace(nodes=nodes, view=JobView(attempt=4), term="", head=1)
    assert following.begin(lost, CLOSED, 9, True)
    assert [each.address for each in following._nodes] == ["10.0.0.1", "10.0.0.0", "10.0.0.2"]
    assert following._spec.node_rank == 1
    job = following._job
    assert (job.master_addr, job.master_port) == ("10.0.0.1", 71)
    assert job.cluster.home == ("node0", 29500)
    lost = SimpleNamespace(nodes=following._nodes, job=job)
    assert succession._addresses(lost)[0] == ("10.0.0.1", 71)
