"""A dump on its way from the agent's memory to a folder. All of it is file work.

Nobody but the agent is needed for it: the ranks that wrote the dump may be gone. Files that are in
the memory of other nodes' agents are written by these, at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent.dump.folder import FolderTarget
from agent.dump.target import Advance, SavedDump
from agent.machine.file_thread import side_by_side
from worker_hooks.storage.manifest import PRIVATE, Manifest, Shard
from worker_hooks.storage.memory_dump import HERE, HeldDump

Do = Callable[[Callable[[], Any], Callable[[Any], object]], object]
"""Does file work in a thread, and hands its result, or its exception, on in the loop."""

Written = tuple[Shard, ...] | Exception
Elsewhere = Callable[[Callable[[Written], None]], None]
"""Has other nodes write their files; takes what takes these, or why they are not written."""


class MemoryFlush:
    """One dump in memory, and the folder it goes to."""

    def __init__(
        self, manifest: Manifest, target: FolderTarget, elsewhere: Elsewhere | None = None
    ) -> None:
        """Hold the files until they are written; the memory may be closed meanwhile.

        Raises:
            OSError: no descriptor is left.
        """
        self._held = HeldDump(HERE, _of_here(manifest))
        self._target = target
        self._elsewhere = elsewhere
        self._far: tuple[Shard, ...] | None = () if elsewhere is None else None
        self._near: tuple[Shard, ...] | None = None
        self._is_over = False

    def start(
        self, do: Do, advance: Advance, done: Callable[[SavedDump | Exception], None]
    ) -> None:
        """Copy every file, then complete the dump; does not wait.

        ``done``: takes the result, once: OSError if the place cannot be written to.
        """
        self._do, self._advance, self._done = do, advance, done
        do(self._target.begin, self._on_begun)

    def _on_begun(self, failure: Exception | None) -> None:
        if failure is not None:
            self._held.close()
            self._end(failure)
            return
        self._do(lambda: write_files(self._held, self._target, self._advance), self._on_near)
        if self._elsewhere is not None:
            self._elsewhere(self._on_far)

    def _on_near(self, written: Written) -> None:
        self._held.close()  # not before: the thread reads these files
        if isinstance(written, Exception):
            self._end(written)
        else:
            self._near = written
            self._complete()

    def _on_far(self, written: Written) -> None:
        if isinstance(written, Exception):
            self._end(written)
        else:
            self._far = written
            self._complete()

    def _complete(self) -> None:
        near, far = self._near, self._far
        if near is None or far is None or self._is_over:
            return

        def complete() -> SavedDump:
            for shard in far:
                self._target.check(shard)
            about = self._held.on_disk(self._target.kind, (*near, *far))
            return SavedDump.at(self._target.commit(about), about)

        self._do(complete, self._end)

    def _end(self, result: SavedDump | Exception) -> None:
        if not self._is_over:
            self._is_over = True
            self._done(result)


def _of_here(manifest: Manifest) -> Manifest:
    """Without the states of which other nodes have all but the headers."""
    shards = (
        shard
        for shard in manifest.shards
        if shard.kind == PRIVATE or shard.variant not in manifest.absent
    )
    return manifest._replace(shards=tuple(shards), absent=())


def write_files(held: HeldDump, target: FolderTarget, advance: Advance) -> tuple[Shard, ...]:
    """Copy every file of a dump that is held: what they are at their new place.

    Raises:
        OSError: the place cannot be written to.
        AbandonedError: the dump was abandoned.
    """
    copied: dict[int, Shard] = {}

    def copy(number: int) -> None:
        copied[number] = target.write(*held.file(number), advance)

    side_by_side(copy, range(len(held.manifest.shards)))
    return tuple(copied.values())
