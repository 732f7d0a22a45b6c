"""A rank's membership in its job: begun with ``run``, left when a peer died, and taken up again."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

from torch import nn

from worker_hooks.contract.env import rejoined
from worker_hooks.contract.protocol import Rejoin
from worker_hooks.distributed import process_group
from worker_hooks.guard.guard import Guard

log = logging.getLogger("msrun")


class Membership:
    """Whether this rank could join new peers, and how it does."""

    def __init__(self, guard: Guard, modules: Callable[[], Iterable[nn.Module]]) -> None:
        """Be fixed to the peers of now until :meth:`begin`."""
        self._guard = guard
        self._modules = modules
        self._left: list[tuple[Sequence[ref[Any]], list[Any]]] = []  # and still in use
        self._modes: ModuleFlags | None = None
        self._group: process_group.GroupRecord | None = None  # made by the script before run()
        guard.not_replaceable_why = process_group.OUTSIDE

    def begin(self) -> None:
        """The training function is about to be entered for the first time."""
        guard = self._guard
        self._modes = ModuleFlags(self._modules())
        self._group = process_group.present()
        why = process_group.not_replaceable_why(guard.env, self._modules)
        guard.not_replaceable_why = why
        if why and guard.is_on and guard.env.rank == 0:
            log.warning("a dead rank will not be replaced alone, as the script %s", why)

    def leave(self, users: Sequence[ref[Any]]) -> tuple[Rejoin, bool]:
        """Leave the broken groups, as the agent ordered; the main thread is at its top.

        Args:
            users: DDPs that were made with these groups.

        Returns:
            The order, and whether an update was under way.
        """
        order, was_torn = self._guard.rejoin()
        os.environ.update(rejoined(order.attempt, order.port))
        left = process_group.leave()
        if self._modes is not None:
            self._modes.restore()
        is_searched = _are_held(users, left) or self._uses_accelerators()
        self._left.append((users, left))
        del left
        if is_searched:
            gc.collect()
        self._left = [(users, left) for users, left in self._left if any(user() for user in users)]
        if not is_searched and process_group.have_threads():
            gc.collect()
        return order, was_torn

    def _uses_accelerators(self) -> bool:
        """Whether what is left of the interrupted step may fill memory that the next one needs."""
        parameters = (each for module in self._modules() for each in module.parameters())
        return any(each.device.type != "cpu" for each in parameters)

    def join(self) -> None:
        """Make the group again that the script made before ``run``; a collective.

        Raises:
            EjectedError: a peer is gone again.
            RuntimeError: the same, or it never came.
        """
        if self._group is not None:
            process_group.join(self._group, self._guard.gate.raise_if_ejected)


def _are_held(users: Sequence[ref[Any]], left: Sequence[Any]) -> bool:
    """Whether anybody but this list refers to the groups, or to their DDPs at all.

    They may be in cycles, where a forked child must not find them, without their threads. If not,
    there is no need to look through all of the process, for 60 ms.
    """
    if any(user() is not None for user in users):
        return True
    *counts, alone = (sys.getrefcount(each) for each in [*left, object()])
    return any(count > alone + 1 for count in counts)


class ModuleFlags:
    """As of one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Note them, of these modules and all that are in them."""
        inside = [each for module in modules for each in module.modules()]
        self._training = [(each, each.training) for each in inside]
        self._trained = [
            (one, one.requires_grad) for each in inside for one in each.parameters(recurse=False)
        ]

    def restore(self) -> None:
        """Be as then: a validation, say, was interrupted."""
        for module, is_training in self._training:
            module.training = is_training
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
