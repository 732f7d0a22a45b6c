"""Behind some optimizer steps all ranks make a shadow: those of one step are a common cut.

Ranks take their optimizer steps in the same order, and their collectives, too. So the shadows of
one step belong together without a message between the ranks; the agent compares how many
collectives each has begun (:mod:`collectives`) before it believes that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import time
from importlib import import_module
from types import ModuleType
from typing import Any

from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import RankEnv
from worker_hooks.shadows import (
    collectives,
    event_files,
    image,
    interval,
    live_displays,
    native_threads,
    openmp,
    page,
    refusals,
    shared_memory,
)

OPTIMIZER = "torch.optim.optimizer"
TRAIN_STATE = "worker_hooks.training.train_state"
HELD = "a lock of multiprocessing is held, maybe by a worker of a DataLoader"
_ANSWER_S = 60.0  # within which the agent tells where the steps of copies are told
_HELD_S, _LOOK_S = 0.1, 0.005  # a worker lets go of a lock within this time


class _Fixed:
    """A shadow at every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every

    def is_due(self, step: int) -> bool:
        return (step - 1) % self._every == 0

    def cut(self, step: int, seconds: float | None) -> None:
        """It was made."""


class _Measured:
    """As few as cost little: rank 0 measures, and tells its peers by the page."""

    def __init__(self, told: page.DuePage, decides: bool) -> None:
        self._page = told
        self._interval = interval.Interval() if decides else None
        self._went_on_s = 0.0

    def is_due(self, step: int) -> bool:
        if step == 1 or self._page.read() == step:  # the first one is every rank's
            return True
        if self._interval is not None:
            now_s = time.monotonic()
            self._tell(self._interval.stepped(step, now_s, now_s - self._went_on_s))
            self._went_on_s = now_s
        return False

    def cut(self, step: int, seconds: float | None) -> None:
        """It was made, which took ``seconds``; ``None``: this is the shadow, woken."""
        if self._interval is not None:
            self._went_on_s = time.monotonic()
            self._tell(self._interval.cut(step, self._went_on_s, seconds))

    def _tell(self, step: int) -> None:
        if step:
            self._page.write(step)


class _Cuts:
    """The optimizer steps of this process, and its shadows."""

    def __init__(
        self, every: int, agent: image.Agent, kept_groups: ModuleType | None, workers: ModuleType
    ) -> None:
        self._schedule: _Fixed | _Measured | None = _Fixed(every) if every else None
        # neither can be imported any more; None: there are no groups
        self._kept_groups, self._workers = kept_groups, workers
        self._agent = agent
        self._steps = 0
        self._said = ""

    def stepped(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        """An optimizer of the script has finished a step."""
        self._steps += 1
        try:
            if self._schedule is None and self._steps == 1:
                self._schedule = self._measured()
            if self._schedule is None or not self._schedule.is_due(self._steps):
                return
            began = time.monotonic()
            is_woken = self._cut(optimizer, began)
            if self._schedule is not None:
                self._schedule.cut(self._steps, None if is_woken else time.monotonic() - began)
        except (OSError, wire.ProtocolError, struct.error) as error:
            self._schedule = None
            self._refuse(f"msrun does not say when a copy is due: {error!r}")

    def _measured(self) -> _Measured:
        """Ask the agent for the page.

        Raises:
            OSError: it does not answer.
        """
        known = RankEnv.read(os.environ)
        with self._agent.connect() as link:
            link.settimeout(_ANSWER_S)
            wire.send(link, protocol.ShadowPageWanted(known.rank, known.attempt))
            answer, fds = wire.receive(link)
        if not isinstance(answer, protocol.ShadowPage) or len(fds) != 1:
            raise OSError("no page came")
        return _Measured(page.DuePage(fds[0]), known.rank == 0)

    def _cut(self, optimizer: Any, began: float) -> bool:
        """Make a shadow, if it can be made; whether this is one that was woken."""
        known = RankEnv.read(os.environ)
        loaders = self._loaders()
        facts = refusals.look(known.world_size, known.local_world_size, is_guarded(), loaders)
        facts = facts._replace(is_sharded=refusals.is_sharded(optimizer))
        why = refusals.why_not(facts)
        if facts.is_guarded:
            self._schedule = None
        if not why and not openmp.pause():
            why = "its threads of OpenMP do not end"
        why = why or native_threads.why_not()
        locks = [] if why else self._locks(loaders)
        why = why or ("" if locks is not None else HELD)
        is_woken = False
        if not why:
            with event_files.still() as logs, live_displays.still() as displays:
                why = logs.why_not or displays.why_not
                try:
                    is_woken = not why and self._fork(known, loaders, locks or [], began)
                except OSError as error:
                    why = f"no copy of the process can be made: {error.strerror or error}"
            if is_woken:
                self._renew(logs, displays)
        if why != self._said:
            self._refuse(why, facts.is_guarded)
        return is_woken

    def _fork(
        self, known: RankEnv, loaders: refusals.Loaders, locks: shared_memory.Contents, began: float
    ) -> bool:
        """Make a shadow; whether this is one that was woken.

        Raises:
            OSError: there can be no more processes.
        """
        batches = shared_memory.contents(shared_memory.batches(loaders.pids))
        shared = image.Shared(locks, batches, loaders.pipes)
        took_s = time.monotonic() - began
        made = protocol.ShadowMade(
            known.rank, known.attempt, self._steps, 0, collectives.counts(), took_s
        )
        with native_threads.serial_tokenizers():
            return image.fork(self._agent, made, shared) is not None

    def _refuse(self, why: str, is_guarded: bool = False) -> None:
        """Say once why there are no shadows."""
        self._said = why
        if why:
            _refuse(self._agent, self._steps, why, is_guarded)

    def _loaders(self) -> refusals.Loaders:
        of = self._workers
        threads = event_files.threads() | live_displays.threads()
        try:
            return refusals.Loaders(
                *(of.note, of.pids(), of.feeders() | threads),
                *(of.addresses(), of.semaphores(), of.descriptors()),
            )
        except AttributeError as error:
            why = f"this torch or Python has other workers of a DataLoader ({error})"
            return refusals.Loaders(lambda: why, of.pids())

    def _locks(self, loaders: refusals.Loaders) -> shared_memory.Contents | None:
        """The semaphores; ``None``: a worker may hold one of the script's."""
        until = time.monotonic() + _HELD_S
        while True:
            locks = shared_memory.locks()
            if not loaders.pids or not shared_memory.taken(locks, loaders.semaphores):
                return locks
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_S)

    def _renew(self, logs: event_files.EventFiles, displays: live_displays.LiveDisplays) -> None:
        """In a copy that was woken: start workers and threads, and give groups new connections."""
        try:
            self._workers.renew()  # before there are connections that they would inherit
            logs.go_on()
            displays.go_on()
            if self._kept_groups is not None:
                _regroup(self._kept_groups)
        except BaseException as error:  # noqa: BLE001  the script must not go on without them
            print(f"msrun: this rank could not go on from its shadow: {error!r}", file=sys.stderr)
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


def _refuse(agent: image.Agent, step: int, why: str, is_guarded: bool = False) -> None:
    known = RankEnv.read(os.environ)
    with contextlib.suppress(OSError), agent.connect() as link:
        wire.send(link, protocol.ShadowRefused(known.rank, known.attempt, step, why, is_guarded))


def _keep_for_ever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def is_guarded() -> bool:
    """Whether the script has made a ``TrainState``, whose hooks protect it then."""
    return bool(getattr(sys.modules.get(TRAIN_STATE), "is_one_made", False))


def _drill() -> Any:
    """What injects faults and records results, if this is a drill."""
    if not RankEnv.read(os.environ).drill:
        return None
    return import_module("worker_hooks.shadows.drilled").Drilled(is_guarded)


def install(every: int, agent: image.Agent) -> None:
    """Make shadows from now on; torch is imported already. Never raises."""
    try:
        groups = None
        if sys.modules["torch"].distributed.is_available():
            groups = import_module("worker_hooks.distributed.kept_groups")
            collectives.watch()
            collectives.pending()  # raises here and now if this torch does not tell
        workers = import_module("worker_hooks.data.renewed_workers")
        workers.watch(is_guarded)
        drill = _drill()
        if drill is not None:
            drill.begin()
        register = import_module(OPTIMIZER).register_optimizer_step_post_hook
        register(_Cuts(every, agent, groups, workers).stepped)
        if drill is not None:
            drill.go_on()
    except Exception as error:  # noqa: BLE001  the script must not notice
        _refuse(agent, 0, f"this version of torch is not known ({error!r})")
