"""A real etcd says which half of the nodes goes on, and where the job is met."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from support.cluster import Cluster
from support.etcd_server import EtcdServer, etcd_on, mend, part
from support.jobs import poll
from support.node_jobs import NodeJobs, NodeMsrun, NodesJob, check_nothing_left, static
from support.node_trainings import PATIENT, SCRIPT, check_weights, go, weights

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WAITS = (SCRIPT, PATIENT, "--wait=3:1")
WAIT_S = 45  # for another node: who is left alone ends then
STORE = 3  # the node of etcd


@pytest.fixture
def store(etcd_cluster: Cluster) -> EtcdServer:
    return etcd_on(etcd_cluster, STORE)


@pytest.fixture
def jobs(etcd_cluster: Cluster, store: EtcdServer) -> NodeJobs:
    """Jobs on two nodes; the third one is free."""
    options = (f"--controller_store={store.url}", f"--node-wait={WAIT_S}")
    return NodeJobs(etcd_cluster, common=options)


def begun(jobs: NodeJobs, store: EtcdServer) -> NodesJob:
    """All ranks wait in step 3, are protected, and node 0 has the seat."""
    job = jobs.start(*WAITS, nproc=2)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    poll(lambda: seat(store).get("address") == "node0")
    return job


def seat(store: EtcdServer) -> dict:
    found = [text for key, text in store.keys().items() if key.endswith("/seat")]
    return json.loads(found[0]) if found else {}


def again(jobs: NodeJobs, node: int, rank: int) -> NodeMsrun:
    """The very command that was typed on a node of this rank, on another machine."""
    where = jobs.cluster.nodes[node]
    return jobs.start_one(where, *static(rank, 2, 2), *WAITS, nproc=2, log_dir=where.folder / "new")


def check_bitwise(undisturbed: Sequence[str], *parts: NodeMsrun) -> None:
    errors = "\n---\n".join(part.errors for part in parts)
    assert [part.wait().code for part in parts] == [0] * len(parts), errors
    logs = [path.read_text() for part in parts for path in part.folder.glob("worker_*.log")]
    check_weights(weights(logs), undisturbed, errors)


def check_one_world(jobs: NodeJobs) -> None:
    """Whoever has saved a step has saved the same."""
    found: dict[str, set[bytes]] = {}
    for path in (jobs.folder / "checkpoints").glob("*"):
        step = path.name.partition("_replaced_")[0]
        (shared,) = path.glob("*.safetensors")
        found.setdefault(step, set()).add(shared.read_bytes())
    assert found
    assert {step: len(different) for step, different in found.items()} == dict.fromkeys(found, 1)


def test_both_halves_reach_it_and_that_of_node_0_goes_on(
    jobs: NodeJobs, store: EtcdServer, undisturbed: Sequence[str]
) -> None:
    job = begun(jobs, store)
    term = [text for key, text in store.keys().items() if key.endswith("/term")]
    part(jobs.cluster, 0, 1)
    job.head.await_error("waiting 45 s at most for another node 1")
    poll(lambda: [t for key, t in store.keys().items() if key.endswith("/term")] not in ([], term))
    assert seat(store)["address"] == "node0"
    other = again(jobs, 2, 1)
    job.head.await_error("node 1 (node2) has come in the place of the lost one")
    go(jobs)
    check_bitwise(undisturbed, job.head, other)
    lost = job.parts[1].wait()
    assert lost.code == 1
    assert "goes on" in lost.err or "no node has taken the part of node 0" in lost.err, lost.err
    check_one_world(jobs)
    assert store.keys() == {}  # of a job that is done nothing is left
    check_nothing_left(*jobs.cluster.nodes[:STORE])


def test_the_half_goes_on_that_reaches_it(
    jobs: NodeJobs, store: EtcdServer, undisturbed: Sequence[str]
) -> None:
    job = begun(jobs, store)
    jobs.cluster.nodes[0].cut()
    job.parts[1].await_error(
        "this node takes the part of node 0, which is lost; step "
    )  # all start again
    poll(lambda: seat(store).get("address") == jobs.cluster.nodes[1].address)
    first = again(jobs, 2, 0)  # node 0's own line, typed elsewhere
    first.await_error("the store says that node1 ")
    ended = job.head.wait()
    assert ended.code == 1
    assert "exactly half of the nodes are silent, and the store does not answer" in ended.err
    go(jobs)
    check_bitwise(undisturbed, job.parts[1], first)
    check_one_world(jobs)


def test_a_node_that_was_cut_off_has_its_place_again(
    jobs: NodeJobs, store: EtcdServer, undisturbed: Sequence[str]
) -> None:
    job = begun(jobs, store)
    part(jobs.cluster, 0, 1)
    job.head.await_error("waiting 45 s at most for another node 1")
    job.parts[1].await_error("this node takes the part of node 0, which is lost")
    mend(jobs.cluster, 0, 1)
    job.head.await_error("has come in the place of the lost one")
    go(jobs)
    check_bitwise(undisturbed, *job.parts)


def test_node_0_is_off_and_its_line_is_typed_elsewhere(
    jobs: NodeJobs, store: EtcdServer, undisturbed: Sequence[str]
) -> None:
    job = begun(jobs, store)
    jobs.cluster.nodes[0].poweroff()
    job.parts[1].await_error("this node takes the part of node 0, which is lost")
    first = again(jobs, 2, 0)
    go(jobs)
    check_bitwise(undisturbed, job.parts[1], first)
    assert store.keys() == {}


def test_it_is_killed_and_the_job_goes_on_as_without_one(
    jobs: NodeJobs, store: EtcdServer, undisturbed: Sequence[str]
) -> None:
    job = begun(jobs, store)
    store.kill()
    job.head.await_error("the job goes on without it")
    part(jobs.cluster, 0, 1)
    job.head.await_error("waiting 45 s at most for another node 1")
    lost = job.parts[1].wait()
    assert (lost.code, "it may be alive" in lost.err) == (1, True), lost.err
    store.start()
    job.head.await_error("the store counts again")
    other = again(jobs, 2, 1)
    go(jobs)
    check_bitwise(undisturbed, job.head, other)
    assert job.head.errors.count("the job goes on without it") == 1
    check_one_world(jobs)


def test_node_0_is_killed(jobs: NodeJobs, store: EtcdServer, undisturbed: Sequence[str]) -> None:
    job = begun(jobs, store)
    jobs.cluster.nodes[0].kill()
    job.parts[1].await_error("this node takes the part of node 0, which is lost")
    poll(lambda: seat(store).get("address") == jobs.cluster.nodes[1].address)
    first = again(jobs, 2, 0)
    go(jobs)
    check_bitwise(undisturbed, job.parts[1], first)


def test_the_same_line_while_the_job_runs_is_refused(jobs: NodeJobs, store: EtcdServer) -> None:
    job = begun(jobs, store)
    second = again(jobs, 2, 1)
    ended = second.wait()
    assert (ended.code, "the job runs" in ended.err) == (2, True), ended.err
    go(jobs)
    job.succeed()


def test_it_is_not_there_as_the_job_begins(etcd_cluster: Cluster) -> None:
    words = ("--controller_store=etcd://node3:2379", *static(0, 2, 1), SCRIPT)
    ended = NodeJobs(etcd_cluster).start_one(etcd_cluster.nodes[0], *words).wait()
    assert ended.code == 2
    why = "--controller-store: the store at node3:2379 does not answer (Connection refused)"
    assert ended.err == f"msrun: error: {why}\n"
