"""A checkpoint in memory from which all ranks restart, while it is written to a folder."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from weakref import finalize

from agent.dump.flush import write_files
from agent.dump.folder import FolderTarget
from agent.dump.target import Advance, SavedDump
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import held
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import Manifest
from worker_hooks.storage.memory_dump import HERE, HeldDump

LOOK_S = 0.2  # how often the end of the job looks whether it moves


def manifest_file(manifest: Manifest, name: str) -> int:
    """A file in memory with the manifest of one whose files this process has open.

    Raises:
        OSError: no descriptor or no memory is left.
    """
    made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(made, manifests.encode(manifest, is_for_people=False))
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(made)
        raise
    return made


class WrittenBeside:
    """One checkpoint that is being written so; it holds its files until :meth:`close`."""

    def __init__(self, manifest: Manifest, targets: Sequence[FolderTarget]) -> None:
        """Hold the files; the memory that they come from may be closed.

        Args:
            manifest: of files that this process has open.
            targets: the folders that may take it, the first that can does.

        Raises:
            OSError: no descriptor is left.
        """
        self._held = HeldDump(HERE, manifest)
        self._targets = targets
        file = manifest_file(self._held.manifest, f"msrun-memory-{manifest.step}-manifest")
        self._close_file = finalize(self, os.close, file)
        self._moved_s = time.monotonic()
        self._ended = threading.Event()
        self.step = manifest.step
        self.path = held(file)
        """Of its manifest in memory, for ranks."""
        self.folder = str(targets[0].layout.folder)
        """In which it will be, unless that fails."""
        self.trouble = ""
        """Why it is not there, but in the next folder, or nowhere."""
        self.is_on_disk = False
        """As its thread knows; the following as the loop has heard."""
        self.is_written = False
        self.is_lost = False
        """No folder can take it."""
        self.is_read = False
        """By all ranks."""

    def write(self, advance: Advance) -> SavedDump:
        """Write it, with checksums; called in a thread.

        Raises:
            OSError: no folder can take it.
        """
        try:
            for target in self._targets:
                try:
                    return self._write(target, advance)
                except OSError as error:
                    self.trouble = describe_os_error(error)
                    target.abandon()
                    target.remove()
            raise OSError(self.trouble)
        finally:
            self._ended.set()

    def _write(self, target: FolderTarget, advance: Advance) -> SavedDump:
        def moved(nbytes: int) -> None:
            self._moved_s = time.monotonic()
            advance(nbytes)

        target.begin()
        about = self._held.on_disk(target.kind, write_files(self._held, target, moved))
        saved = SavedDump.at(target.commit(about), about)
        self.is_on_disk = True
        return saved

    @property
    def has_ended(self) -> bool:
        """Whether nothing is written any more."""
        return self._ended.is_set()

    def await_end(self, stall_s: float) -> None:
        """Wait until it is written or not, but no longer than ``stall_s`` without progress."""
        while not self._ended.wait(LOOK_S):
            if time.monotonic() - self._moved_s > stall_s:
                self.trouble = f"{self.folder} takes nothing more"
                return

    def close(self) -> None:
        """Nobody needs it in memory any more."""
        self._held.close()
        self._close_file()


class RestartMemory:
    """What ranks restart from in memory while it is being written, and what they did earlier."""

    def __init__(self) -> None:
        """There is nothing."""
        self._newest: WrittenBeside | None = None
        self._earlier: list[WrittenBeside] = []  # not written yet

    def begin(self, one: WrittenBeside) -> None:
        """Ranks restart from this one."""
        if self._newest is not None:
            self._earlier.append(self._newest)  # it may still be being written
        self._newest = one
        self.free()

    def path_of(self, folder: str) -> str:
        """Where ranks that resume from this folder find what is to be in it; empty: there."""
        newest = self._newest
        if newest is None or newest.folder != folder or newest.is_written:
            self.all_joined()  # nobody looks for it in memory
            return ""
        newest.is_read = False
        return newest.path

    def all_joined(self) -> None:
        """No rank looks for what is in memory any more: all have opened it."""
        if self._newest is not None:
            self._newest.is_read = True
        self.free()

    def free(self) -> None:
        """Free what is on the disk, and what all ranks have."""
        for one in [one for one in self._earlier if one.is_written or one.is_lost]:
            self._earlier.remove(one)
            one.close()
        newest = self._newest
        if newest is not None and newest.is_written and newest.is_read:
            self._newest = None
            newest.close()

    def close(self, say: Callable[[str], None], stall_s: float) -> None:
        """The job is over: what is being written gets the time for it.

        ``stall_s``: how long it may stand still.
        """
        for one in (*self._earlier, *filter(None, (self._newest,))):
            if not one.has_ended:
                say(f"step {one.step} is being saved in {one.folder}")
                one.await_end(stall_s)
            if not (one.is_on_disk or one.is_lost):
                say(f"step {one.step} is not saved: {one.trouble}")
            if one.has_ended:
                one.close()
        self._earlier, self._newest = [], None
