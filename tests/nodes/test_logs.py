"""`msrun logs` on a node of a job, for a rank of another one: as it is, as it grows, and at its end."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support import hand_jobs
from support.cluster import Cluster
from support.jobs import PYTHON, poll
from support.node_jobs import NodeJobs, NodeMsrun, check_nothing_left, static
from support.node_places import PLACE
from support.node_trainings import SCRIPT, go, train

from msrun.cluster.program import NodeProgram

Nodes = Callable[[int], Cluster]


def follow(part: NodeMsrun, rank: int) -> NodeProgram:
    """`msrun logs -f` beside a node's msrun."""
    argv = [*PYTHON, "-m", "msrun", "logs", "--follow", "--rank", str(rank)]
    return part.node.run(argv, cwd=part.node.shared)


def log_of(part: NodeMsrun, rank: int) -> str:
    return (part.folder / f"worker_{rank}.log").read_text()


@pytest.mark.torch
def test_each_node_follows_a_rank_of_the_other_one_to_its_end(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(2))
    job = train(jobs, "/", "--wait", "3:0,1,2,3")
    job.await_everywhere("waits in step 3")
    readers = [follow(job.parts[at], 2 - 2 * at) for at in (0, 1)]
    for reader in readers:
        reader.await_output("waits in step 3")
    go(jobs)
    job.succeed()
    for at, reader in enumerate(readers):
        assert reader.wait() == 0, reader.errors()
        assert reader.output() == log_of(job.parts[1 - at], 2 - 2 * at)
        assert reader.errors() == ""
    check_nothing_left(*cluster.nodes)


def test_it_goes_on_with_the_next_process_of_the_rank(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))
    job = jobs.start("--max-restarts=1", PLACE, "err=here", "wait=go")
    job.await_everywhere("here of rank")
    reader = follow(job.head, 1)
    reader.await_output("here of rank 1")
    job.kill_rank(1)
    poll(lambda: reader.output().count("here of rank 1") == 2)
    first = job.head.command("logs", "--rank", 1, "--attempt", 0)
    assert (first.code, first.out.count("here of rank 1")) == (0, 1), first
    (jobs.folder / "go").touch()
    job.succeed()
    assert reader.wait() == 0, reader.errors()
    assert reader.errors() == ""


def test_who_cannot_be_asked_is_named(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))
    job = jobs.start(PLACE, "err=here", "wait=go", nproc=2)
    job.await_everywhere("here of rank")
    unknown = job.head.command("logs", "--rank", 4)
    assert unknown.code == 2, unknown
    assert "the job has no such rank: its ranks are 0 to 3" in unknown.err
    with (job.parts[1].folder / "worker_3.log").open("ab") as log:
        log.write(b"".join(b"line %d\n" % number for number in range(100_000)))
    long = job.head.command("logs", "--rank", 3)
    assert (long.code, long.out) == (0, log_of(job.parts[1], 3)), long.err
    head = job.parts[1].command("logs", "--scheduler", "--node", 0)
    assert head.code == 0, head
    assert "WorkerStarted rank=3" in head.out
    job.parts[1].signal(signal.SIGSTOP)
    silent = job.head.command("logs", "--rank", 2)
    job.parts[1].signal(signal.SIGCONT)
    assert silent.code == 1, silent
    assert "it is on node 1 (node1), which does not answer" in silent.err
    (jobs.folder / "go").touch()
    job.succeed()
    ended = job.head.command("logs", "--rank", 2)
    assert ended.code == 1, ended
    assert "ran on another node, and its log is there: succeeded" in ended.err
    own = job.parts[1].command("logs", "--rank", 2)
    assert (own.code, own.out) == (0, log_of(job.parts[1], 2)), own


@pytest.mark.torch
def test_a_log_is_followed_to_the_node_that_has_the_rank_after_a_loss(nodes: Nodes) -> None:
    """Who asks is on a third node."""
    jobs = NodeJobs(cluster := nodes(4))
    job = train(jobs, "/", "--wait=3:0,1", nodes=(0, 1, 2), nproc=1)
    ways = [option for option in static(0, 3, 1) if not option.startswith("--node-rank")]
    spare = jobs.start_one(cluster.nodes[3], "--spare-node", *ways, SCRIPT)
    spare.await_error("this node waits as a spare")
    job.await_lines("waits in step 3", 2)
    job.head.await_error("protected")
    reader = follow(job.parts[1], 2)
    reader.await_output("begins step 3")
    lost = log_of(job.parts[2], 2)
    job.parts[2].signal(signal.SIGKILL)
    job.head.await_error("node 2 (node3) has come in the place of the lost one")
    go(jobs)
    assert [part.wait().code for part in (job.head, job.parts[1], spare)] == [0] * 3, job.told()
    assert reader.wait() == 0, reader.errors()
    new = log_of(spare, 2)
    said = reader.output()
    assert said.startswith(lost[: lost.rindex("begins step 3")]), said
    assert said.endswith(new), said
    assert "last lines" not in reader.errors()


@pytest.mark.torch
def test_a_log_can_be_asked_for_where_another_node_has_taken_the_part_of_node_0(
    nodes: Nodes,
) -> None:
    jobs = NodeJobs(nodes(3))
    job = train(jobs, "/", "--wait=3:1,2", nodes=(0, 1, 2), nproc=1)
    job.await_lines("waits in step 3", 2)
    job.head.await_error("protected")
    reader = follow(job.parts[2], 1)
    reader.await_output("waits in step 3")
    job.head.signal(signal.SIGKILL)
    job.parts[1].await_error("this node takes the part of node 0")
    for at, rank in ((1, 2), (2, 1)):
        asked = job.parts[at].command("logs", "--rank", rank)
        assert (asked.code, asked.out) == (0, log_of(job.parts[rank], rank)), asked
    lost = job.parts[1].command("logs", "--rank", 0)
    assert lost.code == 1, lost
    assert "it is on node 0 (node0), which is lost" in lost.err
    stopped = job.parts[2].command("stop", "--now")
    assert stopped.code == 0, stopped
    assert reader.wait() == 0, reader.errors()
    assert reader.output() == log_of(job.parts[1], 1)


def test_a_scheduler_without_ranks_is_asked_for_those_of_its_workers(jobs: NodeJobs) -> None:
    job = hand_jobs.start_all(jobs, PLACE, "err=here", "wait=go")
    job.await_lines("here of rank", 4)
    poll(lambda: all(part.status()["state"] == "running" for part in job.parts))
    run = job.head.status()["record_id"]
    bare = job.head.command("logs", run)
    assert bare.code == 2, bare
    assert f"the ranks of run {run} run on other nodes: --rank N shows the log of one" in bare.err
    asked = job.head.command("logs", run, "--rank", 2)
    assert (asked.code, asked.out.count("here of rank 2")) == (0, 1), asked
    worker = job.parts[2].status()["record_id"]
    other = job.parts[2].command("logs", worker, "--rank", 3)
    assert (other.code, other.out.count("here of rank 3")) == (0, 1), other
    (jobs.folder / "go").touch()
    job.succeed()
