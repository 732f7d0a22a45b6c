"""The training data as one rank is fed with it: in the script's order, and from any place in it.

Feeding changes nothing: the batches are those of ``for batch in loader``. What is noted beside it
is little: the randomness as the epoch began, from which the order of the data follows, and how
many batches were handed out. Going on means to begin the epoch again with that randomness, without
loading what was consumed: a DataLoader's sampler is asked for the indices and they are dropped.
Where there is no sampler to ask, the batches are loaded and dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from worker_hooks.contract.status_page import Entry
from worker_hooks.data.batch_replay import BatchReplay
from worker_hooks.data.loader_kind import (
    SkipMethod,
    batch_size_of,
    is_plain,
    length_of,
    load_state,
    parts_of,
    sampler_name,
    state_of,
    way_of,
)
from worker_hooks.data.loader_workers import Workers, dataset_owners
from worker_hooks.data.skip_sampler import SkippingSampler, swapped
from worker_hooks.rng.generators import copy
from worker_hooks.rng.randomness import Randomness, private_streams, process_streams

log = logging.getLogger("msrun")

LONG_S = 1.0  # what passing over batches may take without a warning

START = "data.start."  # randomness as the epoch began
BORN = "data.born."  # randomness as the persistent workers were made
NOW = "data.now."  # generators that belong to the loader, its samplers and its data set


class Batches:
    """The batches of one loop. Closing ends the loader's workers, as leaving a plain loop does."""

    def __init__(self, feed: Feed, batches: Iterator[Any]) -> None:
        self._feed = feed
        self._batches = batches

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._feed.consumed += 1
        return batch

    def close(self, *, is_over: bool) -> None:
        """Hand out no more; a loop that is over, not left by an exception, will not go on."""
        self._batches = iter(())
        if is_over:
            self._feed.let_go()


class Feed:
    """One loader and the place in it; made once for a loader and kept over the epochs."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Take a DataLoader or anything else that can be iterated over.

        Raises:
            TypeError: it cannot.
        """
        if not callable(getattr(type(loader), "__iter__", None)) and not hasattr(
            type(loader), "__getitem__"
        ):
            raise TypeError(
                f"batches() takes something to iterate over, such as a DataLoader, "
                f"not {type(loader).__name__}"
            )
        self.consumed = 0  # batches of this epoch that were handed out
        self.is_kept = False  # by an exception that leaves the loop; it may be entered again
        self.place: tuple[int, int] | None = None  # epoch and loop that :attr:`consumed` is of
        self._again: BatchReplay | None = None
        self._loader: Any = loader
        self._way = way_of(loader)
        self._is_plain = self._way is not SkipMethod.OWN and is_plain(loader)
        self._is_ready = False
        self._is_fresh = True  # the workers, if there are any, are made at this epoch's begin
        self._opened = 0  # the batch of the epoch that the present workers began with
        self._start = self._born = b""

    @property
    def length(self) -> int | None:
        """Batches an epoch, if the loader knows."""
        return length_of(self._loader)

    @property
    def batch_size(self) -> int:
        """Samples a batch."""
        return batch_size_of(self._loader)

    @property
    def is_stateful(self) -> bool:
        """Whether :meth:`meta` changes with every batch."""
        return self._way is SkipMethod.OWN

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What :meth:`fill` writes; never changes."""
        self._prepare()
        started, now = self._streams.entries, self._private.entries
        found = [entry._replace(name=START + entry.name) for entry in started]
        if self._is_persistent:
            found += [entry._replace(name=BORN + entry.name) for entry in started]
        found += [entry._replace(name=NOW + entry.name) for entry in now]
        return (*found, *(self._workers.entries if self._workers is not None else ()))

    def fill(self, address: int, known: dict[str, bytes] | None = None) -> int:
        """Write the entries as of the batch handed out last to memory; how many bytes that were.

        Args:
            address: of the first byte.
            known: what was written there before and need not be again; kept by the caller.
        """
        known, at = {} if known is None else known, address
        if known.get(START) is not self._start:
            copy(at, self._start, self._streams.nbytes)
            known[START] = self._start
        at += self._streams.nbytes
        if self._is_persistent:
            if known.get(BORN) is not self._born:
                copy(at, self._born, self._streams.nbytes)
                known[BORN] = self._born
            at += self._streams.nbytes
        if self._private.nbytes:
            at += self._private.fill(at)
        if self._workers is not None:
            is_asked = self._way is SkipMethod.SAMPLER
            until = self.consumed if is_asked else self._opened
            at += self._workers.fill(at, self._opened, until)
        return at - address

    def meta(self) -> dict[str, Any]:
        """What else to save, as JSON: constant for an epoch unless :attr:`is_stateful`."""
        found: dict[str, Any] = {"way": self._way.value, "is_fresh": self._is_fresh}
        found["batch_size"] = self.batch_size
        if self._workers is not None:
            found["workers"] = self._workers.count
        if self._way is SkipMethod.OWN and self.consumed:
            found["state"] = state_of(self._loader)
        return found

    def begin(self, epoch: int | None) -> None:
        """An epoch begins: tell the samplers, and note the randomness it begins with.

        Args:
            epoch: as the script counts; ``None``: it has told the samplers itself.
        """
        self._prepare()
        for thing in {id(part): part for part in parts_of(self._loader).values()}.values():
            set_epoch = getattr(thing, "set_epoch", None)
            if epoch is not None and callable(set_epoch):
                set_epoch(epoch)
        self.consumed = self._opened = 0
        living = self._living()
        if self._workers is not None:
            if living is None:
                self._workers.forget()
            else:
                self._workers.settle(living)
        self._is_fresh = living is None
        self._start = self._streams.capture()
        if self._is_fresh:
            self._born = self._start

    def open(
        self,
        consumed: int = 0,
        meta: Mapping[str, Any] | None = None,
        saved: Mapping[str, bytes] | None = None,
    ) -> Batches:
        """The batches of the epoch that began, from any place in it.

        Going on leaves the process's own randomness anywhere: restore it behind this call. An
        epoch that is consumed whole is opened like any other, since its workers may live on.

        Args:
            consumed: so many batches were handed out before.
            meta: what :meth:`meta` said then.
            saved: what :meth:`fill` wrote then, by the entries' names; others are ignored.
        """
        if consumed or saved is not None:
            batches = self._reopen(consumed, meta or {}, saved or {})
        else:
            batches = self._iterator(None)
        self.consumed = consumed
        self._again = None
        if self.is_kept:
            is_here = not (self._is_plain and self._loader.num_workers > 0)
            streams = self._streams if is_here else None
            batches = self._again = BatchReplay(batches, consumed, streams)
        return Batches(self, batches)

    def settle(self) -> None:
        """What was handed out is committed: nobody will want it again."""
        if self._again is not None:
            self._again.settle(self.consumed)

    def open_again(self, place: tuple[int, int], consumed: int) -> Batches | None:
        """The batches from ``consumed`` on, of a loop that an exception left and that goes on.

        Those since the last commit are handed out from memory, and the loader's iterator, with its
        workers and all that they have loaded ahead, lives on. The process's randomness is the
        caller's to restore.

        Returns:
            ``None``: that place is not to be had so.
        """
        again = self._again
        if again is None or self.place != place or not again.has(consumed):
            return None
        self.consumed = consumed
        return Batches(self, again.behind(consumed, self._rewind))

    def let_go(self) -> None:
        """The loop is over: its iterator ends, as that of a plain loop does."""
        self._again = None

    def _prepare(self) -> None:
        if self._is_ready:
            return
        self._is_ready = True
        loader = self._loader
        parts = parts_of(loader)
        private = private_streams(parts | dataset_owners(parts.get("dataset")))
        self._private = Randomness(private)
        self._streams = Randomness(process_streams() | private)
        has_workers = self._is_plain and loader.num_workers > 0
        self._is_persistent = has_workers and bool(loader.persistent_workers)
        is_recorded = has_workers and (self._way is SkipMethod.SAMPLER or self._is_persistent)
        self._workers = Workers(loader) if is_recorded else None
        if has_workers and not getattr(loader, "in_order", True):
            log.warning("in_order=False: the order of the data cannot be repeated exactly")

    def _iterator(self, skipping: SkippingSampler | None) -> Any:
        loader = self._loader
        others: dict[str, Any] = {}
        if self._workers is not None and self._living() is None:
            others["worker_init_fn"] = self._workers.prologue(loader.worker_init_fn)
        if skipping is not None:
            others[sampler_name(loader)] = skipping
        with swapped(vars(loader) if others else {}, others):
            batches = iter(loader)
        if skipping is not None:
            batches._index_sampler = skipping.sampler  # noqa: SLF001  for its later epochs
        return batches

    def _living(self) -> Any | None:
        """The loader's iterator whose workers outlive an epoch, if there is one."""
        return self._loader._iterator if self._is_persistent else None  # noqa: SLF001

    def _reopen(
        self, consumed: int, meta: Mapping[str, Any], saved: Mapping[str, bytes]
    ) -> Iterator[Any]:
        self._is_fresh = not self._is_persistent or bool(meta.get("is_fresh", True))
        self._start = self._as_of(START, saved)
        self._born = self._start if self._is_fresh else self._as_of(BORN, saved)
        batches: Iterator[Any]
        if self._is_plain and self._loader.num_workers > 0:
            batches = self._reopen_workers(consumed, meta, saved)
        else:
            self._rewind(self._start)
            batches = self._reopen_here(consumed, meta, saved)
        if saved:
            names = [entry.name for entry in self._private.entries]
            self._private.restore({name: saved.get(NOW + name, b"") for name in names})
        return batches

    def _reopen_here(
        self, consumed: int, meta: Mapping[str, Any], saved: Mapping[str, bytes]
    ) -> Any:
        if self._way is SkipMethod.OWN and meta.get("state") is not None:
            load_state(self._loader, meta["state"])
            if getattr(self._loader, "num_workers", 0):
                log.warning("the loader goes on by itself: what its workers draw begins anew")
            return iter(self._loader)
        batches: Any = iter(self._loader)
        skipped = batches._sampler_iter if self._way is SkipMethod.SAMPLER else batches  # noqa: SLF001
        early: dict[str, bytes] = {}
        _drop(skipped, consumed, self._way, lambda: early.update(self._states()))
        late = self._states() if early else {}
        for name in late:  # what training draws in between is not drawn now
            if early[name] != late[name] != saved.get(name, late[name]):
                log.warning("%s feeds data and training by turns: the data may differ", name)
        return batches

    def _reopen_workers(
        self, consumed: int, meta: Mapping[str, Any], saved: Mapping[str, bytes]
    ) -> Any:
        loader, way = self._loader, self._way
        living = self._living()
        if living is not None:  # its workers stand somewhere else
            living._shutdown_workers()  # noqa: SLF001
            loader._iterator = None  # noqa: SLF001
        if self._workers is not None:
            self._workers.restore(saved)
            if meta.get("workers") != self._workers.count:
                log.warning("another number of data workers: their randomness begins anew")
                self._workers.forget()
            elif self._workers.is_lost:
                if not self._is_fresh:
                    log.warning("the randomness of the data workers is lost: it begins anew")
                self._workers.forget()
                way = (
                    SkipMethod.LOAD
                )  # from the epoch's begin, where they had the loader's own seeds
        self._rewind(self._born)
        self._opened = consumed if way is SkipMethod.SAMPLER else 0
        blanks = self._opened % loader.num_workers
        rewind = None if self._is_fresh else lambda: self._rewind(self._start)
        sampler = getattr(loader, sampler_name(loader))
        batches = self._iterator(SkippingSampler(sampler, self._opened - blanks, blanks, rewind))
        _drop(batches, blanks if way is SkipMethod.SAMPLER else consumed, way)
        return batches

    def _as_of(self, prefix: str, saved: Mapping[str, bytes]) -> bytes:
        """States saved under a prefix; those of now where there is none that fits."""
        now = self._streams.split(self._start)
        found = {name: saved.get(prefix + name, b"") for name in now}
        return b"".join(
            found[name] if len(found[name]) == len(now[name]) else now[name] for name in now
        )

    def _states(self) -> dict[str, bytes]:
        return self._streams.split(self._streams.capture())

    def _rewind(self, state: bytes) -> None:
        self._streams.restore(self._streams.split(state))


def _drop(
    batches: Iterator[Any],
    count: int,
    way: SkipMethod,
    after_first: Callable[[], None] = lambda: None,
) -> None:
    """Pass over batches, or their indices, or blanks in their place."""
    began = time.monotonic()
    for number in range(count):
        if next(batches, batches) is batches:
            log.warning("the data ended after %d of %d consumed batches", number, count)
            break
        if number == 0:
            after_first()
    if count and way is not SkipMethod.SAMPLER:
        took_s = time.monotonic() - began
        level = logging.WARNING if took_s > LONG_S else logging.INFO
        log.log(level, "%d consumed batches were loaded and dropped in %.1f s", count, took_s)
