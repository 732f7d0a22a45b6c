"""Workers of DataLoaders, for copies of their process: a copy lacks them and starts them anew.

The copy holds the script's iterator, with the sampler and all that was handed out. What it lacks is
noted before it is made: the randomness of each worker behind its last batch that was handed out,
and which indices were sent for batches that were not. A copy that wakes puts new workers into the
iterator, which go on from there and make these batches again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing.process
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import IterDataPipe, MapDataPipe, dataloader, get_worker_info
from torch.utils.data._utils import fetch as fetchers

from worker_hooks.data.loader_workers import (
    NOTHING,
    InitFn,
    Prologue,
    RandomnessRing,
    dataset_owners,
    state_bytes,
)
from worker_hooks.data.look import Look, digest, first_change, generators, look, with_opened
from worker_hooks.data.skip_sampler import swapped
from worker_hooks.data.worker_notes import WorkerNotes

_NOTE = "_msrun_workers"  # an attribute of the iterator, so that both end together
_OF_ITERATOR = (
    *("_workers", "_index_queues", "_worker_result_queue", "_data_queue", "_workers_done_event"),
    *("_worker_pids_set", "_shutdown", "_task_info", "_tasks_outstanding", "_rcvd_idx"),
    *("_send_idx", "_base_seed", "_prefetch_factor", "_dataset_kind", "_pin_memory"),
)
_RENEWED = (
    *("_workers", "_index_queues", "_worker_result_queue", "_workers_done_event"),
    "_worker_init_fn",  # it refers to the memory of earlier workers
)
_READY_S, _LOOK_S = 5.0, 0.002  # until a worker has begun
_SHARE = 0.02  # of a worker's time, to look whether its data set changes itself

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_feeders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of queues of indices
_pids: set[int] = set()  # of all workers ever
_constructor: Callable[[Any, Any], None] | None = None  # of torch's iterator
_is_guarded: Callable[[], bool] = bool


def watch(is_guarded: Callable[[], bool]) -> None:
    """See iterators with workers from now on.

    ``is_guarded``: tells whether the loaders of the script are not looked at.
    """
    global _constructor, _is_guarded
    kind = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
    fetcher = getattr(fetchers, "_MapDatasetFetcher", None)
    known = all(hasattr(kind, name) for name in ("_reset", "_next_index", "_shutdown_workers"))
    if kind is None or not known or not hasattr(fetcher, "fetch"):
        return  # workers are children that nobody knows, then
    _constructor, _is_guarded = kind.__init__, is_guarded
    kind.__init__ = _begun(kind.__init__)
    kind._reset = _begun_again(kind._reset)  # noqa: SLF001  no public one
    kind._next_index = _noted(kind._next_index)  # noqa: SLF001  the same
    kind._shutdown_workers = _ended(kind._shutdown_workers)  # noqa: SLF001  the same


def _begun(start: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(start)
    def begin(iterator: Any, loader: Any) -> None:
        if _is_guarded():
            start(iterator, loader)
            return
        try:
            live = LiveWorkers(loader)
        except Exception:  # noqa: BLE001  the script must not notice; its workers are children then
            start(iterator, loader)
            return
        setattr(iterator, _NOTE, live)
        _iterators.add(iterator)
        with swapped(vars(loader), live.prologue()):
            start(iterator, loader)
        live.sees(live.started, iterator)

    return begin


def _begun_again(reset: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(reset)
    def begin(iterator: Any, *args: Any, **kwargs: Any) -> None:
        live = getattr(iterator, _NOTE, None)
        if live is not None and not kwargs.get("first_iter") and len(args) < 2:  # noqa: PLR2004
            live.sees(live.epoch_ends, iterator)
        reset(iterator, *args, **kwargs)

    return begin


def _noted(next_index: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(next_index)
    def note(iterator: Any) -> Any:
        index = next_index(iterator)
        live = getattr(iterator, _NOTE, None)
        if live is not None:
            live.sees(live.sends, iterator, index)
        return index

    return note


def _ended(shutdown: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(shutdown)
    def end(iterator: Any) -> None:
        shutdown(iterator)
        live = getattr(iterator, _NOTE, None)
        if live is not None and sys is not None:  # else Python is at its end
            live.sees(live.ended, iterator)

    return end


class LiveWorkers:
    """What is known of the workers of one iterator."""

    def __init__(self, loader: Any) -> None:
        self.why_not = why_not(loader)
        self._context = loader.multiprocessing_context or torch.multiprocessing
        self._init_fn: InitFn = loader.worker_init_fn
        self._count: int = loader.num_workers
        self._epoch = [0] * self._count  # batches that each worker was sent in earlier epochs
        self._born = [0] * self._count  # batches that each was sent before it was started
        self._states: list[bytes] = [NOTHING] * self._count  # with which each was started
        self._noted: list[bytes] = []
        self._sent: dict[int, Any] = {}  # indices, by the batch's number in the epoch
        self._first_sent = 0
        if self.why_not:
            return
        owners = dataset_owners(loader.dataset)
        self._roots: dict[str, object] = {
            "dataset": loader.dataset,
            "collate_fn": loader.collate_fn,
        }
        self._ignored = generators(owners)
        self._look = look(self._roots, self._ignored)
        self._state_bytes = state_bytes(loader.dataset)
        self._slots = (loader.prefetch_factor or 2) + 1
        self._ring = self._new_ring()
        self.notes = WorkerNotes(self._count)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the memory that the workers write; none of it is needed as it was."""
        return () if self.why_not else (self._ring.address(0, 0), self.notes.address)

    def prologue(self) -> dict[str, Any]:
        """What the loader's attributes are to be while workers are started."""
        if self.why_not:
            return {}
        return {"worker_init_fn": self._prologue()}

    def sees(self, happened: Callable[..., None], *args: Any) -> None:
        """Something has happened in the script, which must not notice what is not understood."""
        try:
            happened(*args)
        except Exception as error:  # noqa: BLE001  of another version of torch
            self.why_not = (
                f"torch {torch.__version__} has other workers of a DataLoader ({error!r})"
            )

    def started(self, iterator: Any) -> None:
        """The workers exist."""
        _pids.update(each.pid for each in iterator._workers)  # noqa: SLF001  no public one
        _feeders.update(_feeders_of(iterator))
        missing = [name for name in _OF_ITERATOR if not hasattr(iterator, name)]
        if missing and not self.why_not:
            self.why_not = f"torch {torch.__version__} lacks {missing[0]} of a DataLoader's workers"

    def sends(self, iterator: Any, index: Any) -> None:
        """The next batch is to be made of these indices."""
        self._sent[iterator._send_idx] = index  # noqa: SLF001  no public one
        while self._first_sent < iterator._rcvd_idx:  # noqa: SLF001  the same
            self._sent.pop(self._first_sent, None)
            self._first_sent += 1

    def epoch_ends(self, iterator: Any) -> None:
        """Persistent workers make all that they were sent, and begin anew."""
        for worker in range(self._count):
            self._epoch[worker] += _share(iterator._send_idx, worker, self._count)  # noqa: SLF001
        self._sent.clear()
        self._first_sent = 0

    def ended(self, iterator: Any) -> None:
        """The workers are gone; nobody waits for the ends of the threads that wrote to them."""
        _feeders.update(_feeders_of(iterator))

    def note(self, iterator: Any) -> str:
        """Note what a copy needs; why there can be none, as a part of a sentence."""
        if self.why_not:
            return self.why_not
        if changed := first_change(self._look, look(self._roots, self._ignored)):
            return f"the data set of a DataLoader was changed since its workers began ({changed})"
        noted, until = [], time.monotonic() + _READY_S
        for worker in range(self._count):
            count = self._handed_out(iterator, worker) - self._born[worker]
            while (state := self._ring.read(worker, count)) is None:
                if self._ring.made(worker) >= 0 or time.monotonic() > until:
                    return "the random numbers of a DataLoader's worker are not known"
                time.sleep(_LOOK_S)
            noted.append(state)
        if changed := self.notes.change():
            return f"a data set changes itself in a worker of a DataLoader ({changed})"
        self._noted = noted
        return ""

    def retire(self, iterator: Any) -> None:
        """In a copy: let go of the workers and queues that it lacks."""
        if iterator._worker_pids_set:  # noqa: SLF001  no public ones
            _handling()._remove_worker_pids(id(iterator))  # noqa: SLF001
        for queue in _queues(iterator):
            queue._reset(after_fork=True)  # noqa: SLF001  a thread that is not here may have had its lock
            queue._reader.close()  # noqa: SLF001
            queue._writer.close()  # noqa: SLF001
        for worker in iterator._workers:  # noqa: SLF001
            # the finalizer itself does nothing in another process
            for fd in getattr(worker._popen.finalizer, "_args", ()):  # noqa: SLF001
                with contextlib.suppress(OSError):
                    os.close(fd)

    def renew(self, iterator: Any) -> None:
        """In a copy: start workers that go on behind the batches that were handed out."""
        for worker in range(self._count):
            self._born[worker] = self._handed_out(iterator, worker)
        self._states, self._ring = self._noted, self._new_ring()
        started = self._start(iterator)
        for name in _RENEWED:
            setattr(iterator, name, getattr(started, name))
        iterator._data_queue = iterator._worker_result_queue  # noqa: SLF001  nothing is pinned
        started._shutdown = True  # noqa: SLF001  it is not the one that ends them
        _handling()._remove_worker_pids(id(started))  # noqa: SLF001
        pids = tuple(each.pid for each in iterator._workers)  # noqa: SLF001
        _handling()._set_worker_pids(id(iterator), pids)  # noqa: SLF001
        iterator._worker_pids_set = True  # noqa: SLF001
        asked = range(iterator._rcvd_idx, iterator._send_idx)  # noqa: SLF001
        for number in asked:
            worker = iterator._task_info[number][0]  # noqa: SLF001
            iterator._task_info[number] = (worker,)  # noqa: SLF001
            iterator._index_queues[worker].put((number, self._sent[number]))  # noqa: SLF001
        iterator._tasks_outstanding = len(asked)  # noqa: SLF001
        self.started(iterator)

    def _start(self, iterator: Any) -> Any:
        """Workers as torch starts them, in an iterator that nobody sees."""
        kind, seed = type(iterator), iterator._base_seed  # noqa: SLF001  no public one
        assert _constructor is not None
        space = {
            "_base_seed": property(lambda _: seed, lambda _self, _value: None),
            "_reset": lambda *_args, **_kwargs: None,  # nothing is sent yet
        }
        started: Any = object.__new__(type(kind.__name__, (kind,), space))
        told = types.SimpleNamespace(
            dataset=iterator._dataset,  # noqa: SLF001
            _dataset_kind=iterator._dataset_kind,  # noqa: SLF001
            _IterableDataset_len_called=None,
            _auto_collation=iterator._auto_collation,  # noqa: SLF001
            drop_last=iterator._drop_last,  # noqa: SLF001
            _index_sampler=(),
            num_workers=self._count,
            pin_memory=False,
            pin_memory_device="",
            timeout=iterator._timeout,  # noqa: SLF001
            collate_fn=iterator._collate_fn,  # noqa: SLF001
            generator=torch.Generator(),  # none of the script's
            persistent_workers=iterator._persistent_workers,  # noqa: SLF001
            prefetch_factor=iterator._prefetch_factor,  # noqa: SLF001
            in_order=True,
            multiprocessing_context=self._context,
            worker_init_fn=self._prologue(),
        )
        _constructor(started, told)
        return started

    def _handed_out(self, iterator: Any, worker: int) -> int:
        """How many batches of a worker were handed out since the iterator began."""
        return self._epoch[worker] + _share(iterator._rcvd_idx, worker, self._count)  # noqa: SLF001

    def _new_ring(self) -> RandomnessRing:
        return RandomnessRing(self._count, self._slots, self._state_bytes)

    def _prologue(self) -> WatchedPrologue:
        prologue = Prologue(self._init_fn, self._ring, self._states)
        return WatchedPrologue(prologue, self.notes, self._born)


class WatchedPrologue:
    """A ``worker_init_fn`` that notes what its worker makes, and whether its data set stays."""

    def __init__(self, prologue: Prologue, notes: WorkerNotes, born: list[int]) -> None:
        """``born``: the number of each worker's next batch."""
        self._prologue, self._notes, self._born = prologue, notes, tuple(born)
        self._parent = os.getpid()

    def __call__(self, worker: int) -> None:
        """Called in the worker before it makes a batch."""
        self._prologue(worker)
        info = get_worker_info()
        if info is None or os.getpid() == self._parent:
            return
        numbers = itertools.count(self._born[worker])
        changes = _Changes({"dataset": info.dataset}, generators(dataset_owners(info.dataset)))
        fetcher: Any = fetchers._MapDatasetFetcher  # noqa: SLF001  no public one
        fetch = fetcher.fetch

        @functools.wraps(fetch)
        def watched(own: Any, indices: Any) -> Any:
            number = next(numbers)
            batch = fetch(own, indices)
            if self._notes.is_other(worker, number, digest(batch)):
                raise RuntimeError(
                    f"msrun: worker {worker} of a DataLoader makes another batch than before a "
                    "rank died: it depends on something that a copy of the rank does not have, or "
                    "is random without a seed. This script cannot be protected by shadows with "
                    "num_workers > 0"
                )
            if changed := changes.found():
                self._notes.tell_change(worker, changed)
            return batch

        fetcher.fetch = watched


class _Changes:
    """Looks now and then whether something is as it was, as often as takes little time."""

    def __init__(self, roots: dict[str, object], ignored: frozenset[int]) -> None:
        self._roots, self._ignored = roots, ignored
        self._before: Look = look(roots, ignored)
        self._due_s = 0.0

    def found(self) -> str:
        began = time.monotonic()
        if began < self._due_s:
            return ""
        now = look(self._roots, self._ignored)
        self._before = with_opened(self._before, now)
        changed = first_change(self._before, now)
        took_s = time.monotonic() - began
        self._due_s = float("inf") if changed else began + took_s / _SHARE
        return changed


def why_not(loader: Any) -> str:
    """Why workers of a loader cannot be started anew, as a part of a sentence."""
    context = loader.multiprocessing_context or torch.multiprocessing
    dataset = loader.dataset
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        return "a DataLoader has workers for a data pipe of torchdata"
    if loader._dataset_kind != dataloader._DatasetKind.Map:  # noqa: SLF001  no public ones
        return (
            "a DataLoader has workers for an IterableDataset, whose place cannot be noted "
            "(num_workers=0 has none)"
        )
    if not getattr(loader, "in_order", True):
        return "a DataLoader has in_order=False: the order of its batches cannot be repeated"
    if context.get_start_method() != "fork":
        return f"workers of a DataLoader are started by {context.get_start_method()}, not by fork"
    sharing: Any = torch.multiprocessing
    if sharing.get_sharing_strategy() != "file_descriptor":
        return "workers of a DataLoader share memory by files of names (set_sharing_strategy)"
    if loader.pin_memory and torch.accelerator.is_available():
        return "a DataLoader pins memory for an accelerator"
    if "worker_init_fn" not in vars(loader):
        return f"workers of a {type(loader).__name__} are not started as torch's own"
    return ""


def note() -> str:
    """Note what a copy of this process needs for all iterators; why there can be none."""
    for iterator in _live():
        if why := getattr(iterator, _NOTE).note(iterator):
            return str(why)
    return ""


def renew() -> None:
    """In a copy that was woken: start the workers of all iterators.

    Raises:
        OSError: there can be no more processes.
    """
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # noqa: SLF001  of another process
    iterators = list(_live())
    for iterator in iterators:
        getattr(iterator, _NOTE).retire(iterator)
    for iterator in iterators:
        getattr(iterator, _NOTE).renew(iterator)


def pids() -> frozenset[int]:
    """All workers that were ever started."""
    return frozenset(_pids)


def feeders() -> frozenset[int]:
    """Identities of threads that write indices to workers: a copy makes them again."""
    for iterator in _known():
        _feeders.update(_feeders_of(iterator))
    return frozenset(map(id, _feeders))


def addresses() -> tuple[int, ...]:
    """Parts of shared memory that are made anew, or that a copy is to see as they are."""
    return tuple(each for iterator in _known() for each in getattr(iterator, _NOTE).addresses)


def descriptors() -> frozenset[int]:
    """Of connections with workers."""
    return frozenset(
        each.fileno()
        for iterator in _live()
        for queue in _queues(iterator)
        for each in (queue._reader, queue._writer)  # noqa: SLF001  no public ones
    )


def semaphores() -> frozenset[int]:
    """The addresses of those of queues and events that are made anew."""
    found = set()
    for iterator in _known():
        done = iterator._workers_done_event  # noqa: SLF001  no public one
        waiting = done._cond  # noqa: SLF001  the same
        locks = [waiting._lock, waiting._sleeping_count, waiting._woken_count]  # noqa: SLF001
        locks += [done._flag, waiting._wait_semaphore]  # noqa: SLF001
        for queue in _queues(iterator):
            locks += [queue._rlock, queue._wlock, queue._sem]  # noqa: SLF001
        found |= {int(each._semlock.handle) for each in locks}  # noqa: SLF001
    return frozenset(found)


def _known() -> Iterator[Any]:
    """Iterators that have been started, in some order that stays."""
    found = [each for each in _iterators if hasattr(each, "_workers_done_event")]
    yield from sorted(found, key=id)


def _live() -> Iterator[Any]:
    yield from (each for each in _known() if not each._shutdown)  # noqa: SLF001  no public one


def _handling() -> Any:
    """Where torch keeps the workers whose ends its handler of SIGCHLD tells."""
    return sys.modules["torch.utils.data._utils.signal_handling"]


def _queues(iterator: Any) -> Iterable[Any]:
    return (*iterator._index_queues, iterator._worker_result_queue)  # noqa: SLF001  no public ones


def _feeders_of(iterator: Any) -> Iterator[threading.Thread]:
    threads = (each._thread for each in iterator._index_queues)  # noqa: SLF001  no public one
    yield from (each for each in threads if each is not None)


def _share(batches: int, worker: int, workers: int) -> int:
    """How many of the first ``batches`` of an epoch a worker makes."""
    return (batches - worker + workers - 1) // workers
