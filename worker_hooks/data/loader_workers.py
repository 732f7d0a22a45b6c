"""The randomness inside a DataLoader's worker processes, from which augmentations draw.

Each worker writes its state to shared memory after every batch it makes. Workers are a few batches
ahead of the training, so there is a slot for each batch that can be under way, and the state that
is saved is that after the last batch handed out. The batches themselves are not changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import fetch as fetchers

from worker_hooks.contract.status_page import Entry
from worker_hooks.data.skip_sampler import BlankDataset
from worker_hooks.rng.generators import TWISTER_BYTES, copy
from worker_hooks.rng.randomness import NUMPY, Randomness, private_streams, process_streams

log = logging.getLogger("msrun")

WORKER = "data.worker."  # a worker's number follows

_SIZE = struct.Struct("<q")  # of the state that follows, in bytes
NOTHING = _SIZE.pack(0)
"""The state of a worker that begins as it would without us."""
_NOTHING = 0  # the worker made no batch yet: it begins as it would without us
_LOST = -1  # the worker made batches, and its state after them is unknown
_SPARE_BYTES = 8 << 10  # for generators that the script's worker_init_fn adds to the data set
_FETCHERS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")

InitFn = Callable[[int], object] | None


def can_record() -> bool:
    """Whether this version of torch makes batches in the way that we know."""
    return all(hasattr(getattr(fetchers, name, None), "fetch") for name in _FETCHERS)


def dataset_owners(dataset: object) -> dict[str, object]:
    """Where to look for generators: the data set, those inside it, and their transforms."""
    owners: dict[str, object] = {}
    name = "dataset"
    while dataset is not None and len(owners) < 16:  # noqa: PLR2004  no data set wraps itself so often
        parts = getattr(dataset, "__dict__", {})
        owners |= {name: dataset, f"{name}.transform": parts.get("transform")}
        name, dataset = f"{name}.dataset", parts.get("dataset")
    return owners


def state_bytes(dataset: object) -> int:
    """Room for the state of a worker's randomness."""
    streams = process_streams() | private_streams(dataset_owners(dataset))
    numpy = 0 if NUMPY in streams else TWISTER_BYTES  # workers always load numpy
    return Randomness(streams).nbytes + numpy + _SPARE_BYTES


class RandomnessRing:
    """Shared memory of a set of workers: for each the count of batches, and its newest states."""

    def __init__(self, workers: int, slots: int, state_bytes: int) -> None:
        """Allocate the memory.

        Args:
            workers: how many write, each to its own row.
            slots: how many of its newest states each keeps.
            state_bytes: the largest size of a state.
        """
        self._slots, self.slot_bytes = slots, _SIZE.size + state_bytes
        self._row = _SIZE.size + slots * self.slot_bytes
        self._memory = torch.zeros(workers * self._row, dtype=torch.uint8, device="cpu")
        self._memory.share_memory_()  # type: ignore[no-untyped-call]

    def made(self, worker: int) -> int:
        """How many batches the worker made; -1 before it is ready."""
        return ctypes.c_int64.from_address(self._at(worker)).value - 1

    def address(self, worker: int, count: int) -> int:
        """The address of the worker's state after its ``count``-th batch; its size comes first."""
        return self._at(worker) + _SIZE.size + count % self._slots * self.slot_bytes

    def read(self, worker: int, count: int) -> bytes | None:
        """The worker's state after its ``count``-th batch, as a :class:`Prologue` takes it.

        ``None``: it is not known, as the worker has not got that far, or it does not fit.
        """
        if self.made(worker) < count:
            return None
        address = self.address(worker, count)
        size = ctypes.c_int64.from_address(address).value
        return None if size == _LOST else ctypes.string_at(address, _SIZE.size + size)

    def write(self, worker: int, count: int, randomness: Randomness) -> None:
        """Write the state after the ``count``-th batch. Called in the worker."""
        address = self.address(worker, count)
        size = randomness.nbytes
        if _SIZE.size + size <= self.slot_bytes:
            randomness.fill(address + _SIZE.size)
        else:
            size = _LOST
        copy(address, _SIZE.pack(size), _SIZE.size)
        copy(self._at(worker), _SIZE.pack(count + 1), _SIZE.size)

    def _at(self, worker: int) -> int:
        return self._memory.data_ptr() + worker * self._row


class Prologue:
    """A ``worker_init_fn``: calls the script's own, restores the state, starts the recording."""

    def __init__(self, init_fn: InitFn, ring: RandomnessRing, states: Sequence[bytes]) -> None:
        """Prepare; the object reaches the workers by fork or by pickle."""
        self._init_fn, self._ring, self._states = init_fn, ring, tuple(states)
        self._parent = os.getpid()

    def __call__(self, worker: int) -> None:
        """Called in the worker before it makes a batch."""
        if self._init_fn is not None:
            self._init_fn(worker)
        info = get_worker_info()
        if info is None or os.getpid() == self._parent:
            return
        owners = dataset_owners(info.dataset)
        randomness = Randomness(process_streams() | private_streams(owners))
        (size,) = _SIZE.unpack_from(self._states[worker])
        if size == randomness.nbytes:
            state = self._states[worker][_SIZE.size : _SIZE.size + size]
            randomness.restore(randomness.split(state))
        elif size > 0:
            log.warning("data worker %d: its saved randomness does not fit", worker)
        count = 0

        def record() -> None:
            nonlocal count
            count += 1
            self._ring.write(worker, count, randomness)

        self._ring.write(worker, count, randomness)
        self._watch(record)

    @staticmethod
    def _watch(record: Callable[[], None]) -> None:
        """Call ``record`` after every batch, and after the attempt that finds the data's end."""
        for name in _FETCHERS:
            fetcher = getattr(fetchers, name)
            fetcher.fetch = _recorded(fetcher.fetch, record)


def _recorded(fetch: Callable[[Any, Any], Any], record: Callable[[], None]) -> Any:
    @functools.wraps(fetch)
    def fetch_and_record(fetcher: Any, indices: Any) -> Any:
        if indices is BlankDataset.BATCH:
            return None
        try:
            return fetch(fetcher, indices)
        finally:
            record()

    return fetch_and_record


class Workers:
    """What the training process knows of the randomness in its loader's workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.count = loader.num_workers
        self._prefetch = loader.prefetch_factor or 2
        self._state_bytes = state_bytes(loader.dataset)
        self._entry_bytes = _SIZE.size + self._state_bytes
        self._ring: RandomnessRing | None = None
        self._begun = [0] * self.count  # how many batches each had made when the epoch began
        self._known = self._all(_NOTHING)  # the states when the epoch began

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One tensor for each worker."""
        size = self._entry_bytes
        return tuple(Entry(f"{WORKER}{n}", "U8", (size,), size) for n in range(self.count))

    @property
    def is_lost(self) -> bool:
        """Whether the states to continue from are unknown."""
        return any(_SIZE.unpack_from(state) == (_LOST,) for state in self._known)

    def fill(self, address: int, first: int, consumed: int) -> int:
        """Write the entries: the states after batches ``first`` to ``consumed`` of the epoch."""
        for worker in range(self.count):
            handed_out = _share(consumed, worker, self.count) - _share(first, worker, self.count)
            count = self._begun[worker] + handed_out
            if not handed_out:
                copy(address, self._known[worker], self._entry_bytes)
            elif self._ring is not None and self._ring.made(worker) >= count:
                slot = self._ring.address(worker, count)
                size = ctypes.c_int64.from_address(slot).value
                copy(address, slot, _SIZE.size + max(size, 0))
            else:
                copy(address, _SIZE.pack(_LOST), _SIZE.size)
            address += self._entry_bytes
        return self.count * self._entry_bytes

    def forget(self) -> None:
        """Let the next workers begin as they would without us."""
        self._known = self._all(_NOTHING)

    def restore(self, saved: Mapping[str, bytes]) -> None:
        """Let the next workers continue from the entries that :meth:`fill` wrote."""
        states = [saved.get(entry.name, b"") for entry in self.entries]
        lost = _SIZE.pack(_LOST).ljust(self._entry_bytes, b"\0")
        self._known = [state if len(state) == len(lost) else lost for state in states]

    def prologue(self, init_fn: InitFn) -> Prologue:
        """The ``worker_init_fn`` for workers that are about to be started."""
        self._ring = RandomnessRing(self.count, self._prefetch + 1, self._state_bytes)
        self._begun = [0] * self.count
        return Prologue(init_fn, self._ring, self._known)

    def settle(self, iterator: Any) -> None:
        """Let persistent workers finish what an abandoned loop requested, and read their states.

        The loader itself does so, too, and drops these batches, when it begins the next epoch.
        """
        iterator._sampler_iter = iter(())  # noqa: SLF001  request no more
        iterator._IterableDataset_len_called = None  # noqa: SLF001  these batches do not count
        is_alive = True
        for _ in range((self._prefetch + 1) * self.count):
            is_alive = all(worker.is_alive() for worker in iterator._workers)  # noqa: SLF001
            with contextlib.suppress(Exception):  # the loader would have dropped it
                if not is_alive or next(iterator, self) is self:
                    break
        if (
            self._ring is None or not is_alive
        ):  # we did not start these workers, or the loader will fail
            self._known = self._all(_LOST)
            return
        for worker in range(self.count):
            made = self._ring.made(worker)
            if made >= 0:  # else it is still starting, and nothing was requested of it
                address = self._ring.address(worker, made)
                self._known[worker] = ctypes.string_at(address, self._entry_bytes)
                self._begun[worker] = made

    def _all(self, mark: int) -> list[bytes]:
        return [_SIZE.pack(mark).ljust(self._entry_bytes, b"\0")] * self.count


def _share(batches: int, worker: int, workers: int) -> int:
    """How many of the first ``batches`` of an epoch this worker makes."""
    return (batches - worker + workers - 1) // workers
