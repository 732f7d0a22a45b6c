"""Which collectives a process has begun: the proof that the cuts of all ranks belong together.

torch numbers the collectives of each group. If all ranks have begun as many of each group when they
are copied, and all of these have ended, no message is on its way between the copies. What has ended
is known of what Python has begun; a backward of DDP ends its own before the optimizer's step.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

C10D = "torch.distributed.distributed_c10d"
_SENDING = ("send", "recv", "recv_anysource")
_BEGINNING = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast"),
    *("gather", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter"),
    *("_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)

_begun: deque[Any] = deque()  # works that may not have ended
_sent = False


def watch() -> None:
    """See what Python begins from now on."""
    group: Any = import_module(C10D).ProcessGroup
    for name in _BEGINNING:
        if (call := getattr(group, name, None)) is not None:
            setattr(group, name, _noting(call, _begin))
    for name in _SENDING:
        if (call := getattr(group, name, None)) is not None:
            setattr(group, name, _noting(call, _send))


def _noting(call: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        note(work)
        return work

    return noted


def _begin(work: Any) -> None:
    while _begun and _has_ended(_begun[0]):
        _begun.popleft()
    _begun.append(work)


def _send(_work: Any) -> None:
    global _sent  # noqa: PLW0603  of the process
    _sent = True


def _has_ended(work: Any) -> bool:
    return work is None or bool(work.is_completed())


def pending() -> int:
    """How many have begun and not ended."""
    rest = [work for work in _begun if not _has_ended(work)]
    _begun.clear()
    _begun.extend(rest)
    if C10D not in sys.modules:
        return len(rest)
    registry = sys.modules["torch"]._C._distributed_c10d  # noqa: SLF001  no public one
    return len(rest) + int(registry._get_work_registry_size())  # noqa: SLF001  functional ones


def has_sent() -> bool:
    """Whether a message went from one rank to another, ever."""
    return _sent


def _groups() -> list[tuple[Any, str, str]]:
    """Each group with its name and the names of its backends."""
    c10d: Any = sys.modules.get(C10D)
    if c10d is None or not c10d.is_initialized():
        return []
    world = c10d._world  # noqa: SLF001  no public one
    return [(group, world.pg_names[group], str(about[0])) for group, about in world.pg_map.items()]


def backends() -> frozenset[str]:
    """The names of the backends of all groups."""
    return frozenset(name for _, _, name in _groups())


def counts() -> dict[str, int]:
    """How many collectives of each group have begun, by the group's name."""
    return {
        name: int(group._get_sequence_number_for_group())  # noqa: SLF001  no public one
        for group, name, _ in _groups()
    }


def end_present_backends_only() -> None:
    """In a copy: the end of a group must not join threads of backends that it had before.

    They are not here, and their stacks are others' by now: a join could wait for ever.
    """

    def shutdown(group: Any) -> None:
        found = {id(each): each for each in map(group._get_backend, group._device_types)}  # noqa: SLF001  no public ones
        for backend in found.values():
            backend.shutdown()

    import_module(C10D).ProcessGroup.shutdown = shutdown


def stores() -> list[Any]:
    """Where the groups have met."""
    c10d: Any = sys.modules.get(C10D)
    if c10d is None or not c10d.is_initialized():
        return []
    return [about[1] for about in c10d._world.pg_map.values()]  # noqa: SLF001  no public one
