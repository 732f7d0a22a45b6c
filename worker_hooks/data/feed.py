"""The training data as one rank is fed with it: in the script's order, and from any place in it.

Feeding changes nothing: the batches are those of ``for batch in loader``. Little is recorded: the
randomness with which the epoch began, from which the order of the data follows, and the count of
batches handed out. To continue means to begin the epoch again with that randomness, and to skip
what was consumed: the indices of a DataLoader's sampler are drawn and dropped. Where there is no
sampler, the batches are loaded and dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from worker_hooks.contract.status_page import Entry
from worker_hooks.data.batch_replay import BatchReplay
from worker_hooks.data.loader_kind import (
    SkipMethod,
    batch_size_of,
    is_plain,
    iterator_of,
    keep_workers,
    length_of,
    load_state,
    other_loaders,
    parts_of,
    sampler_name,
    skip_method,
    state_of,
)
from worker_hooks.data.loader_workers import Workers, dataset_owners
from worker_hooks.data.set_attributes import SetAttributes
from worker_hooks.data.skip_sampler import SkippingSampler, swapped
from worker_hooks.distributed.process_group import collectives
from worker_hooks.rng.generators import copy
from worker_hooks.rng.randomness import Randomness, private_streams, process_streams

log = logging.getLogger("msrun")

LONG_S = 1.0  # skipping batches may take so long without a warning

START = "data.start."  # randomness when the epoch began
BORN = "data.born."  # randomness when the persistent workers were started
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
        feed = self._feed
        feed.consumed += 1
        if feed.is_opening:
            feed.note_opened()
        return batch

    def close(self, *, is_over: bool) -> None:
        """Hand out no more. A loop that is over, not left by an exception, will not continue."""
        self._batches = iter(())
        if is_over:
            self._feed.release()


class Feed:
    """One loader and the place in it; made once for each loader and kept over the epochs."""

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
        self.is_kept = False  # batches are kept: an exception may leave the loop, to enter it again
        self.place: tuple[int, int] | None = None  # epoch and loop that :attr:`consumed` is of
        self.owners: Callable[[], Mapping[str, object]] = dict
        """What else has random number generators, which the data may use: the script's own."""
        self._replay: BatchReplay | None = None
        self._loader: Any = loader
        self._skip_method = skip_method(loader)
        self._is_plain = self._skip_method is not SkipMethod.OWN and is_plain(loader)
        self._is_ready = False
        self._is_fresh = True  # the workers, if any, are started in this epoch
        self._opened = 0  # the batch of the epoch with which the present workers began
        self._start = self._born = b""
        self._own_state: Any = None  # that the loader was opened with, until its first batch
        self._collectives = 0  # begun before the loader was opened
        self._others: Mapping[str, DataLoader[Any]] = {}  # that keep their workers, by name
        self._set = SetAttributes({})
        self.is_opening = False  # until its first batch

    @property
    def length(self) -> int | None:
        """Batches in an epoch, if the loader knows."""
        return length_of(self._loader)

    @property
    def batch_size(self) -> int:
        """Samples in a batch."""
        return batch_size_of(self._loader)

    @property
    def is_stateful(self) -> bool:
        """Whether :meth:`meta` changes with every batch."""
        return self._skip_method is SkipMethod.OWN

    @property
    def saved_objects(self) -> list[object]:
        """The loader, if its own state is saved with its place."""
        return [self._loader] if self.is_stateful else []

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
        """Write the entries as of the last batch handed out to memory; return the count of bytes.

        Args:
            address: of the first byte.
            known: what is written there already; the caller keeps it.
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
            skips_indices = self._skip_method is SkipMethod.SAMPLER
            until = self.consumed if skips_indices else self._opened
            at += self._workers.fill(at, self._opened, until)
        return at - address

    def meta(self) -> dict[str, Any]:
        """What else to save, as JSON; constant in an epoch unless :attr:`is_stateful`."""
        found: dict[str, Any] = {}
        if self._skip_method is SkipMethod.OWN and self.consumed:
            try:
                # a loader may take up its state with its first batch only
                found["state"] = self._own_state or state_of(self._loader)
            except LookupError as error:
                log.info("%s; its consumed batches are loaded and dropped", error)
                self._skip_method = SkipMethod.LOAD
        found |= {"way": self._skip_method.value, "is_fresh": self._is_fresh}
        found["batch_size"] = self.batch_size
        if self._workers is not None:
            found["workers"] = self._workers.count
        if begun := self.begun():
            found["begun"] = begun
        if self._set.changed:
            found["set"] = self._set.changed
        return found

    def begun(self) -> list[str]:
        """The names of other loaders whose persistent workers were started.

        Each was given a seed by the process's generator then, which it does not ask for again.
        """
        pairs = self._others.items()
        return [name for name, each in pairs if iterator_of(each) is not None]

    def restore_others(self, begun: Collection[str]) -> None:
        """Let those loaders, and no others, have their workers; no random number is drawn.

        ``begun``: what :meth:`begun` returned at the commit that training continues from.
        """
        for name, loader in self._others.items():
            iterator = iterator_of(loader)
            if name in begun and iterator is None:
                before = self._streams.capture()
                iter(loader)
                self._rewind(before)
            elif name not in begun and iterator is not None:  # begun by the step that is repeated
                iterator._shutdown_workers()  # noqa: SLF001
                loader._iterator = None  # noqa: SLF001

    def begin(self, epoch: int | None) -> None:
        """Begin an epoch: tell the samplers, and keep the randomness with which it begins.

        ``epoch``: as the script counts; ``None``: the script has told the samplers itself.
        """
        self._prepare()
        for thing in {id(part): part for part in parts_of(self._loader).values()}.values():
            set_epoch = getattr(thing, "set_epoch", None)
            if epoch is not None and callable(set_epoch):
                set_epoch(epoch)
        self.consumed = self._opened = 0
        iterator = self._persistent_iterator()
        self._set.begin(is_fresh=iterator is None)
        if self._workers is not None:
            if iterator is None:
                self._workers.forget()
            else:
                self._workers.settle(iterator)
        self._is_fresh = iterator is None
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

        To continue within an epoch changes the process's own randomness: restore it afterwards. An
        epoch whose batches are all consumed is opened, too, because its workers may be persistent.

        Args:
            consumed: how many batches were handed out before.
            meta: what :meth:`meta` returned then.
            saved: what :meth:`fill` wrote then, by the entries' names; other names are ignored.
        """
        self._collectives, self.is_opening, self._own_state = collectives(), True, None
        if consumed or saved is not None:
            batches = self._reopen(consumed, meta or {}, saved or {})
        else:
            batches = self._iterator(None)
        self.consumed = consumed
        self._replay = None
        if self.is_kept:
            is_here = not (self._is_plain and self._loader.num_workers > 0)
            streams = self._streams if is_here else None
            batches = self._replay = BatchReplay(batches, consumed, streams)
        return Batches(self, batches)

    def note_opened(self) -> None:
        """A batch was handed out. If opening communicates, ranks can only open all together.

        So a survivor of a replacement must not keep its iterator: the new rank has none.
        """
        if collectives() != self._collectives:
            self._replay = None
        self.is_opening, self._own_state = False, None

    def settle(self) -> None:
        """What was handed out is committed and need not be kept."""
        if self._replay is not None:
            self._replay.settle(self.consumed)

    def open_again(self, place: tuple[int, int], consumed: int) -> Batches | None:
        """The batches from ``consumed`` on, of a loop that an exception left and that continues.

        Those since the last commit come from memory, and the loader's iterator stays, with its
        workers and what they have prefetched. The caller restores the process's randomness.

        Returns:
            ``None``: the loop cannot continue so.
        """
        replay = self._replay
        if replay is None or self.place != place or not replay.has(consumed):
            return None
        self.consumed = consumed
        return Batches(self, replay.after(consumed, self._rewind))

    def restore_script(self, saved: Mapping[str, bytes]) -> None:
        """Restore the script's own generators: of the step that was left, not of the data.

        Where a batch is handed out again, they are set to what they were when it was drawn.
        """
        self._script.restore(
            {entry.name: saved.get(NOW + entry.name, b"") for entry in self._script.entries}
        )

    def unsaved(self, is_ignored: Callable[[str], bool] = lambda _: False) -> list[str]:
        """A step is complete: sentences on what the script sets and is not saved, each once.

        ``is_ignored``: tells for a name whether the script has said that it does not matter.
        """
        return self._set.unsaved(is_ignored)

    def restore_set(self, meta: Mapping[str, Any], *, is_open: bool) -> None:
        """Set what the script had set on its data set and samplers when the loop began.

        Args:
            meta: what :meth:`meta` returned then.
            is_open: the workers have begun. Those that stay had begun in an earlier loop.
        """
        self._prepare()
        found = meta.get("set", {})
        if not is_open:
            self._set.restore(found, for_workers=self._is_persistent)
        elif self._is_persistent:
            self._set.restore_here(found)

    def release(self) -> None:
        """The loop is over: drop its iterator, as a plain loop does."""
        self._replay = None

    def _prepare(self) -> None:
        if self._is_ready:
            return
        self._is_ready = True
        loader = self._loader
        parts = parts_of(loader)
        self._set = SetAttributes(parts | dataset_owners(parts.get("dataset")))
        owners = self.owners()
        script = {**owners, **other_loaders(owners)}
        self._others = keep_workers(owners, loader)
        private = private_streams({**parts, **dataset_owners(parts.get("dataset")), **script})
        self._script = Randomness(
            {name: each for name, each in private.items() if name.startswith(tuple(script) or "\n")}
        )
        self._private = Randomness(private)
        self._streams = Randomness(process_streams() | private)
        has_workers = self._is_plain and loader.num_workers > 0
        self._is_persistent = has_workers and bool(loader.persistent_workers)
        is_recorded = has_workers and (
            self._skip_method is SkipMethod.SAMPLER or self._is_persistent
        )
        self._workers = Workers(loader) if is_recorded else None
        if has_workers and not getattr(loader, "in_order", True):
            log.warning("in_order=False: the order of the data cannot be repeated exactly")

    def _iterator(self, skipping: SkippingSampler | None) -> Any:
        loader = self._loader
        others: dict[str, Any] = {}
        if self._workers is not None and self._persistent_iterator() is None:
            others["worker_init_fn"] = self._workers.prologue(loader.worker_init_fn)
        if skipping is not None:
            others[sampler_name(loader)] = skipping
        with swapped(vars(loader) if others else {}, others):
            batches = iter(loader)
        if skipping is not None:
            batches._index_sampler = skipping.sampler  # noqa: SLF001  for later epochs
        return batches

    def _persistent_iterator(self) -> Any | None:
        """The loader's iterator if its workers outlive an epoch, and it exists."""
        return iterator_of(self._loader) if self._is_persistent else None

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
        if self._skip_method is SkipMethod.OWN and meta.get("state") is not None:
            load_state(self._loader, meta["state"])
            self._own_state = meta["state"]
            if getattr(self._loader, "num_workers", 0):
                log.warning(
                    "the loader resumes by its own state: the randomness of its workers begins anew"
                )
            return iter(self._loader)
        batches: Any = iter(self._loader)
        skipped = batches._sampler_iter if self._skip_method is SkipMethod.SAMPLER else batches  # noqa: SLF001
        early: dict[str, bytes] = {}
        _drop(skipped, consumed, self._skip_method, lambda: early.update(self._states()))
        late = self._states() if early else {}
        for name in late:  # what training drew in between is not drawn now
            if early[name] != late[name] != saved.get(name, late[name]):
                log.warning("%s serves both data and training: the data may differ", name)
        return batches

    def _reopen_workers(
        self, consumed: int, meta: Mapping[str, Any], saved: Mapping[str, bytes]
    ) -> Any:
        loader, way = self._loader, self._skip_method
        iterator = self._persistent_iterator()
        if iterator is not None:  # its workers are at another place
            iterator._shutdown_workers()  # noqa: SLF001
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
                # from the begin of the epoch, where the loader itself seeded the workers
                way = SkipMethod.LOAD
        self._rewind(self._born)
        self._opened = consumed if way is SkipMethod.SAMPLER else 0
        blanks = self._opened % loader.num_workers
        rewind = None if self._is_fresh else lambda: self._rewind(self._start)
        sampler = getattr(loader, sampler_name(loader))
        batches = self._iterator(SkippingSampler(sampler, self._opened - blanks, blanks, rewind))
        _drop(batches, blanks if way is SkipMethod.SAMPLER else consumed, way)
        return batches

    def _as_of(self, prefix: str, saved: Mapping[str, bytes]) -> bytes:
        """The states saved under a prefix; the present state where none fits."""
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
    """Skip batches, or their indices, or the blanks in their place."""
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
