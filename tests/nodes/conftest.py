"""Tests in which machines of a cluster meet, fall silent and die."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, refusal


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """`nodes(3)`: a cluster of three machines, which ends with the test."""
    if why := refusal():
        pytest.skip(why)
    with contextlib.ExitStack() as open_ones:

        def made(count: int) -> Cluster:
            (folder := tmp_path / "cluster").mkdir()
            return open_ones.enter_context(Cluster(count, folder))

        yield made
