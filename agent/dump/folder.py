"""A dump in a folder: written beside its final name, completed by a rename."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable

from agent.dump.target import AbandonedError, Advance
from worker_hooks.contract.atomic_file import FOLDER_MODE
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.contract.protocol import Written
from worker_hooks.storage import commit, safetensors_file
from worker_hooks.storage.checksum import Bytes
from worker_hooks.storage.manifest import DUMP_KIND, REPLICATED, Manifest, Shard


class FolderTarget:
    """One folder; the methods are those of :class:`~agent.dump.target.Target`."""

    kind = DUMP_KIND
    is_inline = False
    absent = ()

    def __init__(self, layout: DumpLayout, lineage: tuple[str, ...] = ()) -> None:
        """Nothing is made yet; ``lineage``: the runs that this one resumed."""
        self.layout = layout
        self._lineage = lineage
        self.name = str(layout.folder.parent)
        self.is_complete = False
        self._is_begun = False
        self._is_abandoned = False

    def begin(self) -> None:
        """Make the folder, without what an interrupted dump left in it."""
        self._check()
        commit.make_folder(self.layout)
        self._is_begun = True

    def place_of(self, _rank: int, _share: int = 0) -> str:
        """All ranks write into the same unfinished folder."""
        return str(self.layout.unfinished)

    def write(self, shard: Shard, head: bytes, chunks: Iterable[Bytes], advance: Advance) -> Shard:
        """Write a file durably, with its checksum."""

        def check_and_advance(nbytes: int) -> None:
            self._check()
            advance(nbytes)

        self._check()
        path = self.layout.unfinished / shard.file
        path.parent.mkdir(FOLDER_MODE, exist_ok=True)
        done = safetensors_file.write(path, head, chunks, check_and_advance)
        return shard._replace(nbytes=done.nbytes, sha256=done.sha256)

    def accept(self, written: Written, variant: int) -> Shard:
        """Look at the size only: who reads the dump compares the checksum."""
        shard = Shard(
            written.file, written.rank, REPLICATED, written.nbytes, written.sha256, variant
        )
        self.check(shard)
        return shard

    def check(self, shard: Shard) -> None:
        """Look at the size of what another node has written.

        Raises:
            OSError: it is not there, or not as long as that node says.
        """
        path = self.layout.unfinished / shard.file
        nbytes = os.lstat(path).st_size
        if nbytes != shard.nbytes:
            raise OSError(errno.EIO, f"{nbytes} bytes instead of {shard.nbytes}", str(path))

    def commit(self, manifest: Manifest) -> str:
        """Write the manifest, then rename the folder; a node that was cut off may come second."""
        self._check()
        manifest = manifest._replace(lineage=self._lineage)
        folder, _ = commit.complete(self.layout, manifest, self._lineage)
        self.is_complete = True
        return str(folder)

    def abandon(self) -> None:
        """Let nothing more be written."""
        self._is_abandoned = True

    def remove(self) -> None:
        """Remove the unfinished folder, if this dump made it."""
        if self._is_begun:
            shutil.rmtree(self.layout.unfinished, ignore_errors=True)

    def close(self) -> None:
        """A folder holds nothing open."""

    def _check(self) -> None:
        if self._is_abandoned:
            raise AbandonedError
