"""Which CPUs each local rank is bound to. Pure: a machine and a request in, sets of CPUs out.

``--bind-core=True`` gives every rank an even share: ranks are dealt to NUMA nodes in contiguous
blocks, in proportion to the nodes' cores, and a node's cores to its ranks; the hardware threads
of a core stay together. ``--bind-numa`` means what torch's ``--numa-binding`` means where there
are GPUs (a rank is bound beside its GPU); without GPUs the ranks are dealt to nodes as above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from agent.launch.rank_plan import Binding
from agent.machine.cpu_topology import Core, Topology
from agent.spec.job_spec import BindSpec, UsageError
from agent.text.ranges import format_ranges, parse_ranges

T = TypeVar("T")
Shares = tuple[frozenset[int] | None, ...]
"""CPUs of each local rank; ``None``: this rank is not bound."""


def bindings(topology: Topology, request: BindSpec, nproc: int) -> tuple[Binding, ...]:
    """The result of ``bind`` for the launch plan; empty when no binding is requested.

    As in torch, memory is left to the kernel: first touch is local anyway, and a strict policy
    would run out of memory on one node while others have some left.
    """
    shares = bind(topology, request, nproc) or ()
    return tuple(Binding(cpus=tuple(sorted(share or ()))) for share in shares)


def bind(topology: Topology, request: BindSpec, nproc: int) -> Shares | None:
    """The CPUs of each of ``nproc`` local ranks; ``None`` when no binding is requested.

    A list of cores overrides a NUMA mode, which overrides the even share.

    Raises:
        UsageError: an entry names CPUs that do not exist or may not be used, or a mode is not
            possible on this machine.
    """
    if request.cores:
        return _listed(topology, request, nproc)
    if request.numa is not None:
        return _by_node(topology, request.numa, nproc)
    return _even(topology, nproc) if request.auto else None


def _listed(topology: Topology, request: BindSpec, nproc: int) -> Shares:
    for rank in sorted(request.cores):
        if rank >= nproc:
            raise UsageError(
                f"--bind-core has an entry device{rank}, but this node runs {nproc} workers "
                f"(device0 to device{nproc - 1}): remove it or start more workers"
            )
    return tuple(
        _entry(topology, rank, request.cores[rank]) if rank in request.cores else None
        for rank in range(nproc)
    )


def _entry(topology: Topology, rank: int, ranges: Sequence[str]) -> frozenset[int]:
    name = f"--bind-core device{rank}"
    try:
        cpus = frozenset(cpu for text in ranges for cpu in parse_ranges(text))
    except ValueError as error:
        raise UsageError(f'{name}: {error}; write CPU ranges such as ["0-3", "8"]') from error
    if not cpus:
        raise UsageError(f"{name} names no CPU: list some, or remove the entry")
    missing = cpus - topology.cpus
    if missing:
        raise UsageError(
            f"{name}: CPUs {format_ranges(missing)} are not online or not allowed here; "
            f"use some of {format_ranges(topology.cpus)}"
        )
    return cpus


def _even(topology: Topology, nproc: int) -> Shares:
    nodes = topology.nodes
    if nproc < len(nodes):  # several entire nodes for each rank, so that no core stays unused
        shares = (_part(nodes, rank, nproc) for rank in range(nproc))
        return tuple(_cpus(c for c in topology.cores if c.node in share) for share in shares)
    dealt = _deal(topology, nproc)
    return tuple(_share(_on_node(topology, node), at, of) for node, at, of in dealt)


def _by_node(topology: Topology, mode: str, nproc: int) -> Shares:
    choose = MODES.get(mode)
    if choose is None:
        raise UsageError(f"--bind-numa={mode} is unknown: use one of {', '.join(MODES)}")
    places = _beside_gpus(topology, nproc) or _deal(topology, nproc)
    return tuple(choose(topology, node, at, of) for node, at, of in places)


# A place is (node, index among the ranks of the node, number of ranks of the node).
Place = tuple[int, int, int]


def _beside_gpus(topology: Topology, nproc: int) -> tuple[Place, ...]:
    """Each rank beside the GPU of its number; empty when GPUs are too few, or on empty nodes."""
    gpus = topology.gpu_nodes
    if len(gpus) < nproc or not set(gpus[:nproc]) <= set(topology.nodes):
        return ()
    # As in torch, all GPUs of a node share it, also those that no rank uses.
    return tuple(
        (node, gpus[:rank].count(node), gpus.count(node)) for rank, node in enumerate(gpus[:nproc])
    )


def _deal(topology: Topology, nproc: int) -> tuple[Place, ...]:
    """Ranks to nodes in contiguous blocks, in proportion to the nodes' cores."""
    nodes = topology.nodes
    ends = accumulate((len(_on_node(topology, node)) for node in nodes), initial=0)
    total = len(topology.cores)
    bounds = [(nproc * end * 2 + total) // (total * 2) for end in ends]
    return tuple(
        (node, at, last - first)
        for node, (first, last) in zip(nodes, pairwise(bounds), strict=True)
        for at in range(last - first)
    )


def _on_node(topology: Topology, node: int) -> tuple[Core, ...]:
    return tuple(core for core in topology.cores if core.node == node)


def _share(cores: Sequence[Core], at: int, of: int) -> frozenset[int]:
    """Part ``at`` of ``of`` equal parts in entire cores; more parts than cores share them."""
    return cores[at % len(cores)].cpus if of > len(cores) else _cpus(_part(cores, at, of))


def _part(whole: Sequence[T], at: int, of: int) -> Sequence[T]:
    """The first parts get the remainder, as torch deals cores."""
    size, extra = divmod(len(whole), of)
    start = at * size + min(at, extra)
    return whole[start : start + size + (at < extra)]


def _cpus(cores: Iterable[Core]) -> frozenset[int]:
    return frozenset(cpu for core in cores for cpu in core.cpus)


def _node(topology: Topology, node: int, _at: int, _of: int) -> frozenset[int]:
    return _cpus(_on_node(topology, node))


def _socket(topology: Topology, node: int, _at: int, _of: int) -> frozenset[int]:
    package = _on_node(topology, node)[0].package
    return _cpus(core for core in topology.cores if core.package == package)


def _exclusive(topology: Topology, node: int, at: int, of: int) -> frozenset[int]:
    cores = _on_node(topology, node)
    if of > len(cores):
        raise UsageError(
            f"--bind-numa=exclusive needs a core for each worker: NUMA node {node} has "
            f"{len(cores)} usable for {of}; start fewer workers or use --bind-numa=node"
        )
    return _share(cores, at, of)


def _core_complex(topology: Topology, node: int, at: int, _of: int) -> frozenset[int]:
    """An own complex when possible; the largest first, then the lowest, as in torch."""
    cores = _on_node(topology, node)
    groups = {core.complex: _cpus(c for c in cores if c.complex == core.complex) for core in cores}
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return ordered[at % len(ordered)][1]


MODES: dict[str, Callable[[Topology, int, int, int], frozenset[int]]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}
