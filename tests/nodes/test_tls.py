"""Nodes that know each other by certificates: a training whose rank dies, and a node without."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.certificates import PASSWORDS, authority
from support.cluster import Cluster
from support.jobs import WORKERS
from support.node_jobs import PORT, NodeJobs, check_nothing_left, static
from support.node_trainings import SCRIPT, go, train, weights

Nodes = Callable[[int], Cluster]


@pytest.mark.warm
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("lost", [(2, 3), (0, 1)], ids=["there", "back"])
def test_ranks_are_replaced_over_encrypted_lines(
    nodes: Nodes,
    undisturbed: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    lost: tuple[int, int],
) -> None:
    """All of one node: the state travels."""
    jobs = NodeJobs(cluster := nodes(3))
    (folder := tmp_path_factory.mktemp("certificates")).chmod(0o755)
    made = authority(folder)
    made.issue("node2", is_pem=True)
    made.revoke("node2")
    option = f"--tls-config={made.config(crl_path='crl.pem')}"
    job = train(jobs, option, "/", "--wait=5:3", environ=PASSWORDS)
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    without = jobs.start_one(cluster.nodes[2], *static(1, 2, 2), SCRIPT, nproc=2)
    assert without.wait().code == 2
    assert "know each other by certificates: give --tls-config here, too" in without.errors
    job.kill_rank(*lost)
    job.head.await_error("keep running")
    go(jobs)
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert "training resumes at step 5, no step is lost" in job.head.errors
    assert "the list" in job.head.errors and "expires in 29 days" in job.head.errors
    assert "the nodes have no token" not in job.head.errors
    check_nothing_left(*cluster.nodes)


@pytest.mark.torch
def test_a_script_that_names_the_port_of_the_meeting_is_told_what_to_say(
    nodes: Nodes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Who has no certificate would reach torch's store there."""
    jobs = NodeJobs(cluster := nodes(2))
    (folder := tmp_path_factory.mktemp("certificates")).chmod(0o755)
    option = f"--tls-config={authority(folder).config()}"
    job = jobs.start(
        option, WORKERS / "hard_coded_store.py", f"tcp://node0:{PORT}", environ=PASSWORDS
    )
    job.head.await_error(
        f"asks for torch's store at port {PORT}, where nobody reaches it with --tls"
    )
    assert 'let the script say init_method="env://"' in job.head.errors
    job.head.signal(signal.SIGTERM)
    job.wait()
    assert "sum" not in "".join(job.logs().values())
    check_nothing_left(*cluster.nodes)
