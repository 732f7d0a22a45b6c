"""Process groups that a script makes before ``run``: they stay, and get new connections.

torch's ``ProcessGroup`` hands each collective to a *backend*, which it keeps by kind of device, and
a new backend can be put there at any time. So a rank whose peer has died makes new backends only.
All that refers to the groups goes on to: FSDP, the meshes of DTensors, variables of the script.

A group forgets none of its backends, it knows each by a number of one byte. One that is not used
any more keeps idle threads. So there is a limit, after which all ranks are started anew.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from worker_hooks.distributed.communicators import device_types, group_register, timeout_of

FIRST, LAST = 16, 255  # numbers of backends; torch's own kinds are below

USED_UP = "has joined so many groups that torch can number no more of them"
NO_DESCRIPTORS = "has few file descriptors left (ulimit -n), and each replacement takes some"

_used = FIRST - 1
_growth = 0  # descriptors that a join has taken


class KeptGroup(NamedTuple):
    """One group that this rank is a member of."""

    group: Any  # torch's
    name: str
    ranks: tuple[int, ...]  # of the whole job, in the group's order
    timeout: timedelta


class KeptGroups(NamedTuple):
    """All groups of this rank."""

    groups: tuple[KeptGroup, ...]  # the one that was made first in front
    made: int  # of all groups, this rank's or not: the name of the next one


def present() -> KeptGroups:
    """The groups that there are now."""
    world = group_register()
    groups = tuple(
        KeptGroup(
            group, world.pg_names[group], tuple(world.pg_group_ranks[group]), timeout_of(group)
        )
        for group in world.pg_map
    )
    return KeptGroups(groups, world.group_count)


@functools.cache
def _takes_new_backends() -> bool:
    """Whether this torch's groups do, tried with a group of this process alone."""
    api: Any = dist
    host = torch.device("cpu")
    try:
        group = api.ProcessGroup(api.HashStore(), 0, 1)
        for number in (LAST - 1, LAST):
            store = api.PrefixStore(str(number), api.HashStore())
            backend = api.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=5))
            group._register_backend(host, api.ProcessGroup.BackendType(number), backend)  # noqa: SLF001
            if group._get_backend(host) is not backend or not group._device_types:  # noqa: SLF001
                return False
            backend._set_sequence_number_for_group()  # noqa: SLF001
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True


def why_not() -> str:
    """Why the present groups cannot be given new backends; empty: they can."""
    if not _takes_new_backends():
        return f"makes process groups, which torch {torch.__version__} ties to their connections"
    if [*device_types()] != ["cpu"]:
        return "makes process groups for accelerators outside of the training function"
    for group in group_register().pg_map:
        kind = type(group._get_backend(torch.device("cpu"))).__name__  # noqa: SLF001  no public one
        if kind not in {"ProcessGroupGloo", "FakeProcessGroup"}:
            return f"makes process groups of {kind} outside of the training function"
    return ""


def leave(kept: KeptGroups) -> list[Any]:
    """Destroy the groups that were made after these, which the training function makes again.

    Returns:
        Those groups, to be dropped after all DDPs.
    """
    world, known = group_register(), {id(each.group) for each in kept.groups}
    later = [group for group in world.pg_map if id(group) not in known]
    for group in reversed(later):
        dist.destroy_process_group(group)
    world.group_count = kept.made
    return later


def join(kept: KeptGroups, *, is_first: bool) -> None:
    """Give each group a new backend. A collective of all its ranks.

    Args:
        kept: the groups, on all ranks in the same order.
        is_first: those that they have only pretend to communicate.

    Raises:
        RuntimeError: a peer is gone again, or never came; or there were too many backends.
    """
    global _used, _growth  # noqa: PLW0603  as the groups, of which a process has one set
    before = _descriptors()
    kinds = dist.ProcessGroup.BackendType
    if not is_first:
        _used += 1
    if _used > LAST:
        raise RuntimeError(f"this rank {USED_UP}")
    kind = kinds.GLOO if is_first else kinds(_used)
    # the rank and the address are in the environment, as for init_process_group
    meet: Any = sys.modules["torch.distributed.rendezvous"]
    store, rank, _ = next(meet.rendezvous("env://", timeout=kept.groups[0].timeout))
    store.set_timeout(kept.groups[0].timeout)
    world = group_register()
    api: Any = dist
    for group, name, ranks, timeout in kept.groups:
        described = group.group_desc
        prefixed = api.PrefixStore(f"{name}/", store)
        backend = dist.ProcessGroupGloo(
            api.PrefixStore("kept/", prefixed), ranks.index(rank), len(ranks), timeout=timeout
        )
        backend.options.global_ranks_in_group = list(ranks)
        backend.options.group_name = name  # type: ignore[assignment]
        backend._set_sequence_number_for_group()  # noqa: SLF001  as torch does
        for device in group._device_types:  # noqa: SLF001  no public one
            group._register_backend(device, kind, backend)  # noqa: SLF001  the same
        # a group asks its backend for both, and functional collectives find it by its name
        group._set_group_name(name)  # noqa: SLF001  as torch does
        group._set_group_desc(described)  # noqa: SLF001  the same
        if is_first:
            group._set_default_backend(kind)  # noqa: SLF001  whose name it says
        world.pg_map[group] = world.pg_map[group][0], prefixed
    _growth = max(_growth, _descriptors() - before)


def why_no_more() -> str:
    """Why there cannot be another join; empty: there can."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and _descriptors() + 2 * _growth > soft:
        return NO_DESCRIPTORS
    return USED_UP if _used >= LAST else ""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
