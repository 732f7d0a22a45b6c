"""What the variables of Slurm, Open MPI, Kubernetes and MindSpore become where no option says otherwise."""

from types import SimpleNamespace
from zlib import crc32

import psutil
import pytest

from agent.records.run_record import Record
from agent.spec.job_spec import ClusterSpec, HandSpec, UsageError
from msrun.job.request import parse
from msrun.job.resume import newest_of
from msrun.options.engines import first_host


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(psutil, "net_if_addrs", dict)  # whatever networks this machine is in
    return tmp_path


def request(environ, line=""):
    return parse([*line.split(), "t.py"], environ)


def told(environ, line=""):
    """Who takes part, without sentences and tokens; where they meet; workers here."""
    job = request(environ, line).job
    cluster = job.cluster and job.cluster._replace(
        said=(), token_variable="", own_token="", has_sparse_ranks=False
    )
    return cluster, job.master_addr, job.master_port, job.nproc


def slurm(**changes):
    environ = {
        "SLURM_JOB_ID": "100",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "gpu[08-11]",
        "SLURM_NODEID": "3",
    }
    return {name: text for name, text in (environ | changes).items() if text}


def mpi(rank, local_rank=0, **changes):
    """Of 4 ranks on 2 nodes."""
    uri = "77.0;tcp://10.0.0.1,192.168.0.1:4711"
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_MCA_orte_num_nodes": "2",
        "OMPI_MCA_orte_hnp_uri": uri,
        "OMPI_MCA_orte_local_daemon_uri": uri if rank < 2 else "77.1;tcp://10.0.0.2:4712",
        "OMPI_MCA_orte_precondition_transports": "8ae95d4a05e7b18e-6241d8c450c1faba",
        "PMIX_NAMESPACE": "1562509313",
    }
    return {name: text for name, text in (environ | changes).items() if text}


PORT = 20_000 + (100 * 64 + 2) % 12_000
MPI_PORT = 20_000 + crc32(b"1562509313") % 12_000
FIVE_PORT = 20_000 + crc32(b"prterun-a-4711@1") % 12_000
ONE_A_NODE = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
FIVE = {
    "OMPI_MCA_orte_num_nodes": "",
    "OMPI_MCA_orte_hnp_uri": "",
    "OMPI_MCA_orte_local_daemon_uri": "",
    "PMIX_NAMESPACE": "prterun-a-4711@1",
}
PYTORCH_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}


@pytest.mark.parametrize(
    ("environ", "line", "expected"),
    [
        (slurm(), "", (ClusterSpec(4, None, 3), "gpu08", PORT, 1)),
        (slurm(SLURM_GPUS_ON_NODE="8"), "", (ClusterSpec(4, None, 3), "gpu08", PORT, 8)),
        (
            slurm(SLURM_GPUS_ON_NODE="8"), "--nproc-per-node 2",
            (ClusterSpec(4, None, 3), "gpu08", PORT, 2),
        ),
        (slurm(), "--worker_num 8", (ClusterSpec(4, None, 3), "gpu08", PORT, 2)),
        # uneven nodes, by MindSpore's words
        (
            slurm(), "--worker_num 7 --local_worker_num 2",
            (ClusterSpec(4, 7, 3), "gpu08", PORT, 2),
        ),
        (slurm(), "--nnodes 4", (ClusterSpec(4, None, 3), "gpu08", PORT, 1)),
        (slurm(), "--nnodes 4:4 --master-port 7", (ClusterSpec(4, None, 3), "gpu08", 7, 1)),
        (slurm(), "--nnodes 2:4", (ClusterSpec(4, None, 3, least=2), "gpu08", PORT, 1)),
        (slurm(), "--nnodes 1:8", (ClusterSpec(8, None, 3, least=1), "gpu08", PORT, 1)),
        (slurm(), "--nnodes 5:8", (ClusterSpec(8, least=5), "127.0.0.1", 29500, 1)),
        (
            slurm(), "--rdzv-backend c10d --rdzv-endpoint h:7",
            (ClusterSpec(4, place=3), "h", 7, 1),
        ),
        (slurm(), "--master-addr h --node-rank 1", (ClusterSpec(4, None, 1), "h", 29500, 1)),
        # other numbers of nodes: a job of its own in each task
        (slurm(), "--nnodes 1 --nproc-per-node 2", (None, "127.0.0.1", None, 2)),
        (slurm(), "--standalone", (None, "127.0.0.1", None, 1)),
        (slurm(SLURM_STEP_NUM_TASKS="8"), "--nnodes 1", (None, "127.0.0.1", None, 1)),
        # not started by srun: a batch script, an interactive step, a rank
        (slurm(SLURM_STEP_ID=""), "", (None, "127.0.0.1", None, 1)),
        (slurm(SLURM_STEP_ID="4294967291"), "", (None, "127.0.0.1", None, 1)),
        (slurm(TORCHELASTIC_RUN_ID="r"), "", (None, "127.0.0.1", None, 1)),
        (slurm(SLURM_STEP_NUM_NODES="x"), "", (None, "127.0.0.1", None, 1)),
        # one node
        (
            slurm(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="1", SLURM_GPUS_ON_NODE="8"), "",
            (None, "127.0.0.1", None, 1),
        ),
        # typed by hand, in a step of many tasks
        (
            slurm(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="8"), "--nproc-per-node 8",
            (None, "127.0.0.1", None, 8),
        ),
        # one msrun a rank
        (mpi(0), "", (ClusterSpec(2, 4, 0), "10.0.0.1", MPI_PORT, 2)),
        (mpi(2), "", (ClusterSpec(2, 4, 2), "10.0.0.1", MPI_PORT, 2)),
        (mpi(0), "--master-addr h --master-port 7", (ClusterSpec(2, 4, place=0), "h", 7, 2)),
        (mpi(2), "--nnodes 2 --nproc-per-node 2", (ClusterSpec(2, place=2), "10.0.0.1", MPI_PORT, 2)),
        (mpi(3, 1), "--nnodes 1", (None, "127.0.0.1", None, 1)),
        (mpi(1, 1, OMPI_MCA_orte_num_nodes="1"), "", (None, "127.0.0.1", None, 4)),
        (mpi(0, OMPI_COMM_WORLD_SIZE="1"), "", (None, "127.0.0.1", None, 1)),
        # one msrun a node
        (mpi(2, **ONE_A_NODE), "", (ClusterSpec(2, None, 1), "10.0.0.1", MPI_PORT, 1)),
        (
            mpi(2, **ONE_A_NODE), "--nproc-per-node 8",
            (ClusterSpec(2, None, 1), "10.0.0.1", MPI_PORT, 8),
        ),
        (
            mpi(2, OMPI_MCA_orte_hnp_uri="1.0;tcp6://[fe80::1]:4711", **ONE_A_NODE), "",
            (ClusterSpec(2, None, 1), "fe80::1", MPI_PORT, 1),
        ),
        # Open MPI 5 does not tell the number of nodes, and of mpirun's host only the name
        (mpi(2, **FIVE), "", (ClusterSpec(2, 4, 2), "a", FIVE_PORT, 2)),
        (mpi(0, **FIVE, PMIX_HOSTNAME="a"), "", (ClusterSpec(2, 4, 0), "a", FIVE_PORT, 2)),
        (mpi(2, **FIVE), "--master-addr h", (ClusterSpec(2, 4, 2), "h", 29500, 2)),
        (
            mpi(3, **FIVE, OMPI_COMM_WORLD_LOCAL_SIZE="1"), "--master-addr h",
            (ClusterSpec(4, 4, 3), "h", 29500, 1),
        ),
        (
            mpi(2, **FIVE, **ONE_A_NODE), "--master-addr h --nproc-per-node 8",
            (ClusterSpec(2, None, 1), "h", 29500, 8),
        ),
        # mpirun within a batch script starts its daemons by srun
        (slurm() | mpi(2), "", (ClusterSpec(2, 4, 2), "10.0.0.1", MPI_PORT, 2)),
        # Kubernetes
        (
            {"JOB_COMPLETION_INDEX": "2"}, "--nnodes 3 --master-addr h",
            (ClusterSpec(3, None, 2), "h", 29500, 1),
        ),
        ({"JOB_COMPLETION_INDEX": "2"}, "", (None, "127.0.0.1", None, 1)),
        ({"JOB_COMPLETION_INDEX": "2"}, "--nnodes 1", (None, "127.0.0.1", None, 1)),
        (
            {"JOB_COMPLETION_INDEX": "2"}, "--nnodes 2:3 --master-addr h",
            (ClusterSpec(3, None, 2, least=2), "h", 29500, 1),
        ),
        (PYTORCH_JOB, "", (ClusterSpec(3, None, 2), "job-master-0", 23456, 1)),
        ({"MASTER_ADDR": "h", "WORLD_SIZE": "3", "RANK": "2"}, "", (None, "127.0.0.1", None, 1)),
        (
            PYTORCH_JOB | {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}, "",
            (ClusterSpec(3, None, 1), "a", 29500, 1),
        ),
    ],
)  # fmt: skip
def test_what_nobody_gave_comes_from_the_engine(environ, line, expected):
    assert told(environ, line) == expected


DOCKER = "172.17.0.1", "255.255.0.0"  # a bridge that each machine has for itself, at one address
SEVERAL = "77.0;tcp://172.17.0.1,10.0.0.1,192.168.0.1:4711"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([("10.0.7.2", "255.255.0.0")], "10.0.0.1"),
        ([DOCKER, ("192.168.0.9", "255.255.255.0")], "192.168.0.1"),
        ([DOCKER, ("10.9.0.2", "255.255.255.0")], "10.0.0.1"),  # routed: not its own, at least
        ([("10.9.0.2", "255.255.255.0"), ("fe80::2%eth0", "ffff:ffff:ffff:ffff::")], "172.17.0.1"),
        ([("10.0.7.2", None)], "172.17.0.1"),
    ],
)
def test_of_the_addresses_of_mpirun_one_is_taken_whose_network_this_machine_is_in(
    monkeypatch, own, expected
):
    addresses = [SimpleNamespace(address=address, netmask=mask) for address, mask in own]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": addresses})
    environ = mpi(2, OMPI_MCA_orte_hnp_uri=SEVERAL, **ONE_A_NODE)
    assert told(environ, "")[1] == expected
    first = mpi(0, OMPI_MCA_orte_hnp_uri=SEVERAL, OMPI_MCA_orte_local_daemon_uri=SEVERAL)
    assert told(first, "")[1] == "172.17.0.1"  # all are its own


def test_of_the_ipv6_addresses_of_mpirun_too(monkeypatch):
    addresses = [SimpleNamespace(address="fd00:5::2", netmask="ffff:ffff:ffff:ffff::")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": addresses})
    uri = "77.0;tcp6://[fd00:4::1,fd00:5::1]:4711"
    assert told(mpi(2, OMPI_MCA_orte_hnp_uri=uri, **ONE_A_NODE), "")[1] == "fd00:5::1"


@pytest.mark.parametrize(
    ("environ", "line", "sentence"),
    [
        (slurm(SLURM_STEP_NUM_TASKS="8"), "", "this step of Slurm has 8 tasks on 4 nodes, but msrun"),
        (
            slurm(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="8"), "",
            "this step of Slurm has 8 tasks on 1 node, but msrun is to be started once a node: srun",
        ),
        (
            mpi(0, OMPI_MCA_orte_local_daemon_uri="77.1;tcp://10.0.0.2:4712"), "",
            "mpirun does not tell at which address the nodes meet",
        ),
        (mpi(0, **FIVE, PMIX_HOSTNAME="b"), "", "name the first of its hosts, as in --master-addr=HOST"),
        (
            mpi(0), "--nproc-per-node 8",
            "OMPI_COMM_WORLD_LOCAL_SIZE=2 and --nproc-per-node=8 disagree",
        ),
        (slurm(), "--worker_num 7", "--worker_num=7 and SLURM_STEP_NUM_NODES=4 disagree"),
    ],
)  # fmt: skip
def test_what_makes_no_job_is_refused_with_the_variable(environ, line, sentence):
    with pytest.raises(UsageError) as refused:
        request(environ, line)
    assert sentence in str(refused.value)


def test_why_several_nodes_take_part_is_said_where_the_job_begins():
    said = request(slurm()).job.cluster.said
    assert said[0] == ("Slurm's step 100.2: the job is on 4 nodes (--nnodes=1 runs each by itself)")
    assert request(mpi(0)).job.cluster.said[0].startswith("Open MPI's job 1562509313: ")


def test_open_mpi_has_a_secret_that_all_nodes_know():
    assert request(mpi(0)).job.cluster.token_variable == "OMPI_MCA_orte_precondition_transports"
    assert request(slurm()).job.cluster.token_variable == ""


@pytest.mark.parametrize(
    ("environ", "line", "name"),
    [
        (slurm(), "", f"slurm-100.2-0-{PORT}"),
        (slurm(SLURM_NODEID="0"), "--nnodes=3", f"slurm-100.2-0-{PORT}"),
        (slurm(), "--spare-node", f"slurm-100.2-0-{PORT}"),
        # another start, another cluster with the same home, another job in the same step
        (slurm(SLURM_RESTART_COUNT="2"), "", f"slurm-100.2-2-{PORT}"),
        (slurm(SLURM_RESTART_COUNT="10"), "", f"slurm-100.2-10-{PORT}"),
        (slurm(SLURM_CLUSTER_NAME="a/b"), "", f"slurm-a_b-100.2-0-{PORT}"),
        (slurm(), "--master-port=7", "slurm-100.2-0-7"),
        (mpi(2, **ONE_A_NODE), "", ""),
        ({"JOB_COMPLETION_INDEX": "2"}, "--nnodes 3 --master-addr h", ""),
    ],
)
def test_the_nodes_of_a_step_of_slurm_may_make_a_token(environ, line, name):
    assert request(environ, line).job.cluster.own_token == name


def test_where_a_node_has_the_number_of_its_first_rank_only_the_order_counts():
    assert request(mpi(2)).job.cluster.has_sparse_ranks
    assert not request(mpi(2), "--node-rank 1").job.cluster.has_sparse_ranks
    assert not request(mpi(2, **ONE_A_NODE)).job.cluster.has_sparse_ranks
    assert not request(slurm()).job.cluster.has_sparse_ranks


@pytest.mark.parametrize(
    ("environ", "line", "expected"),
    [
        (slurm(SLURM_NODEID="2"), "--nnodes 3", ClusterSpec(3, None, 2)),
        (slurm(SLURM_NODEID="3"), "--nnodes 3", ClusterSpec(3, is_spare=True)),
        (slurm(SLURM_NODEID="3"), "--nnodes 2:3", ClusterSpec(3, is_spare=True, least=2)),
        (slurm(SLURM_NODEID="0"), "--spare-node", ClusterSpec(4, is_spare=True)),
        (slurm(SLURM_NODEID="3"), "--nnodes 3 --master-addr h", ClusterSpec(3, is_spare=True)),
        (slurm(SLURM_NODEID="2"), "--nnodes 3 --master-addr h", ClusterSpec(3, place=2)),
        ({"JOB_COMPLETION_INDEX": "4"}, "--nnodes 4", ClusterSpec(4, is_spare=True)),
    ],
)
def test_nodes_beyond_those_that_are_asked_for_are_spare(environ, line, expected):
    assert told(environ, line)[0] == expected


def test_how_many_nodes_are_spare_is_said():
    said = request(slurm(SLURM_NODEID="0"), "--nnodes 3").job.cluster.said[0]
    assert said == "Slurm's step 100.2: the job is on 3 nodes, one waits as a spare"
    said = request(slurm(SLURM_NODEID="0"), "--nnodes 2").job.cluster.said[0]
    assert said == "Slurm's step 100.2: the job is on 2 nodes, 2 wait as spares"


def test_of_the_msruns_of_a_node_one_leads():
    for rank, local_rank in ((0, 0), (1, 1), (2, 0), (3, 1)):
        found = request(mpi(rank, local_rank)).engine
        assert (found.team, found.followers) == ("1562509313", 1)
        assert found.is_follower is (local_rank == 1)
    assert request(mpi(2, **ONE_A_NODE)).engine.team == ""
    assert request(mpi(3, 1), "--nnodes 1").engine is None


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n0", "n0"),
        ("n0,n1", "n0"),
        ("n[0-2,5],gpu[08-11]", "n0"),
        ("gpu[08-11]", "gpu08"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("rack[1-2]n[03,07],x", "rack1n03"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodelist, first):
    assert first_host(nodelist) == first


# --- the same job once more -----------------------------------------------------------------------


def test_a_job_is_named_after_its_step():
    assert request(slurm()).job.run_id == "slurm-100.2"
    assert request(slurm(), "--rdzv-id mine").job.run_id == "mine"


def test_a_requeued_job_of_which_nothing_is_known_begins_anew_and_says_so():
    one = request(slurm(SLURM_NODEID="0", SLURM_RESTART_COUNT="1"))
    assert one.origin is None
    (said,) = one.warnings
    assert said == (
        "Slurm's step 100.2 was started before, but no run of this script with a checkpoint, with "
        "these arguments and in this folder, is known on this machine: training begins anew"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"SLURM_NODEID": "0"}, ""),  # its first start
        ({"SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "0"}, ""),
        ({"SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "1"}, ""),  # node 0 tells this one
        ({"SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "1"}, "--resume=False"),
        ({"SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "1"}, "--nnodes=3"),  # a spare one
        ({"SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "1"}, "--master-addr=192.0.2.1"),
    ],
)
def test_nothing_is_said_otherwise(changes, line):
    one = request(slurm(**changes), line)
    assert (one.origin, one.warnings) == (None, ())


@pytest.fixture
def recorded(monkeypatch, folder):
    """Runs of Slurm's job 100 that are known here, the newest first."""
    made = []

    def record(**changes):
        about = {
            "record_id": f"run{len(made)}", "run_id": "slurm-100.2", "pid": 1, "born": 1,
            "log_dir": "/l", "argv": ("msrun", "t.py"), "cwd": str(folder), "started": 0.0,
            "checkpoints": ("/c",), "engine_job": "Slurm fake 100",
        }  # fmt: skip
        made.append(Record(**about | changes))

    monkeypatch.setattr("agent.records.run_record.records", lambda _environ: iter(made))
    return record


@pytest.mark.parametrize(
    ("changes", "is_it"),
    [
        ({}, True),
        ({"run_id": "77"}, True),  # --rdzv-id=$RANDOM
        ({"argv": ("msrun", "--nproc-per-node=2", "t.py")}, True),
        ({"argv": ("msrun", "u.py")}, False),
        ({"argv": ("msrun", "t.py", "--seed=2")}, False),
        ({"cwd": "/"}, False),
        ({"checkpoints": ()}, False),
        ({"engine_job": "Slurm fake 101"}, False),
        ({"job": "run9"}, False),  # of another node than the first
    ],
)
def test_a_requeued_job_goes_on_with_its_own_run_of_the_same_script(recorded, changes, is_it):
    recorded(**changes)
    found = newest_of("Slurm fake 100", "t.py", (), {})
    assert found == ("run0" if is_it else None)


# --- by hand --------------------------------------------------------------------------------------


def by_hand(role="MS_WORKER", **changes):
    environ = {
        "MS_ROLE": role,
        "MS_WORKER_NUM": "8",
        "MS_SCHED_HOST": "10.0.0.1",
        "MS_SCHED_PORT": "8118",
        "MS_NODE_ID": "worker_3",
    }
    return {name: text for name, text in (environ | changes).items() if text}


def test_a_worker_is_started_by_hand():
    job = request(by_hand()).job
    assert (job.nproc, job.master_addr, job.master_port) == (1, "10.0.0.1", 8118)
    assert (job.cluster.world, job.cluster.node_rank) == (8, -1)
    assert job.cluster.by_hand == HandSpec(has_worker=True, name="worker_3")
    assert (job.world_size, job.node_rank) == (8, 1)


def test_a_scheduler_has_no_worker():
    job = request(by_hand("MS_SCHED", MS_NODE_ID="sched")).job
    assert (job.nproc, job.cluster.world, job.cluster.node_rank) == (0, 8, 0)
    assert job.cluster.by_hand == HandSpec(has_worker=False)
    assert (job.world_size, job.ranks_here) == (8, ())
    assert job.cluster.said[0] == (
        "MS_ROLE=MS_SCHED: this process controls the job, and runs none of its workers"
    )


def test_one_worker_has_a_scheduler_as_well():
    assert request(by_hand(MS_WORKER_NUM="1")).job.cluster.world == 1


@pytest.mark.parametrize(
    "line", ["--nnodes=1", "--worker-num=2", "--nproc-per-node=2", "--master-addr=h --nnodes=2"]
)
def test_a_line_that_says_how_many_and_where_is_no_worker_by_hand(line):
    cluster = request(by_hand(), line).job.cluster
    assert cluster is None or cluster.by_hand is None


def test_a_rank_that_starts_a_job_is_no_worker_by_hand():
    environ = by_hand(TORCHELASTIC_RUN_ID="r")  # each rank has these variables
    assert request(environ).job.cluster is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"MS_SCHED_HOST": ""}, "MS_ROLE=MS_WORKER needs MS_SCHED_HOST, too"),
        (
            {"MS_SCHED_HOST": "", "MS_WORKER_NUM": ""},
            "MS_ROLE=MS_WORKER needs MS_WORKER_NUM and MS_SCHED_HOST, too",
        ),
        ({"MS_ROLE": "MS_PSERVER"}, "MS_ROLE=MS_PSERVER must be MS_SCHED or MS_WORKER"),
        ({"MS_WORKER_NUM": "many"}, "MS_WORKER_NUM=many"),
        ({"MS_SCHED_PORT": "70000"}, "MS_SCHED_PORT=70000"),
    ],
)
def test_variables_that_make_no_job_by_hand_are_refused(changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        request(by_hand(**changes))
