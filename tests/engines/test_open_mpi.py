"""Jobs that a real mpirun starts over ssh: one msrun a node, or one a rank."""

from __future__ import annotations

import pytest
from support.engine_jobs import MSRUN, PLACE, check_replaced, places
from support.jobs import DEADLINE_S
from support.node_jobs import programs_on
from support.node_trainings import SCRIPT
from support.open_mpi import OpenMpi

EXPORTED = ("PYTHONPATH", "XDG_STATE_HOME", "MSRUN_TEST_MARK")


def test_one_msrun_a_node(mpi: OpenMpi) -> None:
    folder = mpi.cluster.folder / "logs"
    words = ("-n", 3, "-H", "node0,node1,node2", *MSRUN, f"--log_dir={folder}", PLACE)
    job = mpi.mpirun(*words, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    told = places(folder)
    assert [each["host"] for each in told] == ["node0", "node1", "node2"]
    assert "the nodes have no token" not in job.errors()  # Open MPI has given them one


def test_the_order_of_the_hosts_is_kept_where_the_first_is_named(mpi: OpenMpi) -> None:
    """By their addresses node1 would come before node2."""
    folder = mpi.cluster.folder / "logs"
    where = ("-n", 3, "-H", "node0,node2,node1")
    words = (*where, *MSRUN, "--master-addr=node0", f"--log_dir={folder}", PLACE)
    job = mpi.mpirun(*words, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    assert [each["host"] for each in places(folder)] == ["node0", "node2", "node1"]


@pytest.mark.parametrize("mapped", ["slot", "node"])
def test_one_msrun_a_rank(mpi: OpenMpi, mapped: str) -> None:
    folder = mpi.cluster.folder / "logs"
    where = ("-n", 5, "-H", "node0:2,node1:2,node2:1", "--map-by", mapped)
    job = mpi.mpirun(*where, *MSRUN, f"--log_dir={folder}", PLACE, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    told = places(folder)
    assert [each["host"] for each in told] == ["node0", "node0", "node1", "node1", "node2"]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "0", "1", "0"]


def test_one_msrun_a_node_of_open_mpi_5(mpi_5: OpenMpi) -> None:
    folder = mpi_5.cluster.folder / "logs"
    words = ("-n", 2, "-H", "node0,node1", *MSRUN, "--nproc-per-node=2", f"--log_dir={folder}")
    job = mpi_5.mpirun(*words, PLACE, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    assert [each["host"] for each in places(folder)] == ["node0", "node0", "node1", "node1"]


def test_one_node(mpi: OpenMpi) -> None:
    folder = mpi.cluster.folder / "logs"
    words = ("-n", 3, "-H", "node0:3", *MSRUN, f"--log_dir={folder}", PLACE)
    job = mpi.mpirun(*words, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    assert [each["LOCAL_WORLD_SIZE"] for each in places(folder)] == ["3"] * 3


def test_a_failure_has_its_code(mpi: OpenMpi) -> None:
    folder = mpi.cluster.folder / "logs"
    where = ("-n", 4, "-H", "node0:2,node1:2")
    words = (*where, *MSRUN, f"--log_dir={folder}", PLACE, "exit=3:7")
    job = mpi.mpirun(*words, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 1, job.errors()
    assert job.errors().count("Root Cause") == 1


def test_a_machine_without_ranks_cannot_be_the_meeting_point(mpi: OpenMpi) -> None:
    where = ("-n", 2, "-H", "node1,node2")
    job = mpi.mpirun(*where, *MSRUN, PLACE, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 2
    assert "name the first of its hosts, as in --master-addr=HOST" in job.errors()
    folder = mpi.cluster.folder / "logs"
    words = (*where, *MSRUN, "--master-addr=node1", f"--log_dir={folder}", PLACE)
    job = mpi.mpirun(*words, exported=EXPORTED)
    assert job.wait(DEADLINE_S) == 0, job.errors()
    assert [each["host"] for each in places(folder)] == ["node1", "node2"]


FORMS = {  # how many of mpirun's processes a host has, and what each of them is told
    "one msrun a node": (1, ("--nproc-per-node=2",)),
    "one msrun a rank": (2, ()),
}


@pytest.mark.torch
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_is_replaced(any_mpi: OpenMpi, undisturbed: list[str], form: str) -> None:
    """The hosts are in a file, as clusters without a scheduler have one."""
    folder = any_mpi.cluster.folder / "logs"
    slots, told = FORMS[form]
    hosts = any_mpi.cluster.folder / "hosts.txt"
    hosts.write_text("".join(f"node{each} slots={slots}\n" for each in range(2)))
    where = ("-n", 2 * slots, "--hostfile", hosts)
    words = (*where, *MSRUN, *told, f"--log_dir={folder}", SCRIPT, "--wait=5:0")
    job = any_mpi.mpirun(*words, exported=EXPORTED)
    check_replaced(any_mpi.cluster, folder, job, 3, undisturbed)
    assert [
        one for node in any_mpi.cluster.nodes for one in programs_on(node) if "msrun" in one
    ] == []
