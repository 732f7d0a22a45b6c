"""Why a process cannot be copied at this optimizer step. The decision is pure, on facts of a look.

A copy has the memory of the process and one thread. What else a process consists of is either
made again when the copy wakes (connections of gloo's groups, positions in files), or refused here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from worker_hooks.contract.process_stat import children
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.shadows import collectives, openmp, shared_memory

HARMLESS = ("TMonitor",)  # tqdm's: they only redraw a bar
_MIB = 1 << 20


class Loaders(NamedTuple):
    """What belongs to workers of DataLoaders, which a copy starts anew."""

    note: Callable[[], str] = str  # what they need; returns why they cannot be started anew
    pids: frozenset[int] = frozenset()
    threads: frozenset[int] = frozenset()  # identities, also of others that are started anew
    addresses: tuple[int, ...] = ()  # in memory that they share
    semaphores: frozenset[int] = frozenset()  # addresses
    pipes: frozenset[int] = frozenset()  # descriptors


class Facts(NamedTuple):
    """What a process consists of, as far as it matters."""

    is_guarded: bool = False  # it has a TrainState
    is_main_thread: bool = True
    threads: tuple[str, ...] = ()  # of Python, beside the main one
    devices: tuple[str, ...] = ()  # accelerators that it uses
    children: int = 0  # that are no such workers
    loaders: str = ""  # why these cannot be started anew
    shared: tuple[str, ...] = ()  # memory that it shares with others and may write
    backends: frozenset[str] = frozenset()  # of its process groups
    world_size: int = 1
    has_groups: bool = False
    pending: int = 0  # collectives that were begun and have not ended
    has_sent: bool = False  # from rank to rank
    is_sharded: bool = False
    openmp: str = ""  # why its threads cannot be paused
    need: int = 0  # bytes that copies of all ranks here may take
    free: int | None = None


def why_not(facts: Facts) -> str:  # noqa: C901, PLR0912  a row for each reason
    """Why there can be no copy, as a part of a sentence; empty: there can be one."""
    if facts.is_guarded:
        return "the script has a TrainState, which protects it better"
    if not facts.is_main_thread:
        return "an optimizer steps in a thread that is not the main one"
    if facts.devices:
        return f"the script uses {', '.join(facts.devices)}, which no copy of a process can use"
    if facts.children:
        return (
            f"the script has {facts.children} child process{'es' * (facts.children > 1)} beside "
            "workers of torch's DataLoader"
        )
    if facts.loaders:
        return facts.loaders
    if facts.threads:
        return f"a copy of the process would lack its threads: {', '.join(facts.threads)}"
    if facts.shared:
        return f"the script writes memory that other processes share: {', '.join(facts.shared)}"
    if facts.world_size > 1 and not facts.has_groups:
        return "its ranks have no process group of torch.distributed, so nothing shows their order"
    if others := facts.backends - {"gloo"}:
        return f"process groups of {', '.join(sorted(others))}; only those of gloo can be renewed"
    if facts.is_sharded:
        return "parameters are sharded (FSDP, DTensor), which was not tested"
    if facts.has_sent:
        return "the script sends from rank to rank (send, recv), and such messages are not counted"
    if facts.pending:
        return "a collective has begun and not ended at an optimizer step"
    if facts.openmp:
        return facts.openmp
    if facts.free is not None and facts.free < facts.need:
        free, need = facts.free // _MIB, facts.need // _MIB
        return f"{need} MiB of memory may be needed for copies of the ranks, {free} MiB are free"
    return ""


def look(
    world_size: int, local_world_size: int, is_guarded: bool, loaders: Loaders | None = None
) -> Facts:
    """The facts of this process now; the costly ones last, and only if they matter."""
    loaders = loaders or Loaders()
    torch = sys.modules["torch"]
    dist = torch.distributed
    facts = Facts(
        is_guarded=is_guarded,
        is_main_thread=threading.current_thread() is threading.main_thread(),
        threads=tuple(_threads(loaders.threads)),
        devices=_devices(torch),
        children=len(set(children(os.getpid())) - loaders.pids),
        world_size=world_size,
        has_groups=bool(dist.is_available() and dist.is_initialized()),
        backends=collectives.backends(),
        pending=collectives.pending(),
        has_sent=collectives.has_sent(),
        openmp=openmp.why_not(),
    )
    if why_not(facts):
        return facts
    batches = sum(each.nbytes for each in shared_memory.batches(loaders.pids))
    return facts._replace(
        loaders=loaders.note(),
        shared=shared_memory.unknown(loaders.pids, loaders.addresses),
        need=(_own_bytes() + 2 * batches) * local_world_size,
        free=free_bytes(),
    )


def is_sharded(optimizer: Any) -> bool:
    """Whether parameters of an optimizer are parts of larger ones."""
    kinds = {type(each) for group in optimizer.param_groups for each in group["params"]}
    return any(kind.__name__ in {"DTensor", "FlatParameter"} for kind in kinds)


def _threads(known: Collection[int]) -> Collection[str]:
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    return [
        each.name
        for each in others
        if type(each).__name__ not in HARMLESS and id(each) not in known
    ]


def _devices(torch: Any) -> tuple[str, ...]:
    used = []
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", bool)():
            used.append(name)
    return tuple(used)


def _own_bytes() -> int:
    """Memory that is this process's alone: a copy takes at most as much once more."""
    with open("/proc/self/status") as file:
        kib = [int(line.split()[1]) for line in file if line.startswith("RssAnon:")]
    return kib[0] * 1024 if kib else 0
