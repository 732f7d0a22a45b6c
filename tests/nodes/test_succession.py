"""Node 0 is lost: another node takes its part, and the job goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.jobs import DEADLINE_S, PYTHON
from support.node_drills import told_place
from support.node_jobs import PORT, NodeJobs, NodeMsrun, NodesJob, check_nothing_left, static
from support.node_trainings import PATIENT, SCRIPT, check_weights, go, logs_of, train, weights
from support.screens import LEAVE, Terminal
from support.sharded_trainings import SCRIPT as SHARDED

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
Nodes = Callable[[int], Cluster]
WAITS = (SCRIPT, PATIENT, "--wait=3:1")
TAKES_PART = "this node takes the part of node 0, which is lost; "
LEADS = "this node takes the part of node 0, which is lost: the ranks of the other nodes live on"


AT_FIRST = ("--master-addr=node0", f"--master-port={PORT}")


def add(
    jobs: NodeJobs, node: int, *words: object, nproc: int = 2, at: Sequence[str] = AT_FIRST
) -> NodeMsrun:
    """Another msrun on a machine that has no part in the job yet."""
    meeting = (*at, f"--nproc-per-node={nproc}")
    log_dir = jobs.cluster.nodes[node].folder / "added"
    return jobs.start_one(
        jobs.cluster.nodes[node], *meeting, *words, *WAITS, nproc=nproc, log_dir=log_dir
    )


def begun(job: NodesJob) -> None:
    """All ranks wait in step 3, and are protected."""
    job.await_lines("waits in step 3")
    job.head.await_error("protected")


def check_bitwise(undisturbed: Sequence[str], *parts: NodeMsrun) -> None:
    """The job is over, and its weights are those of one that nothing befell."""
    for part in parts:
        assert part.wait().code == 0, "".join(each.errors for each in parts)
    check_weights(weights(logs_of(*parts)), undisturbed, "".join(part.errors for part in parts))


def test_of_nodes_with_one_rank_each_the_second_takes_the_place_of_the_first(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    job = jobs.start(*WAITS, nproc=1)
    spare = add(jobs, 2, "--spare-node", "--nnodes=2", nproc=1)
    spare.await_error("this node waits as a spare")
    begun(job)
    go(jobs)
    jobs.cluster.nodes[0].kill()
    job.parts[1].await_error(LEADS)
    for part in (job.parts[1], spare):
        assert part.wait().code == 0, part.errors
    assert "; replacing it, rank 1 keeps running" in job.parts[1].errors
    assert "no step is lost" in job.parts[1].errors
    assert [log.count("from step") for log in logs_of(job.parts[1])] == [1]
    check_nothing_left(*jobs.cluster.nodes)


def test_a_spare_node_takes_the_place_of_the_first(
    nodes: Nodes, undisturbed: Sequence[str]
) -> None:
    jobs = NodeJobs(nodes(3))
    job = jobs.start("--max-replacements=1", *WAITS, nproc=2)  # it has two ranks, and is one
    spare = add(jobs, 2, "--spare-node", "--nnodes=2")
    spare.await_error("this node waits as a spare")
    begun(job)
    go(jobs)
    jobs.cluster.nodes[0].kill()
    job.parts[1].await_error(LEADS)
    check_bitwise(undisturbed, job.parts[1], spare)
    assert "; replacing ranks 0-1, ranks 2-3 keep running" in job.parts[1].errors
    assert "no step is lost" in job.parts[1].errors
    assert [log.count("from step") for log in logs_of(job.parts[1])] == [1, 1]
    assert not [*jobs.folder.glob("checkpoints/*")]
    check_nothing_left(*jobs.cluster.nodes)


def test_the_first_node_is_started_again(jobs: NodeJobs, undisturbed: Sequence[str]) -> None:
    job = train(jobs, "/", *WAITS[1:])
    begun(job)
    go(jobs)
    jobs.cluster.nodes[0].kill()
    job.parts[1].await_error(LEADS)
    jobs.cluster.nodes[0].boot()
    again = jobs.start_one(
        jobs.cluster.nodes[0],
        *static(0, 2, 2),
        *WAITS,
        nproc=2,
        log_dir=jobs.cluster.nodes[0].folder / "again",
    )
    check_bitwise(undisturbed, job.parts[1], again)
    assert "msrun: node 0 is started again: the ranks of all nodes save" in job.parts[1].errors
    assert re.search(r"msrun: resuming step \d of run .*: its node 0 was lost", again.errors)
    check_nothing_left(*jobs.cluster.nodes)


def test_who_watches_another_node_sees_the_job_that_follows(jobs: NodeJobs) -> None:
    """Its msrun goes on with another run, of which alone it shows pages and logs."""
    words = (SCRIPT, "--epochs=4", "--wait=9:0,1,2,3", "--wait=12:0,1,2,3")
    job = jobs.start(*words, nproc=2)
    job.await_lines("waits in step 9", 4)
    part, node = job.parts[1], jobs.cluster.nodes[1]

    def until_all_are_at(step: int) -> None:
        rows = (rf"\n[^\n]* {rank} +\d+ [^\n]*running[^\n]*/{step} [^\n]*" for rank in range(4))
        terminal.until("".join(rows), DEADLINE_S)

    with contextlib.closing(Terminal()) as terminal:
        top = node.run(
            [*PYTHON, "-m", "msrun", "top", "--interval=0.1"],
            env={"TERM": "xterm"},
            cwd=jobs.folder,
            stdout=Path(os.ttyname(terminal.theirs)),
            stdin=terminal.theirs,
        )
        logs = node.run([*PYTHON, "-m", "msrun", "logs", "-f", "--rank=2"], cwd=jobs.folder)
        until_all_are_at(8)
        jobs.cluster.nodes[0].kill()
        part.await_error(LEADS)
        jobs.cluster.nodes[0].boot()
        again = jobs.start_one(
            jobs.cluster.nodes[0],
            *static(0, 2, 2),
            *words,
            nproc=2,
            log_dir=jobs.cluster.nodes[0].folder / "again",
        )
        terminal.until("nothing saved since step 8", DEADLINE_S)
        go(jobs)
        until_all_are_at(11)
        logs.await_output("waits in step 12")
        go(jobs, 12)
        terminal.until(re.escape(LEAVE) + r"[^\n]*succeeded", DEADLINE_S)
        assert [program.wait() for program in (top, logs)] == [0, 0]
    assert [each.wait().code for each in (part, again)] == [0, 0], part.errors
    check_nothing_left(*jobs.cluster.nodes)


def test_only_its_msrun_is_killed(jobs: NodeJobs, undisturbed: Sequence[str]) -> None:
    job = train(jobs, "/", *WAITS[1:])
    begun(job)
    go(jobs)
    job.head.signal(signal.SIGKILL)
    job.parts[1].await_error(LEADS)
    told = job.parts[1].command("status").out
    assert "state    replacing" in told, told
    other = add(jobs, 0, "--nnodes=2", at=told_place(job.parts[1].errors))
    check_bitwise(undisturbed, job.parts[1], other)
    check_nothing_left(*jobs.cluster.nodes)


def test_a_job_that_began_anew_before_a_survivor_came_ends(
    nodes: Nodes, undisturbed: Sequence[str]
) -> None:
    """As where an engine starts node 0 again, and another node in the place of a slow one."""
    jobs = NodeJobs(nodes(3))
    words = (*WAITS, "--pause=0.1")
    job = jobs.start(*words, nproc=2)
    begun(job)
    go(jobs)
    job.await_lines("begins step 6", 4)
    job.parts[1].signal(signal.SIGSTOP)
    jobs.cluster.nodes[0].kill()
    (jobs.folder / "go").unlink()
    jobs.cluster.nodes[0].boot()

    def start(node: int, name: str) -> NodeMsrun:
        where = jobs.cluster.nodes[node]
        folder = where.folder / name
        rank = (0, 1, 1)[node]
        return jobs.start_one(where, *static(rank, 2, 2), *words, nproc=2, log_dir=folder)

    anew = NodesJob([start(0, "anew"), start(2, "anew")])
    anew.await_lines("waits in step 3")
    job.parts[1].signal(signal.SIGCONT)
    assert {part.wait().code for part in anew.parts} == {128 + signal.SIGTERM}, job.parts[1].errors
    assert re.search(
        r"node1 has saved step \d of the same training in \S+, and was not here when this job "
        r"began, which has come to step 2",
        anew.head.errors,
    )
    go(jobs)
    again = start(0, "again")
    check_bitwise(undisturbed, job.parts[1], again)
    check_nothing_left(*jobs.cluster.nodes)


@pytest.mark.parametrize("periodic", [0, 2])
def test_a_job_of_which_no_step_is_saved_begins_anew_with_a_node_0_that_is_started_again(
    jobs: NodeJobs, periodic: int
) -> None:
    """Each rank has a part that no other holds, so what node 0 had is lost with it."""
    words = (SHARDED, "fsdp", 14, "--pause=0.1", f"--periodic={periodic}")
    job = jobs.start("--max-restarts=3", *words, nproc=2)
    job.head.await_error("protected")
    job.await_lines("step 5", 4)
    jobs.cluster.nodes[0].kill()
    part = job.parts[1]
    part.await_error(TAKES_PART)
    jobs.cluster.nodes[0].boot()
    again = jobs.start_one(
        jobs.cluster.nodes[0],
        *static(0, 2, 2),
        "--max-restarts=3",
        *words,
        nproc=2,
        log_dir=jobs.cluster.nodes[0].folder / "again",
    )
    said = [(each.wait().code, each.errors) for each in (part, again)]
    assert [code for code, _ in said] == [0, 0], said
    if periodic:
        assert re.search(r"resuming step [246] of run ", again.errors), again.errors
    else:
        for _, errors in said:
            assert re.search(
                r"nothing of run \S+ is saved: the job begins anew, (5|6|7) steps are lost", errors
            ), errors
    check_nothing_left(*jobs.cluster.nodes)
