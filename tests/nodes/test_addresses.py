"""The addresses at which nodes meet: names that are late or mean something else, IPv6, one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support.cluster import Cluster
from support.jobs import PYTHON, WORKERS
from support.node_jobs import PORT, NodeJobs, check_nothing_left, job_of
from support.node_places import PLACE, check_places, places, quiet
from support.node_trainings import PATIENT, SCRIPT, check_weights, go, weights

from msrun.cluster.node import ClusterNode

Nodes = Callable[[int], Cluster]


def knows(node: ClusterNode, hosts: str) -> None:
    """A node has a hosts file of its own from now on; it may be written anew later."""
    path = node.folder / "hosts"
    is_new = not path.exists()
    path.write_text(hosts)
    if is_new:
        assert node.run(["mount", "--bind", path, "/etc/hosts"]).wait() == 0


@pytest.mark.parametrize("is_numbered", [True, False])
def test_the_name_of_node_0_may_be_known_late(nodes: Nodes, is_numbered: bool) -> None:
    """As where Kubernetes has just made the pods; without numbers the name decides who is first."""
    jobs = NodeJobs(cluster := nodes(2))
    for node in cluster.nodes:
        knows(node, "127.0.0.1 localhost\n")

    def how(rank: int) -> list[str]:
        words = ["--rdzv-backend=c10d", "--rdzv-id=J", f"--rdzv-endpoint=first:{PORT}"]
        if is_numbered:
            words = [f"--node-rank={rank}", "--master-addr=first", f"--master-port={PORT}"]
        return ["--nnodes=2", *words]

    job = jobs.start(PLACE, how=how)
    for part in job.parts:
        part.await_error("waiting to begin: first:29511 does not resolve (")
    for node in reversed(cluster.nodes):
        knows(node, "127.0.0.1 localhost\n10.77.0.1 first\n")
    job.succeed()
    check_places(job, [1, 1], ["node0", "node1"])


@pytest.mark.torch
def test_hosts_that_call_themselves_by_a_loopback_address(nodes: Nodes) -> None:
    """As Debian's installer writes it; gloo would listen there, and reach nobody."""
    jobs = NodeJobs(cluster := nodes(2))
    for node in cluster.nodes:
        others = "".join(
            f"10.77.0.{each.index + 1} {each.name}\n" for each in cluster.nodes if each != node
        )
        knows(node, f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n{others}")
        link = ["ip", "link", "add", "name", "other0", "type", "veth", "peer", "name", "other1"]
        for words in (
            link,
            ["ip", "address", "add", f"10.99.{node.index}.1/24", "dev", "other0"],
            ["ip", "link", "set", "other0", "up"],
        ):
            assert node.run(words).wait() == 0, words  # a network that reaches nobody
    job = jobs.start(WORKERS / "place_and_sum.py", nproc=2)
    job.succeed()
    check_places(job, [2, 2], ["node0", "node1"])
    assert all("sum 6 of 4" in log for log in job.logs().values())
    assert {place["GLOO_SOCKET_IFNAME"] for place in places(job)} == {"eth0"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_two_nodes_on_one_machine(nodes: Nodes, host: str) -> None:
    jobs = NodeJobs(cluster := nodes(1))

    def how(rank: int) -> list[str]:
        meet = [f"--master-addr={host}", f"--master-port={PORT}", f"--node-rank={rank}"]
        return ["--nnodes=2", "--nproc-per-node=2", f"--log_dir={jobs.folder / str(rank)}", *meet]

    parts = [
        jobs.start_one(
            cluster.nodes[0], *how(rank), PLACE, nproc=2, log_dir=jobs.folder / f"logs_{rank}"
        )
        for rank in range(2)
    ]
    for rank, part in enumerate(parts):
        part.folder = jobs.folder / str(rank)
    job = job_of(*parts)
    quiet(job.succeed())
    check_places(job, [2, 2], ["node0", "node0"])
    check_nothing_left(*cluster.nodes)


@pytest.mark.torch
def test_a_script_may_name_the_port_at_which_the_nodes_meet(nodes: Nodes) -> None:
    """With torchrun its store is there; here ranks are led to theirs."""
    jobs = NodeJobs(cluster := nodes(2))
    script = WORKERS / "hard_coded_store.py"
    job = jobs.start(script, f"tcp://node0:{PORT}", nproc=2)
    job.succeed()
    assert all("sum 6 of 4" in log for log in job.logs().values())
    check_nothing_left(*cluster.nodes)


STRANGER = """
import contextlib, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as end:
    end.sendall(bytes.fromhex("00cef7853c") + b"\\x0d" + bytes(4))
    with contextlib.suppress(ConnectionResetError):
        assert end.recv(4) == b""
"""
"""Asks for torch's store, which would repeat the last four bytes."""


@pytest.mark.torch
def test_who_is_on_no_node_of_the_job_does_not_reach_its_store_there(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(3))
    script = WORKERS / "hard_coded_store.py"
    job = jobs.start(script, f"tcp://node0:{PORT}", "go")
    job.await_lines("sum 1 of 2")
    away = cluster.nodes[2].run([*PYTHON, "-c", STRANGER, cluster.nodes[0].address, str(PORT)])
    assert away.wait() == 0
    job.head.await_error(f"10.77.0.3 asks for torch's store at port {PORT}, where only nodes of")
    go(jobs)
    job.succeed()
    check_nothing_left(*cluster.nodes)


def has_only_ipv6(node: ClusterNode) -> str:
    """Its address from now on."""
    address = f"fd00:77::{node.index + 1}"
    script = f"""
    echo 0 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6
    ip -6 address add {address}/64 dev eth0 nodad
    ip address delete {node.address}/24 dev eth0
    """
    assert node.run(["sh", "-ec", script]).wait() == 0
    return address


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.warm
def test_nodes_that_have_ipv6_alone(nodes: Nodes, undisturbed: Sequence[str]) -> None:
    """A rank on another node is killed, then node 0, whose place a spare node takes."""
    jobs = NodeJobs(cluster := nodes(3))
    first, second, _ = map(has_only_ipv6, cluster.nodes)
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=[{first}]:{PORT}", "--nnodes=2"]
    meeting += ["--nproc-per-node=2", "--rdzv-id=J"]
    words = (SCRIPT, PATIENT, "--wait=3:2", "--wait=6:1")
    job = jobs.start(*words, nproc=2, how=lambda _: meeting)
    spare = jobs.start_one(cluster.nodes[2], "--spare-node", *meeting, *words, nproc=2)
    spare.await_error("this node waits as a spare")
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    job.kill_rank(2)
    job.head.await_error("rank 2 is back")
    go(jobs)
    job.await_lines("waits in step 6")
    cluster.nodes[0].kill()
    job.parts[1].await_error(f"start msrun there with --master-addr={second} --master-port=")
    go(jobs, step=6)
    for part in (job.parts[1], spare):
        assert part.wait().code == 0, part.errors
    said = job.parts[1].errors
    assert "; replacing ranks 0-1, ranks 2-3 keep running" in said
    assert "no step is lost" in said
    logs = [path.read_text() for part in (job.parts[1], spare) for path in part.folder.glob("w*")]
    check_weights(weights(logs), undisturbed, said)
    check_nothing_left(*cluster.nodes)
