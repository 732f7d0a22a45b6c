"""A rank's membership in its process group: left when a peer has died, and made again."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

from torch import nn

from worker_hooks.contract.env import rejoined
from worker_hooks.contract.protocol import Rejoin
from worker_hooks.distributed import (
    cut_tensors,
    ddp_release,
    kept_groups,
    pipelines,
    process_group,
    rehearsal,
    store_connection,
)
from worker_hooks.distributed.kept_groups import KeptGroups
from worker_hooks.distributed.module_flags import REDUCED, RecordedFlags
from worker_hooks.guard.guard import Guard
from worker_hooks.tensors import placements


class Membership:
    """Knows whether this rank could join new peers, and does it."""

    def __init__(self, guard: Guard, modules: Callable[[], Iterable[nn.Module]]) -> None:
        """The rank cannot be replaced before :meth:`begin`."""
        self._guard = guard
        self._modules = modules
        self._left: list[tuple[Sequence[ref[Any]], list[Any]]] = []  # and still referred to
        self._flags: RecordedFlags | None = None
        # made by the script before run(): one group is made again, several are kept
        self._group: process_group.GroupRecord | None = None
        self._kept: KeptGroups | None = None
        guard.not_replaceable_why = process_group.OUTSIDE
        REDUCED.watch()
        if guard.is_on:
            ddp_release.install()  # where the worker's own start could not: behind a shell script

    def begin(self) -> None:
        """``run`` is about to enter the training function for the first time."""
        guard = self._guard
        self._flags = RecordedFlags(self._modules())
        repeatable = cut_tensors.end()
        why = process_group.not_replaceable_why(guard.env, self._modules, repeatable)
        why = why or placements.why_group_held(self._modules())
        if self._are_groups_held():
            self._kept = kept_groups.present()
            why = why or kept_groups.why_not() or rehearsal.why_not()
            why = why or placements.why_no_iteration_drop(self._modules())
            why = why or pipelines.why_not_anew()
        else:
            self._group = process_group.present()
        guard.not_replaceable_why, guard.rehearses = why, self._kept is not None
        guard.why_cut_inside = self._why_cut_inside
        if guard.is_on and not why:
            store_connection.connect_in_short_tries(self._raise_if_ejected)
        if self._kept is not None and rehearsal.is_on():
            rehearsal.end()
            kept_groups.join(self._kept, is_first=True)

    def _why_cut_inside(self) -> str:
        """Why the training function cannot be entered again; empty: it can."""
        return process_group.CUT_INSIDE if self._kept is None and self._are_groups_held() else ""

    def _are_groups_held(self) -> bool:
        """Whether others refer to the groups that there are: FSDP and meshes, or the script."""
        count = process_group.count()
        if count != 1:
            return count > 1
        parameters = (one for module in self._modules() for one in module.parameters())
        return pipelines.are_there() or any(map(placements.is_distributed, parameters))

    def _raise_if_ejected(self) -> None:
        """A method of this object, which can be referred to weakly: the gate's could not."""
        self._guard.gate.raise_if_ejected()

    def leave(self, users: Sequence[ref[Any]]) -> tuple[Rejoin, bool]:
        """Leave the broken groups, as the agent ordered; the training function was left.

        ``users``: DDPs that were made with these groups.

        Returns:
            The order, and whether an update was under way.
        """
        order, was_torn = self._guard.rejoin()
        os.environ.update(rejoined(order.attempt, order.port, order.host))
        left = self._leave_groups()
        REDUCED.forget()
        if self._flags is not None:
            self._flags.restore()
        is_collected = _are_held(users, left) or self._uses_accelerators()
        self._left.append((users, left))
        del left
        if is_collected:
            gc.collect()
        self._left = [(users, left) for users, left in self._left if any(user() for user in users)]
        if self._kept is None and not is_collected and process_group.have_threads():
            gc.collect()
        return order, was_torn

    def _leave_groups(self) -> list[Any]:
        if self._kept is None:
            return process_group.leave()
        placements.drop_iteration(self._modules())
        pipelines.begin_anew()
        return kept_groups.leave(self._kept)

    def _uses_accelerators(self) -> bool:
        """Whether garbage of the interrupted step may occupy memory of a device."""
        parameters = (each for module in self._modules() for each in module.parameters())
        return any(each.device.type != "cpu" for each in parameters)

    def join(self) -> None:
        """Make the groups again that the script had made before ``run``. A collective.

        Raises:
            EjectedError: a peer is gone again.
            RuntimeError: the same, or a peer never came.
        """
        if self._kept is not None:
            kept_groups.join(self._kept, is_first=False)
            self._guard.not_replaceable_why = kept_groups.why_no_more()
        elif self._group is not None:
            process_group.join(self._group)


def _are_held(users: Sequence[ref[Any]], left: Sequence[Any]) -> bool:
    """Whether anything but this list refers to the groups, or anything at all to their DDPs.

    If so, it may be a reference cycle, which a forked child must not collect, because it lacks the
    groups' threads. If not, the garbage collection of the whole process (60 ms) is not needed.
    """
    if any(user() is not None for user in users):
        return True
    *counts, alone = (sys.getrefcount(each) for each in [*left, object()])
    return any(count > alone + 1 for count in counts)
