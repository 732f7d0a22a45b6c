"""A checkpoint in memory that a node has of another one."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence

from agent.dump.beside import manifest_file
from agent.nodes.run_messages import TakeMemory
from agent.nodes.tls import Security
from agent.nodes.transfer import Span, close_all, fetch, memory_files, seal
from agent.spread.parts import digests_of, shared, spans_of, split
from agent.spread.room import check_room
from agent.spread.written_here import WrittenPart, WrittenStates
from worker_hooks.contract.layout import held
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import PRIVATE, REPLICATED, Shard


class MemoryCopy:
    """It: what was fetched of it, and what ranks of this node have written."""

    def __init__(
        self, order: TakeMemory, host: str, security: Security, written: WrittenStates
    ) -> None:
        """Fetch what of it is not here.

        Args:
            order: of the controller's node.
            host: address of that.
            security: of the connection to it.
            written: by ranks of this node; it is this object's.

        Raises:
            OSError: it does not come, or there is no room for it.
            ValueError: the order is not to be understood.
        """
        self._files: list[int] = []
        self._described: list[int] = []  # files of the manifest
        self._written = written
        self._states: dict[int, Sequence[WrittenPart]] = {}  # by variant, of what was written
        try:
            written.keep({*written.parts} if order.heads else set())
            self._manifest = manifests.decode(order.manifest)
            self._spans = spans_of(self._manifest)
            now, later = self._spans, list[Span]()
            if order.heads:
                now, later = split(self._manifest, order.heads)
            self._rest = dict(enumerate(later))  # by the number of its file
            self._key = bytes.fromhex(order.rest)
            self._from = host, order.port, security
            check_room(_size(now))
            name = f"msrun-memory-{self._manifest.step}"
            self._files = memory_files([span.nbytes or 0 for span in self._spans], name)
            self._begins = [span[:2] for span in self._spans]
            fetch(host, order.port, bytes.fromhex(order.key), self._here(now), security)
            self._use_written()
            if order.is_whole and self._rest:
                self._bring(self._files)
                self._rest = {}
            if not self._rest:
                seal(self._files)
            self._describe()
        except BaseException:
            self.close()
            raise

    def _use_written(self) -> None:
        """Have no tensors come that ranks here have written; free what they wrote besides."""
        found = self._written.parts
        digests = digests_of(self._manifest) if found else []
        is_of_it = self._written.step == self._manifest.step
        usable = found.keys() & digests if is_of_it else set[str]()
        files = {digest: [part.file for part in found[digest]] for digest in usable}
        self._written.keep([digest for digest in usable if _is_sealed(files[digest])])
        for number, shard in enumerate(shared(self._manifest)) if found else ():
            digest = digests[shard.variant] if shard.variant < len(digests) else ""
            if digest in found:
                self._states[shard.variant] = found[digest]
                del self._rest[number]

    @property
    def path(self) -> str:
        """Of its manifest, as ranks here open it."""
        return held(self._described[-1])

    @property
    def is_partial(self) -> bool:
        """Whether the tensors have yet to come."""
        return bool(self._rest)

    def has(self, inode: int) -> bool:
        """Whether one of its files has this inode."""
        return any(os.fstat(file).st_ino == inode for file in (*self._files, *self._written.files))

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

    def bring(self, files: Sequence[int]) -> None:
        """Fetch the tensors. In a thread: the copy may be closed meanwhile.

        ``files``: as :meth:`opened`.

        Raises:
            OSError: they do not come, or there is no room for them.
        """
        self._bring(files)
        seal(files)  # here: of a large one it takes as long as a turn of the loop must not

    def _bring(self, files: Sequence[int]) -> None:
        spans = tuple(self._rest.values())
        check_room(_size(spans))
        host, port, security = self._from
        fetch(host, port, self._key, self._here(spans, files), security, tuple(self._rest))

    def complete(self) -> None:
        """They are there: whoever opens it from now on finds all of it.

        Raises:
            OSError: no descriptor is left.
        """
        self._rest = {}
        self._describe()

    def close(self) -> None:
        """Free the memory, once no rank has it open."""
        close_all((*self._files, *self._described))
        self._files, self._described = [], []
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
            is_partial=self.is_partial,
            heads=tuple(map(self._fetched, heads)),
        )
        name = f"msrun-memory-{self._manifest.step}-manifest"
        self._described.append(manifest_file(here_all, name))

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


def _size(spans: Iterable[Span]) -> int:
    """How many bytes they have."""
    return sum(span.nbytes or 0 for span in spans)


def _is_sealed(files: Iterable[int]) -> bool:
    """Whether nobody can change them from now on."""
    try:
        seal(files)
    except OSError:  # somebody may still write to one
        return False
    return True
