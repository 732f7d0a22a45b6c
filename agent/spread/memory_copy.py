"""A checkpoint in memory that a node has of another one."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence

from agent.dump.beside import manifest_file
from agent.machine.file_thread import side_by_side
from agent.nodes.run_messages import Donor, TakeMemory
from agent.nodes.tls import Security
from agent.nodes.transfer import Span, close_all, fetch, memory_files, seal
from agent.spread.parts import (
    Pieces,
    digests_of,
    shared,
    size_of,
    spans_of,
    split,
    variants_of,
)
from agent.spread.room import check_room
from agent.spread.written_here import WrittenPart, WrittenStates
from worker_hooks.contract.layout import held
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import PRIVATE, REPLICATED, Shard

DONOR_S = 2.0  # until a node answers: another one may have it, too

States = dict[int, Sequence[WrittenPart]]
"""By variant files that came in the place of those of the controller's node."""


class MemoryCopy:
    """It: what was fetched of it, and what ranks of this node have written."""

    def __init__(
        self, order: TakeMemory, host: str, security: Security, written: WrittenStates
    ) -> None:
        """Fetch what of it is to be here at once.

        Args:
            order: of the controller's node.
            host: address of that.
            security: of the connections.
            written: by ranks of this node; it is this object's.

        Raises:
            OSError: it does not come, or there is no room for it.
            ValueError: the order is not to be understood.
        """
        self._files: list[int] = []
        self._described: list[int] = []  # files of the manifest
        self._written = written
        # by variant, of what was written on this node or another one
        self._states: dict[int, Sequence[WrittenPart]] = {}
        self._inodes: list[int] = []  # of each manifest the first file
        self._donated: list[int] = []  # files of these that came from other nodes
        try:
            written.keep({*written.parts} if order.heads else set())
            self._manifest = manifests.decode(order.manifest)
            self._spans = spans_of(self._manifest)
            pieces = split(self._manifest, order.heads)
            self._variants = [each.variant for each in shared(self._manifest)]
            self._later = dict(enumerate(pieces.later))  # tensors, by the number of their file
            self._absent = {self._variants[number] for number in self._later}
            self._key = bytes.fromhex(order.rest)
            self._from = host, order.port
            self._security = security
            self._donors = order.donors
            check_room(size_of(pieces.now))
            self._name = f"msrun-memory-{self._manifest.step}"
            self._files = memory_files(len(self._spans), self._name)
            self._begins = [span[:2] for span in self._spans]
            if order.key:
                fetch(*self._from, bytes.fromhex(order.key), self._here(pieces.now), security)
            else:
                self._unpack(order, pieces)
            self._use_written()
            own = {*self.absent} & {*order.own}
            self._have(own, self._bring_own(own))
            rest = self._rest_of(self._absent | self._states.keys())
            places = {self._place(*span[:2])[0] for span in rest.values()}
            seal(file for place, file in enumerate(self._files) if place not in places)
            self._describe()
        except BaseException:
            self.close()
            raise

    def _unpack(self, order: TakeMemory, pieces: Pieces) -> None:
        """Take what came with the order."""
        most = size_of(pieces.alike)
        alike = zlib.decompressobj().decompress(order.alike, most + 1)
        for spans, data in ((pieces.alike, alike), (pieces.own, order.private)):
            if len(data) != size_of(spans):
                raise ValueError(f"{len(data)} bytes came in place of {size_of(spans)}")
            at = 0
            for file, begin, nbytes in self._here(spans):
                assert nbytes is not None
                os.pwrite(file, data[at : at + nbytes], begin)
                at += nbytes

    def _use_written(self) -> None:
        """Have no tensors come that ranks here have written; free what they wrote besides."""
        found = self._written.parts
        digests = digests_of(self._manifest) if found else []
        is_of_it = self._written.step == self._manifest.step
        usable = found.keys() & digests if is_of_it else set[str]()
        files = {digest: [part.file for part in found[digest]] for digest in usable}
        self._written.keep([digest for digest in usable if _is_sealed(files[digest])])
        states = {
            variant: found[digest] for variant, digest in enumerate(digests) if digest in found
        }
        self._states |= states
        self._absent -= states.keys()

    @property
    def path(self) -> str:
        """Of its manifest, as ranks here open it."""
        return held(self._described[-1])

    @property
    def absent(self) -> tuple[int, ...]:
        """The states whose tensors have yet to come."""
        return tuple(sorted(self._absent))

    @property
    def inodes(self) -> tuple[int, ...]:
        """By which ranks know it that have it open."""
        return tuple(dict.fromkeys(self._inodes))

    def own_of(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The states that these ranks resume from."""
        return variants_of(self._manifest, ranks)

    def has(self, inode: int) -> bool:
        """Whether one of its files has this inode."""
        files = (*self._files, *self._written.files, *self._donated)
        return any(os.fstat(file).st_ino == inode for file in files)

    def opened(self) -> list[int]:
        """Its files by descriptors of their own, which whoever fills them closes.

        Raises:
            OSError: no descriptor is left.
        """
        found: list[int] = []
        try:
            found.extend(map(os.dup, self._files))
        except OSError:
            close_all(found)
            raise
        return found

    def bring(self, variants: Collection[int], files: Sequence[int]) -> None:
        """Fetch the tensors of states. In a thread: the copy may be closed meanwhile.

        They come from the controller's node, as ranks have files open that lie as these do there.

        Args:
            variants: of it, which it lacks.
            files: as :meth:`opened`.

        Raises:
            OSError: they do not come, or there is no room for them.
        """
        if not {*variants}.isdisjoint(self._manifest.absent):
            raise OSError(errno.ENODATA, "no node sends what is missing")
        rest = self._rest_of(variants)
        check_room(size_of(rest.values()))
        here = self._here(rest.values(), files)
        fetch(*self._from, self._key, here, self._security, tuple(rest))
        # here: of a large one it takes as long as a turn of the loop must not
        seal(files[self._place(*span[:2])[0]] for span in rest.values())

    def _bring_own(self, variants: Collection[int]) -> States:
        """Fetch the tensors of states, of each from the first that sends it.

        Returns:
            Those of which files have come from other nodes.

        Raises:
            OSError: they do not come, or there is no room for them.
        """
        check_room(size_of(self._rest_of(variants).values()))
        donated = {donor.variant for donor in self._donors} & {*variants}
        others = tuple(sorted({*variants} - donated))
        parts = [others] * bool(others) + [(variant,) for variant in sorted(donated)]
        found: States = {}

        def bring(number: int) -> None:
            part = parts[number]
            state = None if part is others else self._from_donors(*part)
            if state is None:
                self.bring(part, self._files)
            else:
                found[part[0]] = state

        try:
            side_by_side(bring, range(len(parts)))
        except BaseException:
            _free(found)
            raise
        return found

    def _from_donors(self, variant: int) -> Sequence[WrittenPart] | None:
        """The files of a state from other nodes that have them; ``None``: none sends them."""
        for donor in (each for each in self._donors if each.variant == variant):
            with contextlib.suppress(OSError):
                return self._from_donor(donor)
        return None

    def complete(self, variants: Collection[int]) -> None:
        """Tensors are there: whoever opens it from now on finds them.

        ``variants``: as of :meth:`bring`.

        Raises:
            OSError: no descriptor is left.
        """
        self._have(variants, {})
        self._describe()

    def _have(self, variants: Collection[int], states: States) -> None:
        """The tensors of these states are here."""
        self._donated += (part.file for parts in states.values() for part in parts)
        self._states |= states
        self._absent -= {*variants}

    def _rest_of(self, variants: Collection[int]) -> dict[int, Span]:
        known = self._later.items()
        return {number: span for number, span in known if self._variants[number] in variants}

    def _from_donor(self, donor: Donor) -> Sequence[WrittenPart]:
        """The files of a state that ranks of another node have written.

        Raises:
            OSError: they do not come.
        """
        files = memory_files(len(donor.files), self._name)
        try:
            for each, file in zip(donor.files, files, strict=True):
                span, key = Span(file, 0, each.nbytes), bytes.fromhex(each.key)
                fetch(each.host, each.port, key, [span], self._security, None, DONOR_S)
            seal(files)
        except BaseException:
            close_all(files)
            raise
        return [
            WrittenPart(each.rank, file, each.nbytes)
            for each, file in zip(donor.files, files, strict=True)
        ]

    def close(self) -> None:
        """Free the memory, once no rank has it open."""
        close_all((*self._files, *self._described, *self._donated))
        self._files, self._described, self._donated, self._inodes = [], [], [], []
        self._written.close()

    def _here(self, spans: Iterable[Span], files: Sequence[int] = ()) -> Iterator[Span]:
        """Where parts of the controller's files are here; ``files``: other numbers of the same."""
        for file, begin, nbytes in spans:
            number, at = self._place(file, begin)
            yield Span((files or self._files)[number], at, nbytes)

    def _place(self, file: int, at: int) -> tuple[int, int]:
        """Which of the files has what the controller has there, and from where on."""
        number = bisect(self._begins, (file, at)) - 1
        return number, at - self._spans[number].at

    def _describe(self) -> None:
        """Write the manifest with the numbers of this process."""
        heads = (each for each in shared(self._manifest) if each.variant in self._states)
        here_all = self._manifest._replace(
            shards=tuple(self._shards()),
            absent=self.absent,
            heads=tuple(map(self._fetched, heads)),
        )
        self._described.append(manifest_file(here_all, f"{self._name}-manifest"))
        self._inodes.append(os.fstat(int(min(here_all.shards).file)).st_ino)

    def _shards(self) -> Iterator[Shard]:
        """The files as they are here."""
        for shard in self._manifest.shards:
            if shard.kind == PRIVATE or shard.variant not in self._states:
                yield self._fetched(shard)
        for variant, parts in self._states.items():
            for rank, file, nbytes in parts:
                yield Shard(str(file), rank, REPLICATED, nbytes, "", variant)

    def _fetched(self, shard: Shard) -> Shard:
        """Where a file is here, or its header at least."""
        number, at = self._place(int(shard.file), shard.at)
        return shard._replace(file=str(self._files[number]), at=at)


def _free(states: States) -> None:
    """Free the memory of what has come."""
    close_all(part.file for parts in states.values() for part in parts)


def _is_sealed(files: Iterable[int]) -> bool:
    """Whether nobody can change them from now on."""
    try:
        seal(files)
    except OSError:  # somebody may still write to one
        return False
    return True
