"""Checkpoints in memory on several nodes: the controller's sends them, the others keep them."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent.dump.room import SPARE, shortage
from agent.nodes.run_messages import MemoryTaken, TakeMemory
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import MemoryServer, Progress, fetch
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import held
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import Manifest

CallSoon = Callable[..., object]
"""The loop's method that another thread may call."""


class _Spreading(NamedTuple):
    """A checkpoint that is on its way to other nodes."""

    path: str
    server: MemoryServer
    done: Callable[[str], None]
    awaited: set[int]  # nodes


class MemorySender:
    """The controller's node: a checkpoint in memory goes to the other nodes."""

    def __init__(
        self, call_soon: CallSoon, progressed: Callable[[int], None], security: Security = PLAIN
    ) -> None:
        """Send nothing yet.

        Args:
            call_soon: the loop's method that another thread may call.
            progressed: takes the dump's id as bytes leave.
            security: of connections between nodes.
        """
        self._security = security
        self._call_soon = call_soon
        self._progressed = progressed
        self._present: _Spreading | None = None
        self._extra: list[MemoryServer] = []  # for nodes that came later

    def begin(
        self,
        dump_id: int,
        path: str,
        manifest: Manifest,
        done: Callable[[str], None],
        nodes: set[int],
    ) -> TakeMemory | None:
        """Begin; what to order these nodes, ``None``: nothing.

        Args:
            dump_id: of the checkpoint.
            path: its manifest's.
            manifest: its files are descriptors of this process.
            done: takes why it failed once all nodes have answered; empty: all have it.
            nodes: that are to have it.
        """
        self.close()
        if not nodes:
            done("")
            return None
        try:
            server, order = self._offered(
                path, manifest, lambda: self._call_soon(self._progressed, dump_id)
            )
        except OSError as error:
            done(describe_os_error(error))
            return None
        self._present = _Spreading(path, server, done, set(nodes))
        return order

    def again(self, path: str, manifest: Manifest) -> TakeMemory:
        """What to order a node that lacks a checkpoint which is complete.

        Raises:
            OSError: no socket can be opened.
        """
        server, order = self._offered(path, manifest, lambda: None)
        self._extra.append(server)
        return order

    def hear(self, node: int, path: str, why_not: str) -> None:
        """A node has it, or has not because of ``why_not``; or is gone, which is no failure."""
        present = self._present
        if present is None or path not in {present.path, ""} or node not in present.awaited:
            return
        present.awaited.discard(node)
        if why_not or not present.awaited:
            self.close()
            present.done(why_not)

    def close(self) -> None:
        """Send nothing any more."""
        for server in self._extra:
            server.close()
        self._extra.clear()
        if self._present is not None:
            self._present.server.close()
            self._present = None

    def _offered(
        self, path: str, manifest: Manifest, progress: Progress
    ) -> tuple[MemoryServer, TakeMemory]:
        """What sends the checkpoint's files, and the order to fetch them."""
        text = manifests.encode(manifest).decode()
        files = [int(shard.file) for shard in manifests.decode(text).shards]  # in the text's order
        server = MemoryServer(files, progress, self._security)
        return server, TakeMemory(path, text, server.port, server.key.hex())


class MemoryKeeper:
    """Another node: keeps the newest checkpoint that the controller's node has sent."""

    def __init__(
        self,
        host: str,
        call_soon: CallSoon,
        tell: Callable[[MemoryTaken], None],
        security: Security = PLAIN,
    ) -> None:
        """Keep nothing yet.

        Args:
            host: address of the controller's node.
            call_soon: the loop's method that another thread may call.
            tell: tells the controller's node.
            security: of connections between nodes.
        """
        self._security = security
        self._host = host
        self._call_soon = call_soon
        self._tell = tell
        self._files: list[int] = []
        self._wanted = ""

    def take(self, order: TakeMemory) -> None:
        """Fetch a checkpoint, in a thread; the one before is forgotten."""
        self.forget()
        self._wanted = order.path
        threading.Thread(target=self._fetch, args=(order,), name="msrun-fetch", daemon=True).start()

    def forget(self) -> None:
        """Free the memory."""
        self._wanted = ""
        files, self._files = self._files, []
        _close(files)

    def _fetch(self, order: TakeMemory) -> None:
        try:
            files = self._fetched(order)
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else repr(error)
            self._call_soon(self._keep, order, [], why)
        else:
            self._call_soon(self._keep, order, files, "")

    def _fetched(self, order: TakeMemory) -> list[int]:
        """The files, the manifest's last."""
        manifest = manifests.decode(order.manifest)
        sizes = [shard.nbytes for shard in manifest.shards]
        if why := shortage(sum(sizes) + SPARE, free_bytes()):
            raise OSError(why)
        name = f"msrun-memory-{manifest.step}"
        files = fetch(self._host, order.port, bytes.fromhex(order.key), sizes, name, self._security)
        try:
            files.append(_manifest_of(manifest, files, name))
        except BaseException:
            _close(files)
            raise
        return files

    def _keep(self, order: TakeMemory, files: list[int], why_not: str) -> None:
        if order.path != self._wanted:  # another one was ordered meanwhile, or none any more
            _close(files)
            return
        self._files = files
        self._tell(MemoryTaken(order.path, held(files[-1]) if files else "", why_not))


def _manifest_of(manifest: Manifest, files: Sequence[int], name: str) -> int:
    """A file in memory: the manifest with the files' numbers in this process."""
    pairs = zip(manifest.shards, files, strict=True)
    here = manifest._replace(shards=tuple(shard._replace(file=str(file)) for shard, file in pairs))
    made = os.memfd_create(f"{name}-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(made, manifests.encode(here))
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(made)
        raise
    return made


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
