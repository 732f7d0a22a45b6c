"""Tests with real engines, of Debian's packages; `scripts/test engines` installs them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import open_mpi, slurm
from support.cluster import Cluster
from support.open_mpi import OpenMpi
from support.slurm import Slurm

from msrun.cluster.namespaces import refusal


def _cluster(tmp_path: Path, count: int, why: str) -> Cluster:
    if why := why or refusal():
        pytest.skip(why)
    (folder := tmp_path / "cluster").mkdir()
    return Cluster(count, folder, as_root=True)


@pytest.fixture
def four_nodes(tmp_path: Path) -> Iterator[Slurm]:
    """Slurm over four nodes."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(_cluster(tmp_path, 4, slurm.missing()))
        yield stack.enter_context(slurm.slurm(made))


@pytest.fixture
def mpi(tmp_path: Path) -> Iterator[OpenMpi]:
    """Open MPI over three nodes."""
    with _cluster(tmp_path, 3, open_mpi.missing()) as made:
        found = OpenMpi(made)
        found.start()
        yield found
