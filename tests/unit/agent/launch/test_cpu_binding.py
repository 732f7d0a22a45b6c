"""Every rank gets the CPUs that were asked for, near its memory and near its GPU."""

import pytest

from agent.launch.cpu_binding import bind, bindings
from agent.launch.rank_plan import Binding
from agent.machine.cpu_topology import Core, Topology
from agent.spec.job_spec import BindSpec, UsageError
from agent.text.ranges import format_ranges


def topology(*sizes, threads=2, per_complex=2, gpus=(), nodes_per_package=1):
    """Nodes with so many cores each; second threads are numbered after all first ones."""
    homes = [node for node, size in enumerate(sizes) for _ in range(size)]
    total = len(homes)
    return Topology(
        cores=tuple(
            Core(frozenset(core + thread * total for thread in range(threads)), node, node // nodes_per_package, core // per_complex)
            for core, node in enumerate(homes)
        ),
        gpu_nodes=tuple(gpus),
    )  # fmt: skip


def shown(binding):
    return [None if cpus is None else format_ranges(cpus) for cpus in binding]


AUTO = BindSpec(auto=True)


@pytest.mark.parametrize(
    ("machine", "nproc", "cpus"),
    [
        (topology(4, 4), 8, ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"]),
        (topology(4, 4), 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        (topology(4, 4), 2, ["0-3,8-11", "4-7,12-15"]),
        (topology(4, 4), 1, ["0-15"]),
        (topology(4, 4), 3, ["0-1,8-9", "2-3,10-11", "4-7,12-15"]),
        (topology(2, 2, 2, 2, threads=1), 3, ["0-3", "4-5", "6-7"]),
        (topology(8, threads=1), 3, ["0-2", "3-5", "6-7"]),
        (topology(6, 2, threads=1), 4, ["0-1", "2-3", "4-5", "6-7"]),
        (topology(2, threads=1), 5, ["0", "1", "0", "1", "0"]),
        (topology(2, threads=2), 4, ["0,2", "1,3", "0,2", "1,3"]),
        (topology(1, 1, threads=1), 8, ["0", "0", "0", "0", "1", "1", "1", "1"]),
        (topology(7, 1, threads=1), 2, ["0-3", "4-6"]),  # no rank for a node so small
    ],
)
def test_auto_gives_each_rank_an_even_share_of_whole_cores(machine, nproc, cpus):
    assert shown(bind(machine, AUTO, nproc)) == cpus


@pytest.mark.parametrize("sizes", [(1,), (3, 5), (4, 4, 4), (1, 9), (2, 2, 2, 2, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_auto_is_disjoint_never_empty_and_stays_on_one_node(sizes, threads):
    machine = topology(*sizes, threads=threads)
    home = {cpu: core.node for core in machine.cores for cpu in core.cpus}
    for nproc in range(1, 2 * sum(sizes) + 2):
        binding = bind(machine, AUTO, nproc)
        assert len(binding) == nproc
        assert all(binding)
        assert nproc < len(sizes) or all(len({home[cpu] for cpu in cpus}) == 1 for cpus in binding)
        if nproc <= min(sizes):
            assert sum(map(len, binding)) == len(frozenset().union(*binding))


LISTED = BindSpec(cores={0: ("0-3", "8"), 2: ("1",)})


def test_listed_cores_bind_their_ranks_and_leave_the_others():
    assert shown(bind(topology(8), LISTED, 4)) == ["0-3,8", None, "1", None]


@pytest.mark.parametrize(
    ("cores", "nproc", "words"),
    [
        ({0: ("0-99",)}, 2, "--bind-core device0: CPUs 16-99 are not online or not allowed here; use some of 0-15"),
        ({1: ("0-x",)}, 2, "--bind-core device1: '0-x' is neither a number nor a range such as 0-3"),
        ({1: ("3-1",)}, 2, "--bind-core device1: '3-1' runs backwards"),
        ({1: ()}, 2, "--bind-core device1 names no CPU"),
        ({1: ("",)}, 2, "--bind-core device1 names no CPU"),
        ({2: ("0",)}, 2, "--bind-core has an entry device2, but this node runs 2 workers"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named(cores, nproc, words):
    with pytest.raises(UsageError) as raised:
        bind(topology(8), BindSpec(cores=cores), nproc)
    assert words in str(raised.value)


EIGHT = (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("mode", "machine", "nproc", "cpus"),
    [
        ("node", topology(4, 4, threads=1, gpus=EIGHT), 8, ["0-3"] * 4 + ["4-7"] * 4),
        ("node", topology(4, 4, threads=1, gpus=(1, 0)), 2, ["4-7", "0-3"]),
        ("node", topology(4, 4, threads=1, gpus=(1, 1)), 1, ["4-7"]),
        ("node", topology(4, 4, threads=1), 4, ["0-3", "0-3", "4-7", "4-7"]),
        ("node", topology(4, 4, threads=1, gpus=(1,)), 2, ["0-3", "4-7"]),  # fewer GPUs than ranks
        ("node", topology(4, 4, threads=1, gpus=(5, 5)), 2, ["0-3", "4-7"]),  # its node is not allowed
        ("node", topology(4, threads=1), 2, ["0-3", "0-3"]),
        ("socket", topology(2, 2, 2, 2, threads=1, nodes_per_package=2, gpus=(3, 0)), 2, ["4-7", "0-3"]),
        ("socket", topology(2, 2, 2, 2, threads=1, nodes_per_package=2), 4, ["0-3", "0-3", "4-7", "4-7"]),
        ("exclusive", topology(4, 4, gpus=(0, 1, 0, 1)), 4, ["0-1,8-9", "4-5,12-13", "2-3,10-11", "6-7,14-15"]),
        ("exclusive", topology(5, threads=1, gpus=(0, 0)), 2, ["0-2", "3-4"]),
        ("exclusive", topology(4, threads=1, gpus=(0, 0)), 1, ["0-1"]),  # the other GPU keeps its part
        ("exclusive", topology(4, 4, threads=1), 4, ["0-1", "2-3", "4-5", "6-7"]),
        ("core-complex", topology(4, 4, threads=1, gpus=(0, 0, 1, 1)), 4, ["0-1", "2-3", "4-5", "6-7"]),
        ("core-complex", topology(4, threads=1), 3, ["0-1", "2-3", "0-1"]),
        ("core-complex", topology(5, threads=1, per_complex=3), 2, ["0-2", "3-4"]),
        ("core-complex", topology(5, threads=1, per_complex=4), 2, ["0-3", "4"]),
    ],
)  # fmt: skip
def test_numa_modes_mean_what_they_mean_in_torch(mode, machine, nproc, cpus):
    assert shown(bind(machine, BindSpec(numa=mode), nproc)) == cpus


def test_exclusive_without_enough_cores_is_refused():
    with pytest.raises(UsageError, match="NUMA node 0 has 2 usable for 3; start fewer workers"):
        bind(topology(2), BindSpec(numa="exclusive"), 3)


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(
        UsageError, match="near is unknown: use one of node, socket, exclusive, core-complex"
    ):
        bind(topology(2), BindSpec(numa="near"), 1)


def test_nothing_asked_nothing_bound():
    assert bind(topology(2), BindSpec(), 2) is None
    assert bindings(topology(2), BindSpec(), 2) == ()


def test_the_launch_plan_gets_sorted_cpus_and_an_empty_binding_for_an_unbound_rank():
    planned = bindings(topology(8), LISTED, 3)
    assert planned == (Binding(cpus=(0, 1, 2, 3, 8)), Binding(), Binding(cpus=(1,)))
