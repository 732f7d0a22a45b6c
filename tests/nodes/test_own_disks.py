"""Each node has a disk of its own where the job saves: ranks and nodes are replaced from memory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import sharded_trainings
from support.cluster import Cluster
from support.node_jobs import PORT, NodeJobs, NodesJob, check_nothing_left, job_of, static
from support.node_trainings import PATIENT, RESTARTS, SCRIPT, check_weights, go, train, weights
from support.sharded_trainings import undisturbed_digests
from support.warm_python import WarmPython

from worker_hooks.storage import manifest as manifests

Nodes = Callable[[int], Cluster]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
WAITS = ("/", PATIENT, "--wait=5:1")
PROTECTED = "msrun: protected: a rank that dies is replaced, no step is lost as long as one rank lives (checked: "
APART = "is not one folder for all nodes: what node 1 (node1) writes there is not seen"


def disk(jobs: NodeJobs, node: int) -> Path:
    """What a node sees as the folder into which the job saves."""
    return jobs.cluster.nodes[node].folder / "disk"


def divide(jobs: NodeJobs, name: str = "checkpoints") -> NodeJobs:
    """Each node has a disk of its own under this name."""
    (jobs.folder / name).mkdir()
    for at in range(len(jobs.cluster.nodes)):
        disk(jobs, at).mkdir()
        mount(jobs, at, name)
    return jobs


def mount(jobs: NodeJobs, node: int, name: str = "checkpoints") -> None:
    """Once a node is on."""
    how = ["mount", "--bind", disk(jobs, node), jobs.folder / name]
    assert jobs.cluster.nodes[node].run(how).wait() == 0


@pytest.fixture
def apart(jobs: NodeJobs) -> NodeJobs:
    return divide(jobs)


def steps(jobs: NodeJobs, node: int) -> list[int]:
    """What is saved on a node's disk, verified."""

    def found() -> Iterator[int]:
        for path in disk(jobs, node).glob("tft_*step_[0-9]*"):
            about = manifests.read(path)
            assert manifests.verify(path, about) == []
            assert (about.without_private, about.stale_private) == ((), ())
            yield about.step

    return sorted(found())


def begun(jobs: NodeJobs, *words: str) -> NodesJob:
    """A training that waits in step 5, and has said that disks are not shared."""
    job = train(jobs, *words, *WAITS)
    job.await_lines("waits in step 5")
    job.head.await_error(APART)
    return job


def check_done(job: NodesJob, undisturbed: list[str], attempt: int) -> None:
    ended = job.succeed()
    check_weights(weights(job.logs().values()), undisturbed, ended[0].err)
    assert job.head.seen("StartAttempt")[-1]["attempt"] == attempt
    check_nothing_left(*(part.node for part in job.parts))


DEATHS = {"on node 1": (3,), "all of node 0": (0, 1)}


@pytest.mark.parametrize("case", DEATHS)
def test_ranks_are_replaced(apart: NodeJobs, undisturbed: list[str], case: str) -> None:
    job = begun(apart)
    assert PROTECTED in job.head.errors
    assert "likewise a node, once another takes its place; " in job.head.errors
    assert "not protected" not in job.head.errors
    job.kill_rank(*DEATHS[case])
    job.head.await_error("keep running")
    go(apart)
    job.head.await_error("training resumes at step 5, no step is lost")
    check_done(job, undisturbed, 0)
    assert steps(apart, 0) == steps(apart, 1) == []


def test_a_spare_node_takes_the_place_of_a_lost_one(nodes: Nodes, undisturbed: list[str]) -> None:
    jobs = divide(NodeJobs(nodes(3)))
    where = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=node0", f"--master-port={PORT}")
    job = train(jobs, "--max-replacements=1", *WAITS)  # it has two ranks, and is one
    spare = jobs.start_one(
        jobs.cluster.nodes[2], "--spare-node", *where, SCRIPT, *WAITS[1:], nproc=2
    )
    job.await_lines("waits in step 5")
    job.head.await_error(APART)
    job.head.await_error("a spare node has come (node2)")
    jobs.cluster.nodes[1].kill()
    job.head.await_error("node 1 (node2) has come in the place of the lost one")
    go(jobs)
    job.parts[1], spare.rank = spare, 1
    job.head.await_error("training resumes at step 5, no step is lost")
    check_done(job, undisturbed, 0)


@pytest.mark.parametrize("case", DEATHS)
def test_all_ranks_restart(apart: NodeJobs, undisturbed: list[str], case: str) -> None:
    job = begun(apart, RESTARTS, "--max-restarts=1")
    assert "msrun: partly protected: " in job.head.errors
    job.kill_rank(*DEATHS[case])
    job.head.await_error("restart 1 of 1")
    go(apart)
    job.await_everywhere("from step 4")
    check_done(job, undisturbed, 1)
    assert steps(apart, 0) == steps(apart, 1) == [4]
    assert "tft_saved_checkpoints-step_4 is not on this node (node1)" in job.parts[1].errors


def test_a_stop_saves_and_a_resume_copies(apart: NodeJobs, undisturbed: list[str]) -> None:
    job = begun(apart)
    job.parts[1].signal(signal.SIGTERM)
    job.head.await_state("holding")
    go(apart)
    assert [each.code for each in job.wait()] == [0, 0], job.told()
    assert (steps(apart, 0), steps(apart, 1)) == ([5], [])
    again = train(apart, "--resume", *WAITS)
    ended = again.succeed()
    assert "tft_saved_checkpoints-step_5 is not on this node (node1)" in ended[1].err
    check_weights(weights(again.logs().values()), undisturbed, ended[0].err)


def test_parts_that_the_first_node_has_lost_come_to_its_disk(
    jobs: NodeJobs, tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> None:
    apart = divide(jobs, "dumps")
    expected = undisturbed_digests(tmp_path_factory.mktemp("undisturbed"), warm_python, 14)("hsdp")
    words = (sharded_trainings.SCRIPT, "hsdp", 14, "--pause=0.7")
    job = apart.start(RESTARTS, "--max-restarts=1", *words, nproc=2)
    job.head.await_error(APART)
    job.kill_rank(0)  # rank 2 has the same part
    job.succeed()
    assert (apart.folder / "hsdp.sha").read_text() == expected, job.told()
    assert "restart 1 of 1: rank 0 was killed" in job.head.errors
    (step,) = steps(apart, 0)
    assert step > 0
    assert steps(apart, 1) == [step]


def test_another_checkpoint_of_that_name_ends_the_job(apart: NodeJobs) -> None:
    job = begun(apart, RESTARTS, "--max-restarts=1")
    other = disk(apart, 1) / "tft_saved_checkpoints-step_4"
    other.mkdir()
    (other / "mine").touch()
    job.kill_rank(3)
    ended = job.wait()
    assert [each.code for each in ended] == [2, 2], job.told()
    why = f"{apart.folder}/checkpoints/{other.name} on node1 is not the checkpoint of node 0"
    assert f"msrun: {why}, another run has saved it: move it away" in ended[0].err, job.told()
    assert [path.name for path in other.iterdir()] == ["mine"]
    check_nothing_left(*apart.cluster.nodes)


def test_the_first_node_is_killed(apart: NodeJobs) -> None:
    """No disk is needed to go on, and there is none that another node would have to see."""
    job = begun(apart)
    apart.cluster.nodes[0].kill()
    job.parts[1].await_error("the ranks of the other nodes live on")
    job.parts[1].await_error("waiting 10 min 0 s at most for another node 0")
    job.parts[1].signal(signal.SIGTERM)
    assert job.parts[1].wait().code == 128 + signal.SIGTERM, job.told()
    assert steps(apart, 1) == [4]
    check_nothing_left(apart.cluster.nodes[1])


def test_nobody_comes_in_the_place_of_the_first_node(
    apart: NodeJobs, undisturbed: list[str]
) -> None:
    """The node that took its part saves on its own disk; what it says then resumes from there."""
    job = begun(apart, "--node-wait=4")
    apart.cluster.nodes[0].kill()
    job.parts[1].await_error("the ranks of the other nodes live on")
    ended = job.parts[1].wait()
    assert ended.code == 1, job.told()
    assert "no node came in the place of node 0 (node0) within 4 s" in ended.err
    assert steps(apart, 1) == [4]
    check_nothing_left(apart.cluster.nodes[1])
    place = ("--master-addr=10.77.0.2", f"--master-port={PORT}")
    *_, others, last = ended.err.splitlines()
    assert f"but with {' '.join(place)} and without --node-rank" in others
    assert last == f"msrun: to resume: msrun --node-rank=0 {' '.join(place)} --resume"
    apart.cluster.nodes[0].boot()
    mount(apart, 0)
    go(apart)
    first = apart.start_one(apart.cluster.nodes[1], *last.split()[4:], nproc=2)
    words = ("--nnodes=2", "--nproc-per-node=2", *place, SCRIPT, *WAITS[1:])
    other = apart.start_one(apart.cluster.nodes[0], *words, nproc=2)
    again = job_of(first, other)
    again.succeed()
    assert "resuming step 4" in first.errors
    assert "tft_saved_checkpoints-step_4 is not on this node (node0)" in other.errors
    check_weights(weights(again.logs().values()), undisturbed, first.errors)


def test_a_node_whose_disk_has_a_newer_step_than_node_0_is_asked(apart: NodeJobs) -> None:
    """It had taken node 0's part; node 0 has the steps before it was lost alone."""
    longer = ("--epochs=4", *WAITS[1:], "--wait=9:1")
    job = train(apart, "/", *longer)
    job.await_lines("waits in step 5")
    job.head.await_error(APART)
    job.head.signal(signal.SIGTERM)
    job.head.await_state("holding")
    go(apart)
    assert [each.code for each in job.wait()] == [0, 0], job.told()
    again = train(apart, "--resume", "--node-wait=4", "/", *longer)
    again.await_lines("waits in step 9")
    again.head.await_error(APART)
    apart.cluster.nodes[0].kill()
    assert again.parts[1].wait().code == 1, again.told()
    assert (steps(apart, 0), steps(apart, 1)) == ([5], [5, 8])
    apart.cluster.nodes[0].boot()
    mount(apart, 0)
    go(apart, 9)
    head = apart.start_one(apart.cluster.nodes[0], "--resume", nproc=2, log_dir=apart.folder / "l")
    other = apart.start_one(apart.cluster.nodes[1], *static(1, 2, 2), SCRIPT, *longer, nproc=2)
    last = job_of(head, other)
    last.succeed()
    assert "resuming step 8 of run" in head.errors, head.errors
    assert steps(apart, 0) == [5, 8]


def test_parts_of_a_periodic_checkpoint_are_nowhere_together(apart: NodeJobs) -> None:
    job = train(apart, "/", "--periodic=checkpoints/periodic")
    job.head.await_error("cannot become complete, as the ranks of node 1 (node1) write their parts")
    place = f"a ModelCheckpoint in {apart.folder}/checkpoints/periodic cannot become complete"
    assert place in job.head.errors
    assert [each.code for each in job.wait()] == [1, 1], job.told()
    assert f"CheckpointError: {place}: {apart.folder}/checkpoints" in "".join(job.logs().values())
    check_nothing_left(*apart.cluster.nodes)
