"""Nodes of a job that are gone, silent, or without their msrun."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import NodeJobs, check_nothing_left, programs_on, static
from support.node_trainings import PATIENT, SCRIPT, check_weights, go, saved, train, weights
from support.warm_python import WarmPython

Nodes = Callable[[int], Cluster]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
ALONE = ("--max-restarts=1", "--node-wait=0")
CUT_S = 30.0  # thrice as long as a node may be silent
SOON_S = 25.0  # on a busy machine; without an answer ranks would get 30 s, and msrun more


def check_resumed(jobs: NodeJobs, killed: int) -> None:
    """Nothing is left; the killed node comes back, and all go on after step 2."""
    check_nothing_left(*jobs.cluster.nodes)
    jobs.cluster.nodes[killed].boot()
    go(jobs)
    again = train(jobs, "--resume", "/", nproc=1)
    again.succeed()
    again.head.await_error("resuming step 2")


def test_the_other_node_is_killed_and_none_is_awaited(jobs: NodeJobs) -> None:
    job = train(jobs, *ALONE, "/", "--wait=3:1", nproc=1)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    jobs.cluster.nodes[1].kill()
    ended = job.head.wait()
    assert ended.code == 1, job.told()
    (found,) = saved(jobs)
    assert found.step == 2
    assert "msrun: node 1 (node1) is gone: " in ended.err
    assert "msrun: saved: step 2, " in ended.err
    assert ended.err.splitlines()[-1] == "msrun: to resume: msrun --resume"
    # what rank 1 alone had was on its way before the words by which the job counted as protected
    assert (found.without_private, found.stale_private) == ((), ())
    check_resumed(jobs, 1)


def test_the_first_node_is_killed(jobs: NodeJobs) -> None:
    job = train(jobs, *ALONE, "/", "--wait=3:1", nproc=1)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    began = time.monotonic()
    jobs.cluster.nodes[0].kill()
    ended = job.parts[1].wait()
    assert time.monotonic() - began < SOON_S
    assert ended.code == 1, job.told()
    assert re.search("the controller's node (closed the line|is lost)", ended.err)
    assert "the ranks of this node save their step by themselves, and end" in ended.err
    (found,) = saved(jobs)
    # node 1 had copies of what rank 0 alone held
    assert (found.step, found.without_private, found.stale_private) == (2, (), ())
    assert "node 0 is gone; saved: " in job.logs()["worker_1.log"]
    check_resumed(jobs, 0)


def test_the_first_node_is_silent(jobs: NodeJobs) -> None:
    job = train(jobs, "--max-restarts=1", "/", "--wait=3:1", nproc=1)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    jobs.cluster.nodes[0].poweroff()
    ended = job.parts[1].wait()
    assert ended.code == 1, job.told()
    (found,) = saved(jobs)
    assert (found.step, found.without_private) == (2, ()), job.told()
    check_nothing_left(*jobs.cluster.nodes)


@pytest.mark.parametrize("limit_s", [10, 6])
def test_a_silent_node_is_noticed(jobs: NodeJobs, limit_s: int) -> None:
    given = [] if limit_s == 10 else [f"--node-timeout={limit_s}"]
    job = train(jobs, *ALONE, *given, "/", "--wait=3:1", nproc=1)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    began = time.monotonic()
    jobs.cluster.nodes[1].poweroff()
    ended = job.head.wait()
    assert limit_s - 2 < time.monotonic() - began < limit_s + SOON_S
    assert ended.code == 1, job.told()
    half, whole = limit_s // 2, f"after {limit_s} s it counts as lost"
    assert f"msrun: node 1 (node1) has not answered for {half} s: {whole}" in ended.err
    assert "msrun: node 1 (node1) is silent: " in ended.err
    assert [each.step for each in saved(jobs)] == [2]
    check_nothing_left(*jobs.cluster.nodes)


def test_a_node_that_comes_back_once_its_place_is_taken_waits_as_a_spare(
    nodes: Nodes, tmp_path: Path, warm_python: WarmPython
) -> None:
    """It has saved its step by itself; the others go on, and it ends as they do."""
    expected = weights(warm_python.train(tmp_path / "undisturbed", 3, SCRIPT))
    jobs = NodeJobs(cluster := nodes(4))
    words = (PATIENT, "--wait=4:1", "--periodic=checkpoints", "--dumps=checkpoints")
    job = train(jobs, "/", *words, nodes=(0, 1, 2), nproc=1)
    anywhere = [option for option in static(0, 3, 1) if not option.startswith("--node-rank")]
    spare = jobs.start_one(cluster.nodes[3], "--spare-node", *anywhere, SCRIPT, *words)
    spare.await_error("this node waits as a spare")
    job.await_lines("waits in step 4")
    job.head.await_error("protected")
    cut_off = job.rank_pid(2)
    began_s = time.monotonic()
    cluster.nodes[2].cut()
    job.head.await_error("node 2 (node3) has come in the place of the lost one")
    job.parts[2].await_error("the controller's node is lost")
    poll(lambda: not Path(f"/proc/{cut_off}").exists())
    signal.sigtimedwait([], max(began_s + CUT_S - time.monotonic(), 0))
    cluster.nodes[2].mend()
    job.parts[2].await_error("this node waits as a spare")
    go(jobs)
    ended = [part.wait() for part in (*job.parts, spare)]
    assert [each.code for each in ended] == [0] * 4, job.told()
    assert ended[2].err.splitlines()[-1].startswith("msrun: the job is over: ")
    assert "takes the part of node 0" not in ended[2].err
    assert "no step is lost" in ended[0].err
    world = [path for part in (*job.parts[:2], spare) for path in part.folder.glob("worker_*.log")]
    check_weights(weights(path.read_text() for path in world), expected, job.told())
    steps = [each.step for each in saved(jobs)]
    assert steps == [2, 3, 4, 6, 8, 10, 12]  # the third was saved by the node that was cut off
    check_nothing_left(*cluster.nodes)


@pytest.mark.parametrize("dead", [(1,), (2,), (2, 3)], ids=["next", "other", "all of two"])
def test_ranks_die_and_the_first_node_before_they_are_replaced(
    nodes: Callable[[int], Cluster], dead: tuple[int, ...]
) -> None:
    """Their msrun lives, and alone has what they had; the next one has that of node 0's rank."""
    sizes = (1, len(dead), 1) if dead == (1,) else (1, 1, len(dead))
    last = 2 if dead == (1,) else 1  # of the ranks that live on
    jobs = NodeJobs(nodes(3))
    job = train(jobs, *ALONE, "/", f"--wait=3:{last}", nodes=range(3), nproc=sizes)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    survivor = job.rank_pid(last)
    os.kill(survivor, signal.SIGSTOP)  # it is waited for, so nobody is replaced yet
    job.kill_rank(*dead)
    job.head.await_seen("WorkerExited", len(dead))
    jobs.cluster.nodes[0].kill()
    os.kill(survivor, signal.SIGCONT)
    assert [part.wait().code for part in job.parts[1:]] == [1, 1], job.told()
    (found,) = saved(jobs)
    lost = (found.step, found.without_private, found.stale_private)
    assert lost == (2, (), ()), job.told()
    assert not [*jobs.folder.glob("checkpoints/*alone*")]
    check_nothing_left(*jobs.cluster.nodes)


def test_the_first_node_is_lost_while_another_one_is_awaited(
    nodes: Callable[[int], Cluster],
) -> None:
    """What ranks of the other lost node alone had is in the memory of this one by then."""
    jobs = NodeJobs(nodes(3))
    job = train(jobs, "/", "--wait=3:1", nodes=range(3), nproc=1)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    jobs.cluster.nodes[2].kill()
    job.head.await_error("waiting 10 min 0 s at most")
    go(jobs)  # a rank that waits for this cannot leave its training function
    job.head.await_seen("Rejoining", 2)
    jobs.cluster.nodes[0].kill()
    job.parts[1].await_error("the ranks of this node save their step by themselves")
    poll((jobs.folder / "checkpoints/tft_saved_checkpoints-step_2").exists)
    poll(lambda: not [*jobs.folder.glob("checkpoints/*_tmp")])
    (found,) = saved(jobs)
    lost = (found.step, found.without_private, found.stale_private)
    assert lost == (2, (), ()), job.told()
    job.parts[1].signal(signal.SIGTERM)
    job.parts[1].wait()
    check_nothing_left(*jobs.cluster.nodes)


@pytest.mark.parametrize("at", [0, 1])
def test_only_msrun_of_a_node_is_killed(jobs: NodeJobs, at: int) -> None:
    job = train(jobs, *ALONE, "/", "--wait=3:1")
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    began = time.monotonic()
    job.parts[at].signal(signal.SIGKILL)
    other = job.parts[1 - at].wait()
    assert other.code == 1, job.told()
    poll(lambda: not any(map(programs_on, jobs.cluster.nodes)), within_s=60)
    assert time.monotonic() - began < SOON_S
    check_nothing_left(*jobs.cluster.nodes)
    (found,) = saved(jobs)
    assert found.step == 2
    if at == 0:  # all ranks have lived, and agreed
        assert (found.without_private, found.stale_private, found.odd) == ((), (), ())
