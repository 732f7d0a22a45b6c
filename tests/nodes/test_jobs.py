"""A job on several nodes: who meets, which ranks they get, what they see, and how all of it ends."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Sequence

import pytest
from support.cluster import Cluster
from support.jobs import DEADLINE_S, WORKERS, Ended, poll, refused
from support.node_jobs import PORT, NodeJobs, NodesJob, check_nothing_left, job_of, static
from support.node_places import OPEN, PLACE, check_places, places, quiet

Nodes = Callable[[int], Cluster]
TURNS = 4  # of a comparison: others use the machine, too


# --- who they are ---------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_all_ranks_of_three_nodes_meet(nodes: Nodes, order: tuple[int, ...]) -> None:
    jobs = NodeJobs(cluster := nodes(3))
    job = jobs.start(WORKERS / "place_and_sum.py", nodes=(0, 1, 2), nproc=2, order=order)
    job.succeed()
    check_places(job, [2, 2, 2], ["node0", "node1", "node2"])
    assert all("sum 15 of 6" in log for log in job.logs().values())
    assert {place["MASTER_ADDR"] for place in places(job)} == {"node0"}
    assert {place["GLOO_SOCKET_IFNAME"] for place in places(job)} == {"eth0"}
    check_nothing_left(*cluster.nodes)


@pytest.mark.torch
def test_three_nodes_begin_in_little_more_time_than_one(nodes: Nodes) -> None:
    """Six ranks either way; all of them on this machine's processors."""
    jobs = NodeJobs(nodes(4))
    script, took_s = WORKERS / "place_and_sum.py", {1: float("inf"), 3: float("inf")}
    for _ in range(TURNS):
        for count in (1, 3):
            began = time.monotonic()
            first = 3 if count == 1 else 0  # a node for each kind of job
            job = jobs.start(script, nodes=range(first, first + count), nproc=6 // count)
            job.await_lines("sum 15 of 6", 6)
            took_s[count] = min(took_s[count], time.monotonic() - began)
            job.succeed()
        if took_s[3] < 1.5 * took_s[1]:
            return
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("what starts three msruns waits for processors that others have")
    raise AssertionError(took_s)


def test_the_controller_may_be_the_last_that_starts(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(3))
    others = [jobs.start_one(cluster.nodes[rank], *static(rank, 3, 1), PLACE) for rank in (2, 1)]
    for other in others:
        other.await_error("waiting to begin: node0:29511 does not answer (Connection refused)")
    head = jobs.start_one(cluster.nodes[0], *static(0, 3, 1), PLACE)
    job = job_of(head, others[1], others[0])
    quiet(job.succeed())
    check_places(job, [1, 1, 1], ["node0", "node1", "node2"])


def test_nodes_may_have_different_numbers_of_ranks(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    job = jobs.start(PLACE, nodes=(0, 1, 2), nproc=(1, 2, 3))
    quiet(job.succeed())
    check_places(job, [1, 2, 3], ["node0", "node1", "node2"])


def test_without_node_ranks_the_owner_of_the_address_is_the_first(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))

    def how(_rank: int) -> list[str]:
        return ["--nnodes=3", "--master-addr=node1", f"--master-port={PORT}"]

    # by rank: the owner, then by address
    job = jobs.start(PLACE, nodes=(1, 0, 2), how=how, order=(2, 1, 0))
    quiet(job.succeed())
    check_places(job, [1, 1, 1], ["node1", "node0", "node2"])


def test_the_form_of_c10d(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    words = ["--nnodes=3", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=J"]
    words += ["--rdzv-endpoint=node0:29400"]
    job = jobs.start(PLACE, nodes=(0, 1, 2), nproc=2, how=lambda _: words, order=(1, 2, 0))
    quiet(job.succeed())
    check_places(job, [2, 2, 2], ["node0", "node1", "node2"])
    assert {place["TORCHELASTIC_RUN_ID"] for place in places(job)} == {"J"}


def test_c10d_has_a_port_of_its_own(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))
    words = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=J", "--rdzv-endpoint=node0"]
    job = jobs.start(PLACE, how=lambda _: words)
    assert f"{OPEN}29400 " in job.succeed()[0].err
    check_places(job, [1, 1], ["node0", "node1"])


@pytest.mark.parametrize("has_rank", [True, False])
def test_the_form_of_mindspore(nodes: Nodes, has_rank: bool) -> None:
    jobs = NodeJobs(nodes(2))

    def how(rank: int) -> list[str]:
        own = [f"--node_rank={rank if has_rank else -1}"]
        meet = ["--master_addr=10.77.0.1", f"--master_port={PORT}"]
        return ["--worker_num=4", "--local_worker_num=2", *meet, *own]

    job = jobs.start(PLACE, nproc=2, how=how, order=(1, 0))
    quiet(job.succeed())
    check_places(job, [2, 2], ["node0", "node1"])
    assert {place["MASTER_ADDR"] for place in places(job)} == {"10.77.0.1"}


def test_workers_need_not_be_divisible(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))

    def how(rank: int) -> list[str]:
        meet = ["--master_addr=node0", f"--master_port={PORT}", f"--node_rank={rank}"]
        return ["--worker_num=3", f"--local_worker_num={(2, 1)[rank]}", *meet]

    job = jobs.start(PLACE, nproc=(2, 1), how=how)
    quiet(job.succeed())
    check_places(job, [2, 1], ["node0", "node1"])


C10D = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"node0:{PORT}", "PET_RDZV_ID": "J"}
PLACES = {"PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": str(PORT)}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
VARIABLES = {  # what a node is told, and the variable that has its number
    "static": ({"PET_NNODES": "2", **PLACES}, "PET_NODE_RANK"),
    "c10d": ({"PET_NNODES": "2", **C10D}, "PET_NODE_RANK"),
    "c10d without numbers": ({"PET_NNODES": "2", **C10D}, ""),
    "indexed Job": ({"PET_NNODES": "2", **PLACES}, "JOB_COMPLETION_INDEX"),
    "PyTorchJob": (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": str(PORT), **POD},
        "RANK",
    ),
}


@pytest.mark.parametrize("case", VARIABLES)
def test_variables_of_torchrun_and_kubernetes(nodes: Nodes, case: str) -> None:
    cluster = nodes(2)
    jobs = NodeJobs(cluster)
    told, number = VARIABLES[case]
    told = {"PET_NPROC_PER_NODE": "2", **told}
    parts = [
        jobs.start_one(node, PLACE, nproc=2, **told, **({number: str(rank)} if number else {}))
        for rank, node in enumerate(cluster.nodes)
    ]
    job = job_of(*parts)
    job.succeed()
    check_places(job, [2, 2], ["node0", "node1"])


# --- who is refused -------------------------------------------------------------------------------


def goes_on(job: NodesJob) -> None:
    """What was refused meanwhile disturbed nobody."""
    (job.head.node.shared / "go").touch()
    job.succeed()
    check_places(job, [1] * len(job.parts), [part.node.name for part in job.parts])


def no(ended: Ended) -> str:
    """Exit code 2, and one sentence; the sentence."""
    lines = [line for line in ended.err.splitlines() if not line.startswith("msrun: waiting ")]
    return refused(Ended(ended.code, ended.out, "\n".join(lines)))


WRONG = {
    "run id": ("--rdzv-id=K", {}, "belongs to the job 'K', but 'J' waits here"),
    "token": (
        "--rdzv-id=J",
        {"MSRUN_TOKEN": "other"},
        "the token of node3 (10.77.0.4) is not that",
    ),
    "no token": ("--rdzv-id=J", {"MSRUN_TOKEN": ""}, "this job needs a token: give MSRUN_TOKEN"),
    "no run id": ("--rdzv-id=none", {}, "names no job, but 'J' waits here"),
    "size": ("--nnodes=4", {}, "node3 (10.77.0.4) was started for 4 nodes, node 0 for 3: give all"),
    "resume": ("--resume=/", {}, "is to resume, but node 0 begins anew: give it --resume, too"),
    "rank": ("--node-rank=2", {}, "node3 (10.77.0.4) and node2 (10.77.0.3) both have node rank 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_node_is_refused_and_the_job_waits_on(nodes: Nodes, case: str) -> None:
    jobs = NodeJobs(cluster := nodes(4))
    option, environ, why = WRONG[case]
    token = {"MSRUN_TOKEN": "secret"}
    words = ["--rdzv-id=J", PLACE]
    parts = [
        jobs.start_one(cluster.nodes[rank], *static(rank, 3, 1), *words, **token) for rank in (0, 2)
    ]
    parts[0].await_error("2 of 3 nodes are here (node0, node2); node rank 1 is missing")
    wrong = jobs.start_one(
        cluster.nodes[3], *static(1, 3, 1), "--rdzv-id=J", option, PLACE, **{**token, **environ}
    )
    sentence = no(wrong.wait())
    assert why in sentence, sentence
    assert not any(part.is_over for part in parts)
    assert parts[0].errors.count("msrun: a node was refused: ") == 1
    last = jobs.start_one(cluster.nodes[1], *static(1, 3, 1), *words, **token)
    job = job_of(parts[0], last, parts[1])
    job.succeed()
    check_places(job, [1, 1, 1], ["node0", "node1", "node2"])


def test_a_node_that_comes_late_is_refused(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(3))
    job = jobs.start(PLACE, "wait=go")
    job.await_everywhere("place")
    late = jobs.start_one(cluster.nodes[2], *static(1, 2, 1), PLACE)
    assert no(late.wait()) == (
        "the job runs, and no lost node has left a place for this one: let it wait for one with"
        " --spare-node and without --node-rank, or give another --master-port"
    )
    goes_on(job)


@pytest.mark.parametrize("form", ["static", "c10d"])
def test_a_second_job_at_the_place_of_one_that_runs_is_refused(nodes: Nodes, form: str) -> None:
    """torchrun's would share a store."""
    jobs = NodeJobs(cluster := nodes(2))

    def start(run_id: str) -> NodesJob:
        meet = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{PORT}"]
        return jobs.start(
            f"--rdzv-id={run_id}",
            *(PLACE, "wait=go"),
            how=(lambda _: meet) if form == "c10d" else None,
        )

    job = start("J")
    job.await_everywhere("place")
    first, second = map(no, start("K").wait())
    theirs = "belongs to the job 'K', but 'J' runs here: give another --master-port, or the same"
    taken = f"port {PORT} on node0 is already in use: choose another --master-port"
    assert (theirs if form == "c10d" else taken) in first
    assert f"node1 (10.77.0.2) {theirs}" in second
    goes_on(job)
    check_nothing_left(*cluster.nodes)


def test_a_job_begins_with_fewer_nodes_and_has_a_spare_later(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(3))
    words = ("--nnodes=2:3", "--master-addr=node0", f"--master-port={PORT}")
    words += ("--rdzv-conf=last_call_timeout=1", PLACE, "wait=go")
    job = job_of(*(jobs.start_one(node, *words) for node in cluster.nodes[:2]))
    check_places(job, [1, 1], ["node0", "node1"])
    late = jobs.start_one(cluster.nodes[2], *words)
    late.await_error("this node waits as a spare")
    goes_on(job)
    assert late.wait().code == 0
    check_nothing_left(*cluster.nodes)


def test_a_node_beyond_the_most_waits_as_a_spare(nodes: Nodes) -> None:
    """As torchrun has it; it may come as the others do, or later."""
    jobs = NodeJobs(cluster := nodes(4))
    words = ("--nnodes=1:2", "--master-addr=node0", f"--master-port={PORT}", PLACE, "wait=go")
    others = [jobs.start_one(node, *words) for node in cluster.nodes[1:3]]
    for other in others:
        other.await_error("waiting to begin: node0:29511 does not answer (Connection refused)")
    head = jobs.start_one(cluster.nodes[0], *words)
    poll(lambda: sum("this node waits as a spare" in other.errors for other in others))
    others.sort(key=lambda other: "waits as a spare" in other.errors)
    late = jobs.start_one(cluster.nodes[3], *words)
    late.await_error("this node waits as a spare")
    job = job_of(head, others[0])
    goes_on(job)
    assert [others[1].wait().code, late.wait().code] == [0, 0]
    check_nothing_left(*cluster.nodes)


def test_one_node_of_several_begins_alone_and_another_one_waits(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(2))
    words = ("--nnodes=1:2", "--master-addr=node0", f"--master-port={PORT}")
    words += ("--rdzv-conf=last_call_timeout=1", PLACE, "wait=go")
    job = job_of(jobs.start_one(cluster.nodes[0], *words))
    check_places(job, [1], ["node0"])
    late = jobs.start_one(cluster.nodes[1], *words)
    job.head.await_error("another node has come (node1): it is taken in once the state can be")
    late.await_error("this node waits as a spare")
    goes_on(job)
    ended = late.wait()
    assert (ended.code, "the job is over" in ended.err) == (0, True), ended


def test_strangers_disturb_no_job(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(3))
    head = jobs.start_one(cluster.nodes[0], *static(0, 2, 1), PLACE, "wait=go")
    head.await_error("1 of 2 nodes is here")
    knock = "import socket; s = socket.create_connection(('node0', 29511)); s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); s.recv(99)"
    from support.jobs import PYTHON

    stranger = cluster.nodes[2].run([*PYTHON, "-c", knock])
    stranger.wait()
    other = jobs.start_one(cluster.nodes[1], *static(1, 2, 1), PLACE, "wait=go")
    job = job_of(head, other)
    job.await_everywhere("place")
    cluster.nodes[2].run([*PYTHON, "-c", knock]).wait()
    goes_on(job)
    quiet(job.wait())


def test_who_is_missing_is_named(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(2))
    began = time.monotonic()
    parts = [
        jobs.start_one(cluster.nodes[at], *static(rank, 3, 1), "--cluster-time-out=5", PLACE)
        for at, rank in enumerate((0, 2))
    ]
    ended = [part.wait() for part in parts]
    assert time.monotonic() - began >= 5
    assert [each.code for each in ended] == [1, 1], ended
    missing = "2 of 3 nodes are here (node0, node1); node rank 1 is missing"
    assert f"msrun: waiting for nodes: {missing}" in ended[0].err
    assert ended[0].err.splitlines()[-1].startswith("msrun: error: not all nodes came within 5")
    assert ended[0].err.splitlines()[-1].endswith(missing)
    assert ended[1].err.splitlines()[-1] == ended[0].err.splitlines()[-1]
    check_nothing_left(*cluster.nodes)


def test_a_lone_node_says_where_it_knocks(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(2))
    one = jobs.start_one(cluster.nodes[1], *static(1, 2, 1), "--cluster-time-out=5", PLACE)
    ended = one.wait()
    assert ended.code == 1
    assert re.fullmatch(
        "msrun: error: the job did not begin within 5.* s: node0:29511 does not answer "
        r"\(Connection refused\)",
        ended.err.splitlines()[-1],
    )


def test_the_address_of_another_machine(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(2))
    wrong = jobs.start_one(cluster.nodes[1], *static(0, 2, 1), PLACE)
    sentence = refused(wrong.wait())
    assert "node0 is not an address of this machine" in sentence
    assert "with one node" not in sentence


# --- how it ends ----------------------------------------------------------------------------------


def codes(job: NodesJob, within_s: float = 15.0) -> list[int]:
    """The exit codes of all nodes; the last ends soon after the first."""
    ends: list[float] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(ends) < len(job.parts):
        over = sum(part.is_over for part in job.parts)
        ends += [time.monotonic()] * (over - len(ends))
        assert time.monotonic() < deadline, job.told()
        time.sleep(0.005)
    assert ends[-1] - ends[0] < within_s, job.told()
    return [part.wait().code for part in job.parts]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_report_is_printed_once(nodes: Nodes, rank: int) -> None:
    jobs = NodeJobs(cluster := nodes(2))
    job = jobs.start(PLACE, f"raise={rank}", "wait=go")
    assert codes(job) == [1, 1], job.told()
    first, second = (part.errors for part in job.parts)
    assert "RuntimeError: the mistake of rank" in first
    assert "Root Cause" in first
    assert f"host      : node{rank}" in first
    assert re.search(rf"rank\s+: {rank} \(local_rank: 0\)", first)
    assert "exitcode  : 1" in first
    assert "Root Cause" not in second
    pointing = [line for line in second.splitlines() if "see the report of node 0" in line]
    assert len(pointing) == 1
    assert (job.head.folder / "failure.json").exists()
    check_files(job)
    check_nothing_left(*cluster.nodes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_exits_with_a_code_of_its_own(nodes: Nodes, rank: int) -> None:
    job = NodeJobs(nodes(2)).start(PLACE, f"exit={rank}:3", "wait=go")
    assert codes(job) == [1, 1], job.told()
    assert f"rank {rank}" in job.head.errors
    assert "exitcode  : 3" in job.head.errors


def test_a_failure_restarts_the_ranks_of_all_nodes(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))
    job = jobs.start("--max-restarts=1", PLACE, "wait=go", nproc=2)
    job.await_everywhere("place")
    before = places(job)
    job.kill_rank(3)
    job.head.await_seen("StartAttempt", 2)
    job.await_everywhere('"TORCHELASTIC_RESTART_COUNT": "1"')
    after = places(job)
    (jobs.folder / "go").touch()
    job.succeed()
    assert [each | {"TORCHELASTIC_RESTART_COUNT": "0"} for each in after] == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_whose_ranks_finish_early_waits_for_the_others(nodes: Nodes, rank: int) -> None:
    """torchrun's agents give up after five minutes; these have no such limit."""
    jobs = NodeJobs(cluster := nodes(2))
    job = jobs.start(PLACE, f"exit={rank}:0", "wait=go")
    job.await_everywhere("place")
    poll(lambda: job.head.status()["workers"][rank]["state"] != "running")
    assert not any(part.is_over for part in job.parts)
    (jobs.folder / "go").touch()
    job.succeed()
    check_nothing_left(*cluster.nodes)


def test_each_node_may_go_on_without_a_terminal(nodes: Nodes) -> None:
    jobs = NodeJobs(cluster := nodes(2))
    job = jobs.start("--join=False", PLACE, "wait=go")
    for part in job.parts:
        ended = part.wait()
        assert ended.code == 0, ended
        assert "started, pid " in ended.out
        assert str(part.folder) in ended.out
    poll(lambda: all("place" in log for log in job.logs().values()) and len(job.logs()) == 2)
    assert job.head.status()["state"] == "running"
    (jobs.folder / "go").touch()
    poll(lambda: [part.status()["state"] for part in job.parts] == ["succeeded"] * 2)
    check_places(job, [1, 1], ["node0", "node1"])
    check_nothing_left(*cluster.nodes)


# --- what all see ---------------------------------------------------------------------------------


OF_THE_JOB = ("events.jsonl", "scheduler.log", "status.json")


def check_files(job: NodesJob) -> None:
    """Decisions, and the status for people, are on node 0; each other node has a log of its own."""
    assert all((job.head.folder / name).exists() for name in OF_THE_JOB)
    for part in job.parts[1:]:
        assert (part.folder / f"node_{part.rank}.log").stat().st_size
        if part.folder != job.head.folder:
            assert not any((part.folder / name).exists() for name in OF_THE_JOB)


def test_a_shared_log_folder_has_the_logs_of_all(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))
    shared = jobs.folder / "logs"
    job = jobs.start(PLACE, "err=first", nproc=2, log_dir=shared)
    job.succeed()
    check_places(job, [2, 2], ["node0", "node1"])
    for name, log in job.logs().items():
        assert f"first of rank {name[7:-4]}\n" in log
    check_files(job)
    second = jobs.start(PLACE, "err=second", nproc=2, log_dir=shared)
    second.succeed()
    check_places(second, [2, 2], ["node0", "node1"])
    assert not any("first" in log for log in second.logs().values())
    earlier = {path.name: path.read_text() for path in shared.glob("earlier/**/worker_*.log")}
    assert sorted(earlier) == [f"worker_{rank}.log" for rank in range(4)]
    assert all("first of rank" in log for log in earlier.values())


@pytest.mark.parametrize("at", [0, 1])
def test_who_asks_on_any_node_is_told_of_all(nodes: Nodes, at: int) -> None:
    jobs = NodeJobs(nodes(2))
    job = jobs.start(PLACE, "err=here", "wait=go", nproc=2)
    job.await_everywhere("here of rank")
    part = job.parts[at]
    part.await_state("running")
    status = part.command("status")
    assert status.code == 0, status
    for rank in range(4):
        assert re.search(rf"^\s*{rank}\b", status.out, re.MULTILINE), status.out
    logs = part.command("logs")
    assert logs.code == 0, logs
    for rank in (2 * at, 2 * at + 1):
        assert f"here of rank {rank}" in logs.out
    top = part.command("top", "--once")
    assert top.code == 0, top
    for rank in range(4):  # the pids of other nodes mean other processes here
        memory = r"\d+M" if rank // 2 == at else "-"
        assert re.search(rf"^ +{rank} .* {memory} +\S+ *$", top.out, re.MULTILINE), top.out
    there = 2 - 2 * at
    assert f"ranks {there}-{there + 1} are on other nodes" in logs.err
    elsewhere = part.command("logs", "--rank", there)
    assert elsewhere.code == 0, elsewhere
    assert elsewhere.out == job.logs()[f"worker_{there}.log"]
    stopped = part.command("stop")
    assert stopped.code == 0, stopped
    ended = job.wait()
    assert len({each.code for each in ended}) == 1, job.told()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [(0,), (1,), (0, 1)], ids=str)
def test_a_signal_to_any_node_stops_all(nodes: Nodes, at: Sequence[int], signum: int) -> None:
    """A batch system sends it to all of them: that is one request."""
    jobs = NodeJobs(cluster := nodes(2))
    job = jobs.start(PLACE, "wait=go")
    job.await_everywhere("place")
    for node in at:
        job.parts[node].signal(signum)
    assert codes(job) == [128 + signum] * 2, job.told()
    first, second = (part.errors.splitlines()[-1] for part in job.parts)
    why = f"stopped by {signal.Signals(signum).name}"
    assert first == f"msrun: {why}"
    assert second == f"msrun: the job was stopped, see the report of node 0 (node0): {why}"
    check_nothing_left(*cluster.nodes)
