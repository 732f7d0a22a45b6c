"""Jobs that a real Slurm starts: nothing is typed, and what it ends it may begin again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.engine_jobs import (
    MSRUN,
    PLACE,
    await_logs,
    await_said,
    check_replaced,
    logs,
    places,
)
from support.jobs import DEADLINE_S, WORKERS, poll
from support.node_trainings import PATIENT, SCRIPT, weights
from support.slurm import REQUEUE_S, Slurm
from support.warm_python import WarmPython

WAITS = WORKERS / "speak_and_wait.py"
NO_TOKEN = "the nodes have no token"
ONE_A_NODE = ("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> list[str]:
    """The final weights of the training without msrun."""
    return weights(warm_python.train(tmp_path_factory.mktemp("undisturbed"), 2, SCRIPT))


def tokens(slurm: Slurm) -> list[Path]:
    """The folders of tokens that nodes have made."""
    return list(slurm.cluster.folder.glob("**/msrun/tokens/*"))


def batch(slurm: Slurm, *words: object, options: tuple[str, ...] = ()) -> int:
    """A batch script of two nodes that runs msrun by srun; the job's number."""
    script = slurm.cluster.folder / "job.sh"
    line = "exec " + shlex.join(map(str, ("srun", *ONE_A_NODE, *MSRUN, *words)))
    script.write_text(f"#!/bin/sh\n{line}\n")
    said = slurm.say("sbatch", "-N2", "--output=job.out", "--open-mode=append", *options, script)
    return int(said.split()[-1])


def test_nothing_is_typed(four_nodes: Slurm) -> None:
    folder = four_nodes.cluster.folder / "logs"
    job = four_nodes.run("srun", "-N4", *ONE_A_NODE, *MSRUN, f"--log_dir={folder}", PLACE)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    told = places(folder)
    assert [each["host"] for each in told] == ["node0", "node1", "node2", "node3"]
    assert [each["GROUP_RANK"] for each in told] == ["0", "1", "2", "3"]
    assert {each["WORLD_SIZE"] for each in told} == {"4"}
    assert {each["TORCHELASTIC_RUN_ID"] for each in told} == {"slurm-1.0"}
    said = "msrun: Slurm's step 1.0: the job is on 4 nodes (--nnodes=1 runs each by itself)"
    assert job.errors().count(said) == 1
    assert NO_TOKEN not in job.errors()  # the nodes have made one
    assert tokens(four_nodes) == []


def test_nodes_without_a_common_home_have_no_token(four_nodes: Slurm) -> None:
    script = 'export XDG_STATE_HOME=$PWD/home-$SLURM_NODEID; exec "$@"'
    words = ("sh", "-c", script, "sh", *MSRUN, "--log_dir=logs", PLACE)
    job = four_nodes.run("srun", "-N4", *ONE_A_NODE, *words)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    assert len(places(four_nodes.cluster.folder / "logs")) == 4
    assert job.errors().count(NO_TOKEN) == 1
    assert tokens(four_nodes) == []


def test_a_node_from_elsewhere_needs_the_token_of_the_step(four_nodes: Slurm) -> None:
    """Its file is in the home folder while the job runs, and goes with it."""
    job = four_nodes.run("srun", "-N2", *ONE_A_NODE, *MSRUN, "--log_dir=logs", WAITS, "go")
    await_logs(four_nodes.cluster.folder / "logs", "hello")
    ((token,),) = (folder.glob("*") for folder in tokens(four_nodes))
    assert token.stat().st_mode & 0o777 == 0o600
    port = token.parent.name.rpartition("-")[2]
    there = ("--nnodes=2", "--master-addr=node0", f"--master-port={port}", "--rdzv-id=slurm-1.0")
    stranger, friend = four_nodes.cluster.nodes[2:]
    refused = stranger.run([*MSRUN, "--spare-node", *there, WAITS, "go"])
    assert refused.wait(DEADLINE_S) == 2
    assert "this job needs a token" in refused.errors()
    spare = friend.run([*MSRUN, "--spare-node", f"--token-file={token}", *there, WAITS, "go"])
    await_said(spare, "this node waits as a spare")
    (four_nodes.cluster.folder / "go").touch()
    assert (job.wait(DEADLINE_S), spare.wait(DEADLINE_S)) == (0, 0), job.errors()
    assert tokens(four_nodes) == []


def test_options_that_are_typed_count(four_nodes: Slurm) -> None:
    folder = four_nodes.cluster.folder / "logs"
    words = (f"--log_dir={folder}", "--worker_num=6", "--master-port=4711", PLACE)
    job = four_nodes.run("srun", "-N3", *ONE_A_NODE, *MSRUN, *words)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    assert [each["LOCAL_WORLD_SIZE"] for each in places(folder)] == ["2"] * 6


def test_each_task_by_itself(four_nodes: Slurm) -> None:
    script = f'exec "$@" --nnodes=1 --log_dir=logs-$SLURM_PROCID {shlex.quote(str(PLACE))}'
    job = four_nodes.run("srun", "-n4", "-N2", "sh", "-c", script, "sh", *MSRUN)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    for task in range(4):
        (told,) = places(four_nodes.cluster.folder / f"logs-{task}")
        assert told["WORLD_SIZE"] == "1"


def test_several_tasks_on_a_node_are_refused(four_nodes: Slurm) -> None:
    job = four_nodes.run("srun", "-n4", "-N2", *MSRUN, PLACE)
    assert job.wait(DEADLINE_S) == 2
    assert "this step of Slurm has 4 tasks on 2 nodes, but msrun is to be started" in job.errors()


@pytest.mark.torch
def test_a_rank_is_replaced(four_nodes: Slurm, undisturbed: list[str]) -> None:
    folder = four_nodes.cluster.folder / "logs"
    words = (f"--log_dir={folder}", SCRIPT, "--wait=5:0")
    job = four_nodes.run("srun", "-N2", *ONE_A_NODE, *MSRUN, *words)
    check_replaced(four_nodes.cluster, folder, job, 1, undisturbed)


@pytest.mark.torch
def test_a_node_that_dies_is_replaced_by_a_spare_one(
    four_nodes: Slurm, undisturbed: list[str]
) -> None:
    folder = four_nodes.cluster.folder / "logs"
    words = ("--nnodes=2", f"--log_dir={folder}", SCRIPT, PATIENT, "--wait=5:0")
    job = four_nodes.run("srun", "-N3", *ONE_A_NODE, *MSRUN, *words)
    await_said(job, "the job is on 2 nodes, one waits as a spare")
    await_said(job, "a spare node has come (node2)")
    await_logs(folder, "waits in step 5")
    await_said(job, "msrun: protected: ")  # its first steps were compared
    four_nodes.cluster.nodes[1].kill()
    await_said(job, "node 1 (node2) has come in the place of the lost one")
    (four_nodes.cluster.folder / "go").touch()
    await_said(job, "training resumes at step 5")
    poll(lambda: len(weights(logs(folder))) == len(undisturbed))
    poll(lambda: tokens(four_nodes) == [])
    assert weights(logs(folder)) == undisturbed, job.errors()


@pytest.mark.torch
@pytest.mark.parametrize("how", ["preempted", "requeued"])
def test_a_job_that_slurm_begins_again_loses_no_step(
    four_nodes: Slurm, undisturbed: list[str], how: str
) -> None:
    folder = four_nodes.cluster.folder
    job = batch(four_nodes, "--log_dir=logs", SCRIPT, "--pause=0.2", options=("--requeue",))
    await_logs(folder / "logs", "begins step 3")
    other = None
    if how == "requeued":
        four_nodes.say("scontrol", "requeue", job)
    else:
        other = four_nodes.run("srun", "-N4", "-p", "high", "--exclusive", "sleep", "1")
    said = folder / "job.out"
    poll(
        lambda: (
            "Graceful exit is triggered" in said.read_text() or "is saved in" in said.read_text()
        )
    )
    if other is not None:
        assert other.wait(DEADLINE_S) == 0, other.errors()
    poll(lambda: four_nodes.state(job) == "PENDING")
    poll(lambda: four_nodes.state(job) == "RUNNING", REQUEUE_S + DEADLINE_S)
    poll(lambda: four_nodes.state(job) == "")
    text = said.read_text()
    (step,) = re.findall(r"resuming step (\d+) of run", text)
    assert f"from step {step}" in "".join(logs(folder / "logs")), text
    assert weights(logs(folder / "logs")) == undisturbed
    assert NO_TOKEN not in text
    poll(lambda: tokens(four_nodes) == [])
