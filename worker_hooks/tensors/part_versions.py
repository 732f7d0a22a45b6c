"""Counts on this rank's parts how often distributed tensors change, as torch does not.

Most changes of a DTensor torch counts on the DTensor alone, those by ``_foreach`` functions
nowhere. DTensor's dispatcher is called once for a whole list by these, and looks first whether it
has a handler for the function. Here it is given some: they note whose memory changes, and call
torch.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from worker_hooks.machine.kept_memory import BoardWriter
from worker_hooks.tensors.placements import Distributed, is_distributed, part_of

log = logging.getLogger("msrun")

UNSEEN = (
    "torch %s does not tell msrun which distributed tensors its _foreach functions change: if the "
    "script changes its weights so outside of an optimizer's update, and a rank dies there, they "
    "may be saved as changed already"
)

_VERSION = attrgetter("_version")
_LISTS = ("aten::_foreach_", "aten::_fused_")  # the functions that change tensors in lists

_changes: dict[int, int] = {}  # of registered parts, by the memory that they share with others
_noted = [0]  # changes of all of them
board: BoardWriter | None = None
"""Shows how many changes were noted here, to whoever reads this process when it is dead."""
_said: set[str] = set()


class PartVersions:
    """Changes of some distributed tensors; only those since it was made are counted."""

    def __init__(self, found: Distributed) -> None:
        """Watch these, and say so once if this torch does not let anybody."""
        self.tensors = found.tensors
        self._parts = found.parts
        self._memory = list(map(_memory_of, found.parts))
        for memory in self._memory:
            _changes.setdefault(memory, 0)
        self._like = next(filter(is_distributed, found.tensors), None)  # the others are plain
        self._is_watched = self._like is not None and _watch(self._like)
        self._counts = self._read()

    def count_on(self) -> None:
        """Count on the parts what was counted elsewhere since the last call."""
        if self._is_watched and _first() not in _handlers():
            # a context of torch's that had others has put the old ones back
            self._is_watched = _watch(self._like)
        now = self._read()
        if now == self._counts:
            return
        trios = list(zip(self._parts * 2, now, self._counts, strict=True))
        self._counts = now
        torch.autograd.graph.increment_version(
            [part for part, new, old in trios for _ in range(new - old)]
        )

    def _read(self) -> list[int]:
        """How often each was changed as torch says, and then as its handlers say."""
        return [*map(_VERSION, self.tensors), *map(_changes.__getitem__, self._memory)]


def _memory_of(part: Tensor) -> int:
    """The same for all tensors that may be changed with it, such as what ``detach()`` returns."""
    return part.untyped_storage().data_ptr()


def _watch(like: Any) -> bool:
    """Give the dispatcher the handlers; whether they are called, which is tried on this mesh."""
    try:
        handlers = _handlers()
        for operator in _changing():
            handlers.setdefault(operator, _counted)
        is_seen = _is_seen(like)
    except Exception:  # whatever has become of DTensor
        log.debug("looking for changes by _foreach functions", exc_info=True)
        is_seen = False
    if not is_seen and not _said:
        _said.add(torch.__version__)
        log.warning(UNSEEN, torch.__version__)
    return is_seen


@torch.no_grad()
def _is_seen(like: Any) -> bool:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    local = torch.zeros(1, device=part_of(like).device)
    one = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    memory = _memory_of(part_of(one))
    was = _changes.setdefault(memory, 0)
    torch._foreach_add_([one], 1)
    return _changes[memory] > was


def _handlers() -> dict[Any, Any]:
    """DTensor's own handlers by the functions of torch that they are called for."""
    kind: Any = sys.modules["torch.distributed.tensor"]
    found: dict[Any, Any] = kind.DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001  the only door
    return found


@functools.cache
def _changing() -> dict[Any, tuple[int, ...]]:
    """The functions that change tensors in lists, and which of their arguments these are."""
    return {operator: where for operator in _of_lists() if (where := _changed_by(operator))}


@functools.cache
def _first() -> Any:
    return next(iter(_changing()))


def _of_lists() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():  # noqa: SLF001  torch has no public one
        function, _, overload = name.partition(".")
        if name.startswith(_LISTS) and function.endswith("_"):
            packet = getattr(torch.ops.aten, function.removeprefix("aten::"))
            yield getattr(packet, overload or "default")


def _changed_by(operator: Any) -> tuple[int, ...]:
    arguments = enumerate(operator._schema.arguments)  # noqa: SLF001  the same
    return tuple(
        index for index, one in arguments if one.alias_info is not None and one.alias_info.is_write
    )


def _counted(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Called by DTensor's dispatcher in place of its own way, which is taken behind this."""
    handlers = _handlers()
    handlers.pop(operator, None)
    try:
        return operator(*args, **options)
    finally:
        handlers[operator] = _counted
        for index in _changing()[operator]:
            for each in args[index] if index < len(args) else ():
                _note(each)


def _note(tensor: Any) -> None:
    try:
        memory = _memory_of(part_of(tensor))
    except Exception:  # noqa: BLE001  one that has none, as torch.compile looks at what is called
        return
    if memory in _changes:
        _changes[memory] += 1
        _noted[0] += 1
        if board is not None:
            board.count(noted())


def noted() -> int:
    """How many changes of registered parts were noted that none of their versions shows."""
    return _noted[0]
