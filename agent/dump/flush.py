"""A dump on its way from the agent's memory to another place. All of it is file work.

Nobody but the agent is needed for it: the ranks that wrote the dump may be gone.
"""

from __future__ import annotations

from agent.dump.target import Advance, SavedDump, Target
from agent.records.file_thread import side_by_side
from worker_hooks.storage.manifest import Manifest, Shard
from worker_hooks.storage.memory_dump import HERE, HeldDump


class MemoryFlush:
    """One dump in memory, and the place it goes to."""

    def __init__(self, manifest: Manifest, target: Target) -> None:
        """Hold the files until :meth:`write` ends; the memory may be closed meanwhile.

        Raises:
            OSError: no descriptor is left.
        """
        self._held = HeldDump(HERE, manifest)
        self._target = target

    def write(self, advance: Advance) -> SavedDump:
        """Copy every file, then complete the dump.

        Raises:
            OSError: the place cannot be written to.
            AbandonedError: the dump was abandoned.
        """
        copied: dict[int, Shard] = {}

        def copy(number: int) -> None:
            copied[number] = self._target.write(*self._held.file(number), advance)

        try:
            self._target.begin()
            side_by_side(copy, range(len(self._held.manifest.shards)))
        finally:
            self._held.close()
        about = self._held.on_disk(self._target.kind, copied.values())
        return SavedDump.at(self._target.commit(about), about)
