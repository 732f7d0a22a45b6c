"""Tests with real engines, of Debian's packages; `scripts/test engines` installs them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import etcd_server, open_mpi, slurm
from support.cluster import Cluster
from support.node_trainings import SCRIPT, weights
from support.open_mpi import OpenMpi
from support.slurm import Slurm
from support.warm_python import WarmPython

from msrun.cluster.namespaces import refusal


def _cluster(tmp_path: Path, count: int, why: str, *, as_root: bool = True) -> Cluster:
    if why := why or refusal():
        pytest.skip(why)
    (folder := tmp_path / "cluster").mkdir()
    return Cluster(count, folder, as_root=as_root)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> list[str]:
    """The final weights of the training on four ranks, without msrun."""
    return weights(warm_python.train(tmp_path_factory.mktemp("undisturbed"), 4, SCRIPT))


@pytest.fixture
def etcd_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Four nodes, on one of which an etcd can be started."""
    with _cluster(tmp_path, 4, etcd_server.missing(), as_root=False) as made:
        yield made


@pytest.fixture
def four_nodes(tmp_path: Path) -> Iterator[Slurm]:
    """Slurm over four nodes."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(_cluster(tmp_path, 4, slurm.missing()))
        yield stack.enter_context(slurm.slurm(made))


def _open_mpi(tmp_path: Path, *, is_5: bool) -> Iterator[OpenMpi]:
    with _cluster(tmp_path, 3, open_mpi.missing_5() if is_5 else open_mpi.missing()) as made:
        found = OpenMpi(made, is_5=is_5)
        found.start()
        yield found


@pytest.fixture
def mpi(tmp_path: Path) -> Iterator[OpenMpi]:
    """Open MPI 4 over three nodes."""
    yield from _open_mpi(tmp_path, is_5=False)


@pytest.fixture
def mpi_5(tmp_path: Path) -> Iterator[OpenMpi]:
    """Open MPI 5 over three nodes."""
    yield from _open_mpi(tmp_path, is_5=True)


@pytest.fixture(params=[False, True], ids=["4", "5"])
def any_mpi(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenMpi]:
    """Both, one after the other."""
    yield from _open_mpi(tmp_path, is_5=request.param)
