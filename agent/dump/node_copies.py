"""Copies of the state on several nodes: each agent has those of its own ranks in its memory.

When a copy is taken, whether it is complete, and which one is saved, is known on the controller's
node alone. To save it each node writes its ranks' files to the folder, which all nodes share; the
controller's node completes that. So no state travels but to the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agent.dump.copy_files import CopyFiles
from agent.dump.flush import Written, write_files
from agent.dump.folder import FolderTarget
from agent.dump.target import LostStateError
from agent.machine.file_thread import FileThread
from agent.nodes.run_messages import CopyProgressed, CopyWritten, WriteCopy
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.durable_file import ThrottledProgress
from worker_hooks.storage.memory_dump import HERE, HeldDump

UNKNOWN = "this node has no such copy"


class _Gathering(NamedTuple):
    """A copy that other nodes are writing."""

    dump_id: int
    folder: str
    done: Callable[[Written], None]
    awaited: set[int]  # nodes


class CopyGatherer:
    """The controller's node: waits until other nodes have written their part of a copy."""

    def __init__(self) -> None:
        self._present: _Gathering | None = None
        self._shards: list[manifests.Shard] = []

    def begin(
        self, dump_id: int, folder: str, nodes: Iterable[int], done: Callable[[Written], None]
    ) -> None:
        """These nodes are to write to the folder; ``done`` takes the result, once."""
        self._present, self._shards = _Gathering(dump_id, folder, done, set(nodes)), []

    def hear(self, node: int, answer: CopyWritten) -> None:
        """A node has written its part, or has not."""
        present = self._present
        if present is None or node not in present.awaited:
            return
        if (answer.dump_id, answer.folder) != (present.dump_id, present.folder):  # one before it
            return
        if answer.why_not:
            kind = OSError if answer.is_place else LostStateError
            self._end(kind(answer.why_not))
            return
        try:
            self._shards += manifests.decode(answer.manifest).shards
        except ValueError as error:
            self._end(LostStateError(f"what node {node} has written is not known: {error}"))
            return
        present.awaited.discard(node)
        if not present.awaited:
            self._end(tuple(self._shards))

    def lose(self, node: int, why: str) -> None:
        """A node is gone."""
        if self._present is not None and node in self._present.awaited:
            self._end(LostStateError(f"{why}, and with it what its ranks had copied"))

    def _end(self, result: Written) -> None:
        assert self._present is not None
        done, self._present = self._present.done, None
        done(result)


class NodeCopies:
    """Another node: keeps what its ranks have copied, and writes it to a folder when told to."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """``ranks``: of this node."""
        self._files = CopyFiles(ranks)

    def placed(
        self, rank: int, attempt: int, order: protocol.Copy
    ) -> protocol.Copy | protocol.Copied:
        """The order with the paths of the rank's files, or the answer that there can be none."""
        try:
            return self._files.placed(rank, order)
        except OSError:
            why = "the agent of its node has no descriptor left"
            return protocol.Copied(
                rank, attempt, order.step, why_not=why, is_final=True, files=order.files
            )

    def why_unsound(self, answer: protocol.Copied) -> str:
        """Why a rank cannot have written what it says; empty: it may have."""
        return self._files.why_unsound(answer)

    def write(
        self,
        order: WriteCopy,
        thread: FileThread,
        tell: Callable[[CopyProgressed | CopyWritten], None],
    ) -> None:
        """Write what the ranks have copied; does not wait.

        ``tell``: takes signs of progress, and the answer.
        """
        answer = CopyWritten(order.dump_id, order.folder)
        try:
            manifest = manifests.decode(order.manifest)
            shards = self._files.found(order.files, manifest.shards)
            dump = HeldDump(HERE, manifest._replace(shards=shards))
        except KeyError:
            tell(answer._replace(why_not=UNKNOWN))
            return
        except OSError as error:
            tell(answer._replace(why_not=describe_os_error(error)))
            return
        target = FolderTarget(DumpLayout(Path(order.folder), manifest.record_id))
        progress = ThrottledProgress(lambda _: thread.tell(tell, CopyProgressed(order.dump_id)))

        def told(written: Written) -> None:
            dump.close()
            if not isinstance(written, Exception):
                about = dump.on_disk(target.kind, written)
                tell(answer._replace(manifest=manifests.encode(about).decode()))
            elif isinstance(written, OSError):
                tell(answer._replace(why_not=describe_os_error(written), is_place=True))
            else:
                tell(answer._replace(why_not=repr(written)))

        thread.continue_in_new_thread()  # the disk of an earlier job may be slow
        thread.do(partial(write_files, dump, target, progress), told)

    def close(self) -> None:
        """Free the memory; what is being written holds its files."""
        self._files.close()
