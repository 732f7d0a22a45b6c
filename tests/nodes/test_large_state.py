"""A large state travels to the nodes that need it, and to no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.bad_cables import limit
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import NodeJobs, NodesJob
from support.node_trainings import SCRIPT, go, saved, train, weights
from support.traffic import received
from support.warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
MIB = 1 << 20
TABLE = 8  # MiB
AGAIN = ["--again"]


def alone(warm_python: WarmPython, folder: Path, ranks: int, words: list[str]) -> list[str]:
    """How the ranks end that nobody guards and nothing disturbs."""
    told = warm_python.train(folder / "alone", ranks, SCRIPT, f"--table={TABLE}", *words)
    return weights(told)


def begin(jobs: NodeJobs, words: list[str], waiting: str, *options: str) -> NodesJob:
    """The ranks ``waiting`` wait in step 6, rank 1 does not."""
    words = [*options, "/", f"--table={TABLE}", *words, f"--wait=6:{waiting}"]
    job = train(jobs, *words, nodes=(0, 1, 2), nproc=(1, 2, 1))
    if "--resume" not in options:
        job.await_lines("waits in step 6", waiting.count(",") + 1)
        job.head.await_error("protected")
    return job


@pytest.mark.parametrize("words", [[], AGAIN], ids=["which they hold", "which they changed"])
def test_survivors_get_the_tensors_that_they_read(
    nodes: Callable[[int], Cluster], warm_python: WarmPython, tmp_path: Path, words: list[str]
) -> None:
    """Before its loop the script changes what it has registered, or does not."""
    undisturbed = alone(warm_python, tmp_path, 4, words)
    jobs = NodeJobs(cluster := nodes(3))
    job = begin(jobs, words, "0,2,3")
    before = [received(cluster, node) for node in range(3)]
    job.kill_rank(1)
    job.head.await_error("keep running")
    go(jobs)
    job.succeed()
    came = [received(cluster, node) - before[node] for node in range(3)]
    assert weights(job.logs().values()) == undisturbed
    assert "training resumes at step 6, no step is lost" in job.head.errors
    assert came[1] < MIB  # the rank that lives on beside the new one has written it there
    assert (came[2] > TABLE * MIB) == bool(words)
    assert max(came) < 2 * TABLE * MIB


@pytest.mark.parametrize(("nproc", "dead"), [((2, 1, 1), 0), ((1, 1, 1), 1)])
def test_what_one_more_node_has_is_written_by_its_ranks(
    nodes: Callable[[int], Cluster],
    warm_python: WarmPython,
    tmp_path: Path,
    nproc: tuple[int, ...],
    dead: int,
) -> None:
    """Where no rank lives on beside the new one, another node has the state besides node 0."""
    count = sum(nproc)
    undisturbed = alone(warm_python, tmp_path, count, [])
    jobs = NodeJobs(cluster := nodes(3))
    others = [rank for rank in range(count) if rank != dead]
    words = [f"--table={TABLE}", f"--wait=6:{','.join(map(str, others))}"]
    job = train(jobs, "/", *words, nodes=(0, 1, 2), nproc=nproc)
    job.await_lines("waits in step 6", len(others))
    job.head.await_error("protected")
    before = [received(cluster, node) for node in range(3)]
    job.kill_rank(dead)
    job.head.await_error("keep running")
    go(jobs)
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert "training resumes at step 6, no step is lost" in job.head.errors
    came = [received(cluster, node) - before[node] for node in range(3)]
    # node 0 has its ranks' memory, node 1 the new rank alone in the other case
    wanted = [False, dead > 0, False]
    assert [each > TABLE * MIB for each in came] == wanted, came
    assert sum(came) < (sum(wanted) * 1.2 + 1) * TABLE * MIB


def await_fetch(jobs: NodeJobs, job: NodesJob) -> None:
    """Return while node 2 fetches tensors that its rank has changed, from a slow node 0."""
    limit(jobs.cluster, 0, "40mbit")
    job.kill_rank(1)
    job.head.await_error("keep running")
    go(jobs)
    poll(lambda: len(job.head.seen("Rejoining")) == 3)
    begun = received(jobs.cluster, 2)
    poll(lambda: received(jobs.cluster, 2) > begun + MIB)


def test_a_rank_dies_while_it_waits_for_tensors(
    nodes: Callable[[int], Cluster], warm_python: WarmPython, tmp_path: Path
) -> None:
    """Another one takes its place, which is not to get the answer to what it had asked."""
    undisturbed = alone(warm_python, tmp_path, 4, AGAIN)
    jobs = NodeJobs(nodes(3))
    job = begin(jobs, AGAIN, "0,2,3")
    await_fetch(jobs, job)
    job.kill_rank(3)
    job.succeed()
    assert weights(job.logs().values()) == undisturbed, job.told()
    assert "no step is lost" in job.head.errors


def test_node_0_is_lost_while_tensors_travel(
    nodes: Callable[[int], Cluster], warm_python: WarmPython, tmp_path: Path
) -> None:
    """A rank that lives on beside the new one has all of them, and saves them."""
    undisturbed = alone(warm_python, tmp_path, 4, AGAIN)
    jobs = NodeJobs(nodes(3))
    job = begin(jobs, AGAIN, "0,2,3", "--node-wait=0")
    await_fetch(jobs, job)
    jobs.cluster.nodes[0].kill()
    assert {part.wait().code for part in job.parts[1:]} == {1}, job.told()
    (found,) = saved(jobs)
    assert found.step == 5
    jobs.cluster.nodes[0].boot()
    again = begin(jobs, AGAIN, "0,2,3", "--resume")
    again.succeed()
    assert weights(again.logs().values()) == undisturbed


@pytest.mark.parametrize("words", [AGAIN, ["--object"]], ids=["changed", "never compared"])
def test_each_replacement_brings_the_tensors_anew(
    nodes: Callable[[int], Cluster], warm_python: WarmPython, tmp_path: Path, words: list[str]
) -> None:
    """A copy may be where an earlier one was, as numbers of files are reused."""
    undisturbed = alone(warm_python, tmp_path, 4, [*words, "--epochs=5"])
    jobs = NodeJobs(nodes(3))
    steps = range(3, 18)
    words = ["--epochs=5", *words, *(f"--wait={step}:0,2,3" for step in steps)]
    job = train(jobs, "/", f"--table={TABLE}", *words, nodes=(0, 1, 2), nproc=(1, 2, 1))
    for count, step in enumerate(steps, 1):
        job.await_lines(f"waits in step {step}", 3)
        job.head.await_error("protected")
        before = received(jobs.cluster, 2)
        job.kill_rank(1)
        poll(lambda count=count: job.head.errors.count("keep running") == count)
        go(jobs, 0 if count == 1 else step)
        poll(lambda count=count: job.head.errors.count("training resumes at step") == count)
        assert received(jobs.cluster, 2) - before > TABLE * MIB
    job.succeed()
    assert weights(job.logs().values()) == undisturbed, job.told()
