"""Parts of a large state, which different nodes hold, travel from these to the nodes that need them."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.bad_cables import limit, mend
from support.certificates import PASSWORDS, authority
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import NodeJobs, NodesJob
from support.node_trainings import saved
from support.sharded_trainings import SCRIPT, Undisturbed, undisturbed_digests
from support.traffic import received, sent
from support.warm_python import WarmPython

from worker_hooks.storage.manifest import REPLICATED

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
MIB = 1 << 20
TABLE = 72  # MiB of each part: so much would be shared out between writers
STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Undisturbed:
    return undisturbed_digests(tmp_path_factory.mktemp("undisturbed"), warm_python, STEPS)


def begin(jobs: NodeJobs, *words: str, **how: object) -> NodesJob:
    """Ranks 0 and 2 hold one part, ranks 1 and 3 the other, each on a node of its own."""
    mine = [word for word in words if word.startswith(("--node-wait", "--resume", "--tls"))]
    its = [word for word in words if word not in mine]
    where = {"nodes": range(4), "nproc": 1, **how}
    about = SCRIPT, "tpdp", STEPS, f"--table={TABLE}", "--pause=0.1", *its
    job = jobs.start(*mine, *about, **where)
    if "--resume" not in mine:
        job.head.await_error("protected")
        poll(lambda: any("step 4" in log for log in job.logs().values()))
    return job


def check_same(jobs: NodeJobs, job: NodesJob, undisturbed: Undisturbed) -> None:
    job.succeed()
    assert (jobs.folder / "tpdp.sha").read_text() == undisturbed("tpdp"), job.told()
    assert len(job.head.seen("StartAttempt")) == 1, job.told()


@pytest.mark.parametrize("dead", [3, 2, 0])
def test_each_part_travels_from_where_it_is_held_to_the_new_rank_and_nowhere_else(
    nodes: Callable[[int], Cluster], undisturbed: Undisturbed, dead: int
) -> None:
    jobs = NodeJobs(cluster := nodes(4))
    job = begin(jobs)
    came, left = ([each(cluster, node) for node in range(4)] for each in (received, sent))
    job.kill_rank(dead)
    job.head.await_error("training resumes at step")
    came = [received(cluster, node) - before for node, before in enumerate(came)]
    left = [sent(cluster, node) - before for node, before in enumerate(left)]
    check_same(jobs, job, undisturbed)
    assert "no step is lost" in job.head.errors
    part = TABLE * MIB
    assert part < came[dead] < 1.5 * part, came  # its own part, and not the other one
    assert all(each < MIB for node, each in enumerate(came) if node != dead), came
    assert left[(dead + 2) % 4] > part, left  # its replica's node has sent it


def test_nodes_with_certificates_reach_node_0_alone(
    nodes: Callable[[int], Cluster],
    undisturbed: Undisturbed,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """So the parts come there, and from there to the new rank."""
    (folder := tmp_path_factory.mktemp("certificates")).chmod(0o755)
    option = f"--tls-config={authority(folder).config()}"
    jobs = NodeJobs(cluster := nodes(4))
    job = begin(jobs, option, environ=PASSWORDS)
    before = received(cluster, 0)
    job.kill_rank(3)
    job.head.await_error("training resumes at step")
    came = received(cluster, 0) - before
    check_same(jobs, job, undisturbed)
    assert "no step is lost" in job.head.errors
    assert came > TABLE * MIB


def test_what_other_nodes_have_in_memory_is_saved_when_the_job_is_stopped(
    nodes: Callable[[int], Cluster], undisturbed: Undisturbed
) -> None:
    jobs = NodeJobs(nodes(4))
    job = begin(jobs, "--late")
    job.kill_rank(3)
    job.head.await_error("keep running")
    poll(lambda: len(job.head.seen("Rejoining")) == 3)
    job.head.signal(signal.SIGTERM)
    for part in job.parts:
        part.wait()
    check_saved(jobs, job)
    check_same(jobs, begin(jobs, "--resume"), undisturbed)


@pytest.mark.parametrize(("dead", "lost"), [(2, 1), (3, 0), (0, 0)])
def test_a_node_is_lost_while_a_rank_is_replaced(
    nodes: Callable[[int], Cluster], undisturbed: Undisturbed, dead: int, lost: int
) -> None:
    """Its replica's node has what it held. Without node 0 each node writes what it has."""
    jobs = NodeJobs(nodes(4))
    job = begin(jobs, "--late", "--node-wait=0")
    job.kill_rank(dead)
    job.head.await_error("keep running")
    poll(lambda: len(job.head.seen("Rejoining")) == 3)
    jobs.cluster.nodes[lost].kill()
    for node in {*range(4)} - {lost}:
        job.parts[node].wait()
    check_saved(jobs, job)
    jobs.cluster.nodes[lost].boot()
    check_same(jobs, begin(jobs, "--resume"), undisturbed)


def test_node_0_is_lost_before_all_are_told_to_resume_from_memory(
    nodes: Callable[[int], Cluster], undisturbed: Undisturbed
) -> None:
    """Who was told has one part in memory, who was not holds the other, and has it there as well."""
    jobs = NodeJobs(cluster := nodes(4))
    job = begin(jobs, "--late", "--node-wait=0")
    limit(cluster, 3, "200mbit")
    before = received(cluster, 1)
    job.kill_rank(1)
    # the other nodes have long had what they need by then
    poll(lambda: received(cluster, 1) > before + TABLE * MIB * 2 // 3)
    cluster.nodes[2].cut()
    poll(lambda: len(job.head.seen("Rejoining")) >= 2)  # of three, if the machine is busy
    cluster.nodes[0].poweroff()
    cluster.nodes[2].mend()
    for part in job.parts[1:]:
        part.wait()
    check_saved(jobs, job)
    (found,) = saved(jobs, "dumps")
    assert (found.without_private, found.stale_private) == ((), ()), job.told()
    mend(cluster, 3)
    cluster.nodes[0].boot()
    check_same(jobs, begin(jobs, "--resume"), undisturbed)


def check_saved(jobs: NodeJobs, job: NodesJob) -> None:
    """Both parts are."""
    (found,) = saved(jobs, "dumps")
    assert found.step >= 3, job.told()
    assert {shard.variant for shard in found.shards if shard.kind == REPLICATED} == {0, 1}
