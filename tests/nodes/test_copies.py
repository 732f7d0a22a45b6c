"""Copies in the memory of each node's msrun: FSDP without replicas over two nodes goes on from the newest, bitwise."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

import pytest
from support.hand_jobs import start_all
from support.jobs import Launcher, poll
from support.node_jobs import PORT, NodeJobs, NodesJob, check_nothing_left
from support.node_trainings import saved
from support.sharded_trainings import SCRIPT, Undisturbed, undisturbed_digests
from support.warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
STEPS = 120
PAUSE = "--pause=0.05"
PROMISED = (
    "partly protected: ema.0 is cut over ranks 0, 1, 2, 3",
    "; a node that dies takes its copies along, training resumes from the newest ModelCheckpoint",
)


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, warm_python: WarmPython) -> Undisturbed:
    return undisturbed_digests(launcher.tmp, warm_python, STEPS)


def copied(
    jobs: NodeJobs, *options: str, style: str = "fsdp", words: Sequence[str] = ()
) -> NodesJob:
    """A job of which a copy is complete; `options` are msrun's, `words` the script's."""
    job = jobs.start("--max-restarts=1", *options, SCRIPT, style, STEPS, PAUSE, *words, nproc=2)
    job.head.await_seen("StateCopied")
    return job


def kill(job: NodesJob, ranks: Sequence[int]) -> None:
    """At once: none may save anything for another one."""
    pids = [job.rank_pid(rank) for rank in ranks]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, signum)


def check_resumed(jobs: NodeJobs, job: NodesJob, step: int, expected: str, style: str) -> None:
    """It has gone on from a copy of this step or a later one."""
    ended = job.succeed()
    (again,) = job.head.seen("StartAttempt")[1:]
    (order,) = job.head.seen("CommitDump")
    assert order["is_copy"]
    assert order["step"] >= step > 0
    (found,) = saved(jobs, "dumps")
    assert (found.step, found.without_private, found.stale_private) == (order["step"], (), ())
    assert {shard.rank for shard in found.shards} == {0, 1, 2, 3}
    assert again["resume"].endswith(f"step_{found.step}")
    assert f"step {found.step} saved from memory" in ended[0].err
    assert (jobs.folder / f"{style}.sha").read_text() == expected
    check_nothing_left(*jobs.cluster.nodes)


DEATHS = {"one on node 1": (3,), "all on node 1": (2, 3), "all": (0, 1, 2, 3), "rank 0": (0,)}


@pytest.mark.parametrize("case", DEATHS)
def test_training_goes_on_from_the_newest_copy(
    jobs: NodeJobs, undisturbed: Undisturbed, case: str
) -> None:
    job = copied(jobs)
    step = max(each["step"] for each in job.head.seen("StateCopied"))
    kill(job, DEATHS[case])
    check_resumed(jobs, job, step, undisturbed("fsdp"), "fsdp")
    said = job.head.errors
    for promise in PROMISED:
        assert said.index(promise) < said.index("SIGKILL"), said


def test_replicas_on_two_nodes_that_all_die_go_on_from_the_newest_copy(
    jobs: NodeJobs, undisturbed: Undisturbed
) -> None:
    job = copied(jobs, "--protect-memory=copy", style="hsdp")
    step = max(each["step"] for each in job.head.seen("StateCopied"))
    kill(job, range(4))
    check_resumed(jobs, job, step, undisturbed("hsdp"), "hsdp")


def test_a_scheduler_without_ranks_has_the_workers_write_their_copies(
    jobs: NodeJobs, undisturbed: Undisturbed
) -> None:
    job = start_all(jobs, "--max-restarts=1", SCRIPT, "fsdp", STEPS, PAUSE)
    job.head.await_seen("StateCopied")
    step = max(each["step"] for each in job.head.seen("StateCopied"))
    kill(job, (1, 2))
    check_resumed(jobs, job, step, undisturbed("fsdp"), "fsdp")
    assert (
        "; a worker's msrun that dies takes its copies along, training resumes" in job.head.errors
    )


def test_what_dies_with_its_node_is_lost_and_the_newest_checkpoint_counts(
    jobs: NodeJobs, undisturbed: Undisturbed
) -> None:
    job = copied(jobs, words=["--periodic=20"])
    poll((jobs.folder / "saved/net-1_20/manifest.json").exists)
    job.parts[1].signal(signal.SIGKILL)
    job.head.await_error("another node 1: start msrun again")
    where = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=node0", f"--master-port={PORT}")
    node = jobs.cluster.nodes[1]
    words = (*where, "--max-restarts=1", SCRIPT, "fsdp", STEPS, PAUSE, "--periodic=20")
    job.parts[1] = jobs.start_one(node, *words, nproc=2, log_dir=node.folder / "again")
    job.parts[1].rank = 1
    ended = job.succeed()
    said = ended[0].err
    assert re.search(r"the copy of step \d+ in memory is lost with the node", said), said
    assert said.index(PROMISED[1]) < said.index("is gone"), said
    found = job.head.seen("CheckpointFound")[-1]
    assert re.search(r"saved/net-1_\d+$", found["path"]), found
    assert found["step"] >= 20
    assert job.head.seen("CommitDump") == []
    assert (jobs.folder / "fsdp.sha").read_text() == undisturbed("fsdp")
    check_nothing_left(*jobs.cluster.nodes)
