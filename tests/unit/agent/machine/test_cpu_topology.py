"""The machine is read from /sys as it is, and a silent machine is still a machine."""

import pytest

from agent.machine.cpu_topology import Core, read_topology
from agent.text.ranges import format_ranges, parse_increasing, parse_ranges


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root, *, nodes, cores_per_node, cores_per_cache, threads=2, offline=()):
    """A tree as Linux numbers it: all first threads, then all second threads."""
    cores = nodes * cores_per_node
    for core in range(cores):
        cpus = [core + thread * cores for thread in range(threads)]
        first = core // cores_per_cache * cores_per_cache
        shared = [
            c + t * cores for c in range(first, first + cores_per_cache) for t in range(threads)
        ]
        for cpu in cpus:
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            write(root, f"{folder}/topology/thread_siblings_list", format_ranges(cpus))
            write(root, f"{folder}/topology/physical_package_id", core // cores_per_node)
            write(root, f"{folder}/cache/index0/level", 1)
            write(root, f"{folder}/cache/index0/type", "Data")
            write(root, f"{folder}/cache/index0/shared_cpu_list", format_ranges(cpus))
            write(root, f"{folder}/cache/index3/level", 3)
            write(root, f"{folder}/cache/index3/type", "Unified")
            write(root, f"{folder}/cache/index3/shared_cpu_list", format_ranges(shared))
    for node in range(nodes):
        first = node * cores_per_node
        own = [c + t * cores for c in range(first, first + cores_per_node) for t in range(threads)]
        write(root, f"sys/devices/system/node/node{node}/cpulist", format_ranges(own))
    write(
        root,
        "sys/devices/system/cpu/online",
        format_ranges(set(range(cores * threads)) - set(offline)),
    )
    return root


def gpu(root, address, node, uuid="GPU-0"):
    write(
        root,
        f"proc/driver/nvidia/gpus/{address}/information",
        f"Model: \t H200\nGPU UUID: \t {uuid}",
    )
    write(root, f"sys/bus/pci/devices/{address}/numa_node", node)


def test_cores_nodes_packages_and_complexes_are_read(tmp_path):
    found = read_topology(machine(tmp_path, nodes=2, cores_per_node=2, cores_per_cache=1), range(8))
    assert found.cores == (
        Core(frozenset({0, 4}), node=0, package=0, complex=0),
        Core(frozenset({1, 5}), node=0, package=0, complex=1),
        Core(frozenset({2, 6}), node=1, package=1, complex=2),
        Core(frozenset({3, 7}), node=1, package=1, complex=3),
    )
    assert found.nodes == (0, 1)
    assert found.gpu_nodes == ()


@pytest.mark.parametrize(
    ("allowed", "offline", "cpus"),
    [
        (range(8), (), {0, 1, 2, 3, 4, 5, 6, 7}),
        ({1, 2, 6}, (), {1, 2, 6}),
        (range(8), (3, 7), {0, 1, 2, 4, 5, 6}),
        ({100}, (), {100}),  # /sys is another machine's: what the kernel allows is true
    ],
)
def test_only_online_and_allowed_cpus_exist(tmp_path, allowed, offline, cpus):
    root = machine(tmp_path, nodes=2, cores_per_node=2, cores_per_cache=2, offline=offline)
    assert read_topology(root, allowed).cpus == cpus


def test_a_silent_machine_is_one_node_of_single_threads(tmp_path):
    found = read_topology(tmp_path, {3, 1})
    assert found.cores == (Core(frozenset({1}), 0, 0, 1), Core(frozenset({3}), 0, 0, 3))


def test_nonsense_in_sys_is_no_exception(tmp_path):
    root = machine(tmp_path, nodes=1, cores_per_node=2, cores_per_cache=1, threads=1)
    for name in (
        "cpu/online",
        "cpu/cpu0/topology/thread_siblings_list",
        "cpu/cpu0/topology/physical_package_id",
        "cpu/cpu0/cache/index3/level",
        "cpu/cpu0/cache/index0/shared_cpu_list",
        "node/node0/cpulist",
    ):
        write(root, f"sys/devices/system/{name}", "-1 ünsinn")
    assert read_topology(root, range(2)).cpus == {0, 1}


def test_this_machine_is_read():
    assert read_topology().cpus


def test_gpus_are_found_in_pci_order_with_their_node(tmp_path):
    for address, node in (("0000:dc:00.0", 1), ("0000:17:00.0", 0), ("0000:2a:00.0", -1)):
        gpu(tmp_path, address, node)
    (tmp_path / "proc/driver/nvidia/gpus/0000:ff:00.0").mkdir()
    assert read_topology(tmp_path, {0}).gpu_nodes == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, (5, 6, 7)),
        ("2,0", (7, 5)),
        (" 1 , 2", (6, 7)),
        ("GPU-b", (6,)),
        ("GPU-c1,0", (7, 5)),
        ("", ()),
        ("-1", ()),
        ("0,9,1", (5,)),
        ("0,GPU-", (5,)),  # which one is meant is not clear
        ("MIG-x", ()),
    ],
)
def test_cuda_visible_devices_is_honoured(tmp_path, visible, nodes):
    for number, uuid in enumerate(("GPU-a1", "GPU-b1", "GPU-c1")):
        gpu(tmp_path, f"0000:0{number}:00.0", 5 + number, uuid)
    assert read_topology(tmp_path, {0}, visible).gpu_nodes == nodes


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", set()),
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        (" 1 , 2-2\n", {1, 2}),
        ("3,1,2,2", {1, 2, 3}),
    ],
)
def test_ranges_are_read(text, numbers):
    assert parse_ranges(text) == numbers


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "1-2-3", "3-1", "1.5", "0x1", "²", "0-999999999", "9" * 99]
)
def test_what_is_no_range_is_named(text):
    with pytest.raises(ValueError, match=r"neither|backwards|beyond"):
        parse_ranges(text)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((8, 0, 1, 2, 3), "0-3,8"), ((1, 2, 4, 5), "1-2,4-5"), ((1, 1), "1")],
)
def test_ranges_are_written(numbers, text):
    assert format_ranges(numbers) == text


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1, 2), (0, 2, 4), (3, 4, 9, 1000)])
def test_increasing_numbers_come_back_in_order(numbers):
    assert parse_increasing(format_ranges(numbers), most=len(numbers)) == numbers
    if numbers:
        with pytest.raises(ValueError, match="more than"):
            parse_increasing(format_ranges(numbers), most=len(numbers) - 1)


@pytest.mark.parametrize("text", ["1,0", "0-3,2", "0-1,2", "0,0", "0,", " 0", "-1", "x"])
def test_increasing_numbers_are_written_in_one_way_only(text):
    with pytest.raises(ValueError, match=r"order|neither"):
        parse_increasing(text, most=100)
