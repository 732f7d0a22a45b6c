"""A job on several nodes as torchrun's and MindSpore's words ask for it."""

from pathlib import Path

import pytest

from agent.spec.job_spec import ClusterSpec, CopyMode, UsageError
from msrun.job.request import parse


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(line, environ=None):
    return parse([*line.split(), "t.py"], environ or {}).job


TORCHRUN = [
    (
        "--nnodes 2 --node-rank 1 --master-addr a --master-port 7",
        ClusterSpec(2, None, 1), "a", 7, 1,
    ),
    ("--nnodes 3 --node-rank 0 --master-addr a", ClusterSpec(3, None, 0), "a", 29500, 1),
    ("--nnodes 2:2 --node-rank 1 --nproc-per-node 4", ClusterSpec(2, None, 1), "127.0.0.1", 29500, 4),
    ("--nnodes 2 --node-rank -1 --master-addr a", ClusterSpec(2), "a", 29500, 1),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h --rdzv-id j", ClusterSpec(2), "h", 29400, 1),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:7", ClusterSpec(2), "h", 7, 1),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:7 --node-rank 1", ClusterSpec(2, None, 1), "h", 7, 1),
    ("--nnodes 2 --rdzv-backend static --rdzv-endpoint h:7", ClusterSpec(2), "h", 7, 1),
    ("--nnodes 2:4 --rdzv-endpoint h:7", ClusterSpec(4, least=2), "h", 7, 1),
    ("--nnodes 1:2 --node-rank 1 --master-addr a", ClusterSpec(2, None, 1, least=1), "a", 29500, 1),
    (
        "--nnodes 2:4 --rdzv-endpoint h:7 --rdzv-conf last_call_timeout=5,timeout=9",
        ClusterSpec(4, least=2, last_call_s=5.0), "h", 7, 1,
    ),
]  # fmt: skip
MINDSPORE = [
    (
        "--worker_num 8 --local_worker_num 4 --master_addr a --master_port 8118 --node_rank 1",
        ClusterSpec(2, 8, 1), "a", 8118, 4,
    ),
    ("--worker_num 8 --local_worker_num 4 --master_addr a", ClusterSpec(2, 8), "a", 29500, 4),
    ("--worker_num 8 --local_worker_num 4 --node_rank -1", ClusterSpec(2, 8), "127.0.0.1", 29500, 4),
    # nodes may have different numbers of workers: complete is what has 8 in all
    ("--worker_num 8 --local_worker_num 3 --node_rank 2", ClusterSpec(3, 8, 2), "127.0.0.1", 29500, 3),
    ("--worker_num 8 --local_worker_num 7 --node_rank 3", ClusterSpec(2, 8, 3), "127.0.0.1", 29500, 7),
    # with a number of nodes they are equal, as torchrun's are
    ("--worker_num 8 --nnodes 2 --node_rank 1", ClusterSpec(2, None, 1), "127.0.0.1", 29500, 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "cluster", "address", "port", "nproc"),
    [*TORCHRUN, *MINDSPORE],
    ids=[row[0] for row in (*TORCHRUN, *MINDSPORE)],
)
def test_who_takes_part_and_where_they_meet(line, cluster, address, port, nproc):
    job = job_of(line)
    assert job.cluster._replace(said=()) == cluster
    assert (job.master_addr, job.master_port, job.nproc) == (address, port, nproc)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--nnodes 1",
        "--nnodes 1:1 --node-rank 0",
        "--worker_num 8",
        "--worker_num 8 --local_worker_num 8",
        "--rdzv-backend c10d --rdzv-endpoint h:7",
        "--standalone --nproc-per-node 2",
    ],
)
def test_one_node_is_no_cluster(line):
    job = job_of(line)
    assert job.cluster is None
    assert job.nodes == ()
    assert job.replace.is_on
    assert job.dump.copies is not CopyMode.OFF


def test_every_word_may_come_from_the_environment():
    environ = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "7",
    }
    job = job_of("", environ)
    assert job.cluster._replace(said=()) == ClusterSpec(2, None, 1)
    assert (job.master_addr, job.master_port) == ("a", 7)


@pytest.mark.parametrize(
    ("line", "nodes", "node_rank"),
    [
        ("--nnodes 2 --nproc-per-node 3 --node-rank 1", (3, 3), 1),
        ("--nnodes 2 --nproc-per-node 3", (3, 3), 0),
        ("--worker_num 8 --local_worker_num 3", (3, 3, 2), 0),
        ("--worker_num 8 --local_worker_num 3 --node_rank 2", (2, 3, 3), 2),
        ("--worker_num 8 --local_worker_num 7 --node_rank 3", (1, 7), 1),
    ],
)
def test_until_all_are_here_the_other_nodes_are_a_guess_with_the_right_sum(line, nodes, node_rank):
    job = job_of(line)
    assert (job.nodes, job.node_rank) == (nodes, node_rank)
    assert job.nodes[job.node_rank] == job.nproc
    assert sum(job.nodes) == job.world_size


def test_the_last_worker_of_all_nodes_may_be_followed():
    assert job_of("--worker_num 8 --local_worker_num 3 --tail_worker_log 7").logs.tail == {7}
    with pytest.raises(UsageError, match="tail_worker_log"):
        job_of("--worker_num 8 --local_worker_num 3 --tail_worker_log 8")


def test_a_token_file_is_found_wherever_msrun_goes_later(folder):
    job = job_of("--nnodes 2 --token-file job.token")
    assert job.cluster.token_file == folder / "job.token"
    assert job_of("--nnodes 2 --token_file /t").cluster.token_file == Path("/t")


def test_a_step_is_saved_and_ranks_are_replaced_as_on_one_node():
    job = job_of("--nnodes 2")
    assert job.dump.after_failure
    assert job.replace.is_on


@pytest.mark.parametrize(
    ("line", "wait_s"), [("", 600), ("--node-wait 0", 0), ("--node_wait=7", 7)]
)
def test_another_node_is_awaited_in_the_place_of_a_lost_one(line, wait_s):
    job = job_of(f"--nnodes 2 {line}")
    assert job.replace.node_wait_s == wait_s
    assert job.replace.join_s >= wait_s  # for new ranks, which wait for it


@pytest.mark.parametrize(
    ("line", "leaves"),
    [
        ("--nnodes 2:3", False),
        ("--nnodes 2:3 --on-leave stop", False),
        ("--nnodes 2:3 --on-leave shrink", True),
        ("--nnodes 1:2 --on_leave=shrink", True),
        ("--nnodes 2 --on-leave stop", False),
    ],
)
def test_a_node_may_leave_a_job_that_may_have_fewer(line, leaves):
    assert job_of(line).cluster.leaves is leaves


@pytest.mark.parametrize("line", ["--nnodes 2", "", "--worker_num 8 --local_worker_num 4"])
def test_no_node_leaves_a_job_of_a_fixed_size(line):
    why = "--on-leave=shrink is for a job that may go on with fewer nodes: give --nnodes=MIN:MAX"
    with pytest.raises(UsageError, match=why):
        job_of(f"{line} --on-leave=shrink")


@pytest.mark.parametrize(
    "line", ["--master-port 0", "--rdzv-endpoint h:0", "--rdzv-backend c10d --rdzv-endpoint h:0"]
)
def test_several_nodes_must_name_the_port_at_which_they_meet(line):
    with pytest.raises(UsageError, match="0 means a free port, but all nodes must name the same"):
        job_of(f"--nnodes 2 {line}")


@pytest.mark.parametrize(
    ("options", "copies", "every"),
    [
        ("", CopyMode.AUTO, 0),
        ("--protect-memory copy --protect-every 5", CopyMode.COPY, 5),
        ("--protect-memory off", CopyMode.OFF, 0),
    ],
)
def test_state_is_copied_on_several_nodes_as_on_one(options, copies, every):
    job = job_of(f"--nnodes 2 {options}")
    assert (job.dump.copies, job.dump.copy_every) == (copies, every)


def test_a_spare_node_has_no_number():
    job = job_of("--nnodes 2 --master-addr a --spare-node")
    assert job.cluster._replace(said=()) == ClusterSpec(2, is_spare=True)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--spare-node", "--spare-node is for a job on several nodes: say on how many"),
        (
            "--spare-node --nnodes 2 --node-rank 1",
            "--spare-node waits for any place: leave out --node-rank=1",
        ),
        (
            "--spare-node --nnodes 2 --join=False",
            "--join=False: a spare node waits in the foreground",
        ),
    ],
)
def test_a_spare_node_of_nothing_is_refused(line, why):
    with pytest.raises(UsageError) as refused:
        job_of(line)
    assert str(refused.value) == why


@pytest.mark.parametrize(
    ("url", "members"),
    [
        ("etcd://a:2379", (("a", 2379),)),
        ("etcd://a/", (("a", 2379),)),
        ("etcd://a:1,[::1]:2,b", (("a", 1), ("::1", 2), ("b", 2379))),
        ("", ()),
    ],
)
def test_members_of_a_store(url, members):
    assert job_of(f"--nnodes 2 --controller_store={url}").cluster.store == members


def test_one_node_has_no_need_of_a_store():
    request = parse(["--controller_store=etcd://a:2379", "t.py"], {})
    assert request.job.cluster is None
    why = "--controller_store=etcd://a:2379 is ignored, there is only one node."
    assert why in request.warnings
