"""A job on three nodes, as node 0 sees it."""

import asyncio

import pytest
from support.controlled_node import controlled_node
from support.node_cluster import Cluster


@pytest.fixture
def cluster():
    loop = asyncio.new_event_loop()
    cluster = Cluster(loop)
    yield cluster
    cluster.door.close()
    loop.close()


@pytest.fixture
def waiting():
    """A job that waits for another node where one is lost."""
    loop = asyncio.new_event_loop()
    cluster = Cluster(loop, wait_s=600.0)
    cluster.start(2, 3, 4)
    yield cluster
    cluster.door.close()
    loop.close()


@pytest.fixture
def node():
    """One that is controlled by another."""
    yield from controlled_node()
