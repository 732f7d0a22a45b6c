"""At every so many optimizer steps each rank makes a shadow: all of one step are a common cut.

Ranks take their optimizer steps in the same order, and their collectives, too. So the shadows of
one step belong together without a message between the ranks; the agent compares how many
collectives each has begun (:mod:`collectives`) before it believes that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from importlib import import_module
from types import ModuleType
from typing import Any

from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import RankEnv
from worker_hooks.shadows import collectives, image, openmp, refusals

OPTIMIZER = "torch.optim.optimizer"
TRAIN_STATE = "worker_hooks.training.train_state"


class _Cuts:
    """The optimizer steps of this process, and its shadows."""

    def __init__(self, every: int, agent: image.Agent, kept_groups: ModuleType | None) -> None:
        self._every = every
        self._kept_groups = kept_groups  # it cannot be imported any more; None: there are no groups
        self._agent = agent
        self._steps = 0
        self._said = ""

    def stepped(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        """An optimizer of the script has finished a step."""
        self._steps += 1
        if (self._steps - 1) % self._every == 0:
            self._cut(optimizer)

    def _cut(self, optimizer: Any) -> None:
        began = time.monotonic()
        known = RankEnv.read(os.environ)
        facts = refusals.look(known.world_size, known.local_world_size, TRAIN_STATE in sys.modules)
        facts = facts._replace(is_sharded=refusals.is_sharded(optimizer))
        why = refusals.why_not(facts)
        if not why and not openmp.pause():
            why = "its threads of OpenMP do not end"
        if not why:
            made = protocol.ShadowMade(
                known.rank,
                known.attempt,
                self._steps,
                0,
                collectives.counts(),
                time.monotonic() - began,
            )
            try:
                if image.fork(self._agent, made) is not None:
                    self._regroup()
            except OSError as error:
                why = f"no copy of the process can be made: {error.strerror or error}"
        if why != self._said:
            self._refuse(why)

    def _refuse(self, why: str) -> None:
        """Say once why there are no shadows."""
        self._said = why
        if why:
            _refuse(self._agent, self._steps, why)

    def _regroup(self) -> None:
        """In a copy that was woken: give its process groups new connections."""
        try:
            if self._kept_groups is not None:
                _regroup(self._kept_groups)
        except BaseException as error:  # noqa: BLE001  the script must not go on without them
            print(f"msrun: this rank could not join its peers again: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(image.FAILED)


def _regroup(kept_groups: Any) -> None:
    if not sys.modules["torch"].distributed.is_initialized():
        return
    groups = kept_groups.present()
    for group in groups.groups:  # their threads are not here, so their ends would never end
        for device in group.group._device_types:  # noqa: SLF001  no public one
            _keep_for_ever(group.group._get_backend(device))  # noqa: SLF001  the same
    _keep_for_ever([*collectives.stores()])
    collectives.end_present_backends_only()
    kept_groups.join(groups, is_first=False)


def _refuse(agent: image.Agent, step: int, why: str) -> None:
    known = RankEnv.read(os.environ)
    with contextlib.suppress(OSError), agent.connect() as link:
        wire.send(link, protocol.ShadowRefused(known.rank, known.attempt, step, why))


def _keep_for_ever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def install(every: int, agent: image.Agent) -> None:
    """Make shadows from now on; torch is imported already. Never raises."""
    try:
        groups = None
        if sys.modules["torch"].distributed.is_available():
            groups = import_module("worker_hooks.distributed.kept_groups")
            collectives.watch()
            collectives.pending()  # raises here and now if this torch does not tell
        register = import_module(OPTIMIZER).register_optimizer_step_post_hook
        register(_Cuts(every, agent, groups).stepped)
    except Exception as error:  # noqa: BLE001  the script must not notice
        _refuse(agent, 0, f"this version of torch is not known ({error!r})")
