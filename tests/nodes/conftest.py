"""Tests in which machines of a cluster meet, fall silent and die."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.node_jobs import NodeJobs
from support.node_trainings import SCRIPT, weights
from support.warm_python import WarmPython

from msrun.cluster.namespaces import refusal


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[int], Cluster]]:
    """`nodes(3)`: a cluster of three machines, which ends with the test."""
    if why := refusal():
        pytest.skip(why)
    with contextlib.ExitStack() as open_ones:

        def made(count: int) -> Cluster:
            (folder := tmp_path / "cluster").mkdir()
            cluster = Cluster(count, folder)
            if request.node.get_closest_marker("warm"):
                cluster.warm = request.getfixturevalue("warm_python")
            return open_ones.enter_context(cluster)

        yield made


@pytest.fixture
def jobs(nodes: Callable[[int], Cluster]) -> NodeJobs:
    """Jobs on two machines."""
    return NodeJobs(nodes(2))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> list[str]:
    """The final weights of the training on four ranks, without msrun."""
    return weights(warm_python.train(tmp_path_factory.mktemp("undisturbed"), 4, SCRIPT))


USUAL = re.compile(
    "test_tls.*there|by_name.2|killed_node_is_dead|powered_off|mended|left_of_a_cluster|last_that_starts|form_of_mindspore|two_nodes_on_one_machine|wrong_node.*(token|rank)"
    "|is_missing|comes_late|strangers|printed_once.1|told_of_all.1|own_disks.*all_ranks_restart.all"
    "|succession.py.*spare_node_takes|place_of_the_first|killed_is_started_again"
    "|test_large_state.*they hold"
    "|test_drill.py.*\\[node|node_0_leaves|node_that_comes_is_taken_in"
    "|different_numbers|form_of_c10d|variables_of_torchrun|fewer_nodes_and_has_a_spare"
    "|exits_with_a_code|finish_early|shared_log_folder|wrong_node.*no run id"
    "|started_one_by_one|controls_the_same_ranks"
    "|three_nodes_meet.*2, 1, 0|owner_of_the_address|not_be_divisible|without_a_terminal|ranks_of_all_nodes"
    "|to_any_node_stops_all.*1,.*15|without_the_scheduler|loopback_address|every_block|Two machines"
    "|second_job.*c10d|knows_its_place"
    "|test_trainings.*(ranks_are_replaced.on node 1|another_node_takes|cut_for_a_moment|is_graceful)"
)
"""Each part once. All of them take minutes; `scripts/test nodes` and `all` run them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave those of this folder that are not usual to who asks for them."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if is_here and not USUAL.search(item.nodeid):
            item.add_marker("rare")
