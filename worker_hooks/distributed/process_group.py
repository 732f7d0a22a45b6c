"""The process group of a training: left when a peer has died, and made again with all ranks.

The arguments of ``init_process_group`` are read from the group itself, so the script may call it
before it imports anything of ours.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from worker_hooks.contract.env import RankEnv, meeting_point
from worker_hooks.distributed import ddp_bucket_order, rehearsal
from worker_hooks.distributed.communicators import device_types, group_register, timeout_of
from worker_hooks.distributed.gloo_sockets import gloo_sockets

OUTSIDE = "does not train inside run(train, state)"
CUT_INSIDE = "shards its model inside of the training function, which cannot be done twice"
STORE = "gives init_process_group a store or an address of its own"
EARLY = "runs collectives before run(), which a new rank could not repeat alone"
WRAPPED = "wraps its model in DDP outside of the training function"

_PREFIXING = "init_process_group.<locals>._distributed_excepthook"
_THREADS = {"pt_gloo_runloop", "gloo_tcp_loop"}


class GroupRecord(NamedTuple):
    """How to make a default group again that was made outside of the training function."""

    backend: str
    timeout: timedelta
    device: torch.device | None


def not_replaceable_why(
    env: RankEnv,
    modules: Callable[[], Iterable[nn.Module]],
    repeatable: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Why the group that exists when training begins could not be left and made again.

    Args:
        modules: returns the registered ones, to find DDPs around them.
        repeatable: how many collectives a new rank could repeat alone, by the name of their group.

    Returns:
        What the script did, as the end of a sentence. Empty: it can, or there is no group yet.
    """
    if env.world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return ""
    if rehearsal.is_on():  # its peers were asked, and nothing here is real
        return ""
    world = group_register()
    store = world.pg_map[dist.group.WORLD][1]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if (getattr(store, "host", ""), getattr(store, "port", 0)) != meeting_point(os.environ):
        return STORE
    is_early = _have_communicated(repeatable)
    if (is_early or len(world.pg_map) > 1) and ddp_bucket_order.find_all(modules()):
        return WRAPPED
    return EARLY if is_early else ""


def count() -> int:
    """How many groups this process is a member of."""
    return len(group_register().pg_map) if dist.is_available() and dist.is_initialized() else 0


def _have_communicated(repeatable: Mapping[str, int]) -> bool:
    """Whether something was sent by collectives that a new rank may not know."""
    world = group_register()
    return any(
        _collectives_in(group) > repeatable.get(world.pg_names[group], 0) for group in world.pg_map
    )


def collectives() -> int:
    """How many collectives this process has begun in its present groups, as far as they count."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    return sum(map(_collectives_in, group_register().pg_map))


def _collectives_in(group: Any) -> int:
    """How many have begun in a group since it got its backend; 0 if that does not count."""
    for device in device_types():
        # the group itself asks the backend that it had first
        with contextlib.suppress(RuntimeError, AttributeError):
            backend = group._get_backend(torch.device(device))  # noqa: SLF001
            return int(backend._get_sequence_number_for_group())  # noqa: SLF001  no other count
    return 0


def present() -> GroupRecord | None:
    """The present default group; ``None``: there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    world = group_register()
    group: Any = dist.group.WORLD
    name = world.pg_map[group][0]
    is_plain = name in dist.Backend.backend_list and name != dist.Backend.UNDEFINED
    backend = name if is_plain else world.pg_backend_config[group]
    return GroupRecord(str(backend), timeout_of(group), group.bound_device_id)


def leave() -> list[Any]:
    """Destroy every group: its peers are gone, or about to leave it, too.

    Returns:
        The groups, to be dropped after all DDPs. The end of a gloo group waits for its threads,
        which may need the GIL for the last tensor of a collective that failed. Python releases the
        GIL for that wait, but a DDP's C++ part, if it has the last reference, does not.
    """
    if not dist.is_available():
        return []
    groups = list(group_register().pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    _take_prefix_away()
    # the next group's name is a number; new ranks begin with 0, and failed groups count, too
    group_register().group_count = 0
    return groups


def _take_prefix_away() -> None:
    """Undo what ``init_process_group`` did to ``sys.excepthook``: the next call does it again.

    Each call puts the rank in front of every line of a traceback, also of lines that have it; after
    a thousand replacements the chain of hooks would be too deep to print any traceback.
    """
    hook = sys.excepthook
    if getattr(hook, "__qualname__", "") == _PREFIXING:
        sys.excepthook = inspect.getclosurevars(hook).nonlocals["old_hook"]


def have_threads() -> bool:
    """Whether a gloo group still has threads: something refers to it, perhaps a cycle.

    A thread names itself, which may be late on a busy machine; its sockets are there before it is.
    """
    if gloo_sockets():
        return True
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            if file.read().strip() in _THREADS:
                return True
    return False


def join(group: GroupRecord) -> None:
    """Make the group again. A collective.

    Raises:
        RuntimeError: a peer is gone again, or never came.
    """
    dist.init_process_group(group.backend, timeout=group.timeout, device_id=group.device)
