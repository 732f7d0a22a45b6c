"""Checkpoints in memory on several nodes: the controller's sends them, the others keep them.

Ranks of the controller's node write them. Where none of these holds the state, ranks of another
node write it into the memory of their own msrun, which brings it to the controller's.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from agent.dump.beside import manifest_file
from agent.dump.room import SPARE, shortage
from agent.machine.loop_calls import CallSoon
from agent.nodes.run_messages import MemoryTaken, SaveFar, TakeMemory, pack_said, unpack_said
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import SILENCE_S, MemoryInbox, MemoryServer, Span, fetch, give
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import held
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.durable_file import ThrottledProgress
from worker_hooks.storage.manifest import PRIVATE, Manifest, Shard

NOWHERE = "/proc/0/fd/0"  # in memory, as paths there are, but of no process
MOST_WHOLE = 8  # nodes that get all of it; the others get what their ranks need
PEERS = 8  # other ranks whose private state a rank may need, as worker_hooks.recovery.resume


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
        nodes: Mapping[int, range],
    ) -> dict[int, TakeMemory]:
        """Begin; what to order these nodes.

        Args:
            manifest: its files are descriptors of this process.
            done: takes why it failed once all nodes have answered; empty: all have it.
            nodes: that are to have it, with their ranks.
        """
        self.close()
        if not nodes:
            done("")
            return {}
        tell = ThrottledProgress(lambda _: self._call_soon(self._progressed, dump_id))
        try:
            server = MemoryServer(tell, self._security)
        except OSError as error:
            done(describe_os_error(error))
            return {}
        self._present = _Spreading(path, server, done, set(nodes))
        parts, first = NodeParts(manifest), sorted(nodes)[:MOST_WHOLE]
        encoded = manifests.QuickEncoder(manifest)
        orders = {node: _order(server, path, manifest) for node in first[:1]}
        for node in first[1:]:  # to say it again for each would take longer than to send it
            orders[node] = orders[first[0]]._replace(key=_key(server, manifest))
        for node in nodes.keys() - orders.keys():
            part = parts.of(nodes[node])
            key = _key(server, part)
            orders[node] = TakeMemory(path, encoded(part.shards), server.port, key)
        return orders

    def again(self, path: str, manifest: Manifest) -> TakeMemory:
        """What to order a node that lacks a checkpoint which is complete.

        Raises:
            OSError: no socket can be opened.
        """
        server = MemoryServer(lambda _: None, self._security)
        self._extra.append(server)
        return _order(server, path, manifest)

    def hear(self, node: int, path: str, why_not: str) -> None:
        """A node has it, or has not because of ``why_not``; or is gone, which is no failure."""
        present = self._present
        if present is None or path not in {present.path, ""} or node not in present.awaited:
            return
        present.awaited.discard(node)
        if why_not or not present.awaited:
            self.close()
            present.done(why_not)

    def forget(self) -> None:
        """Free the memory; whoever has not fetched it says so."""
        for server in self._extra:
            server.close()
        self._extra.clear()
        if self._present is not None:
            self._present.server.close()

    def close(self) -> None:
        """Send nothing any more, and hear nobody."""
        self.forget()
        self._present = None


def _order(server: MemoryServer, path: str, manifest: Manifest) -> TakeMemory:
    """What fetches the checkpoint's files."""
    text = manifests.encode(manifest, is_for_people=False).decode()
    return TakeMemory(path, text, server.port, _key(server, manifest))


def _key(server: MemoryServer, manifest: Manifest) -> str:
    """A new one to what the manifest names."""
    return server.offer(spans_of(manifest)).hex()


def spans_of(manifest: Manifest) -> list[Span]:
    """What its shards are in, in the order in which it is sent: what adjoins is one."""
    found: list[Span] = []
    present, begin, end = -1, 0, 0
    for file, at, nbytes in sorted(
        (int(each.file), each.at, each.nbytes) for each in manifest.shards
    ):
        if file != present or at != end:
            if present >= 0:
                found.append(Span(present, begin, end - begin))
            present, begin = file, at
        end = at + nbytes
    if present >= 0:
        found.append(Span(present, begin, end - begin))
    return found


class NodeParts:
    """What a node needs of a checkpoint in memory: its ranks' state, and what its ranks alone have.

    A rank that died before its commit lacks what it would have drawn since: it takes that from the
    ranks that come next. The whole checkpoint is for nodes that save it if node 0 is lost.
    """

    def __init__(self, manifest: Manifest) -> None:
        """``manifest``: of the whole."""
        self._manifest = manifest
        self._private = {each.rank: each for each in manifest.shards if each.kind == PRIVATE}
        self._shared = tuple(each for each in manifest.shards if each.kind != PRIVATE)

    def of(self, ranks: range) -> Manifest:
        """The part for a node with these ranks."""
        world = self._manifest.world_size
        behind = (rank % world for rank in range(ranks.stop, ranks.start + world))
        wanted = (*ranks, *islice(filter(self._private.__contains__, behind), PEERS))
        private = tuple(self._private[rank] for rank in wanted if rank in self._private)
        return self._manifest._replace(shards=(*self._shared, *private))


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
        """
        self._security = security
        self._host = host
        self._call_soon = call_soon
        self._tell = tell
        self._files: list[int] = []
        self._wanted = ""
        self.is_controllers = False
        """Whether the controller is in this process: its memory is this one's."""

    def as_here(self, message: protocol.Message) -> protocol.Message:
        """What the controller's node says of its memory, as of the copy here."""
        match message:
            case protocol.Rejoin(path=path) if manifests.is_in_memory(Path(path)):
                return message._replace(path=self._here(path))
            case protocol.Welcome(resume=path) if manifests.is_in_memory(Path(path)):
                return message._replace(resume=self._here(path))
            case _:
                return message

    def _here(self, path: str) -> str:
        """The same number of a process here would be another file, if that process is not this."""
        if self.is_controllers:
            return path
        return held(self._files[-1]) if self._files and path == self._wanted else NOWHERE

    def take(self, order: TakeMemory) -> None:
        """Fetch a checkpoint, in a thread; the one before is forgotten."""
        self.forget()
        self._wanted = order.path
        threading.Thread(target=self._fetch, args=(order,), name="msrun-fetch", daemon=True).start()

    def move(self, host: str) -> None:
        """The controller's node is another machine, which knows nothing of what is kept here."""
        self.forget()
        self._host = host

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
        spans = spans_of(manifest)
        sizes = [span.nbytes or 0 for span in spans]
        if why := shortage(sum(sizes) + SPARE, free_bytes()):
            raise OSError(why)
        name = f"msrun-memory-{manifest.step}"
        files = fetch(self._host, order.port, bytes.fromhex(order.key), sizes, name, self._security)
        try:
            files.append(_manifest_of(manifest, spans, files, name))
        except BaseException:
            _close(files)
            raise
        return files

    def _keep(self, order: TakeMemory, files: list[int], why_not: str) -> None:
        if order.path != self._wanted:  # another one was ordered meanwhile, or none any more
            _close(files)
            return
        self._files = files
        self._tell(MemoryTaken(order.path, why_not))


def not_written(rank: int, attempt: int, save: protocol.Save, why: str) -> protocol.SaveFailed:
    """The answer to an order to write to memory, which came to nothing because of the place."""
    about = rank, attempt, save.dump_id
    return protocol.SaveFailed(*about, why, is_place=True, round=save.round, share=save.share)


class MemoryInboxes:
    """The controller's node: what ranks of other nodes have written comes here."""

    def __init__(
        self,
        call_soon: CallSoon,
        progressed: Callable[[int], None],
        taken: Callable[[int, str, int], None],
        security: Security = PLAIN,
    ) -> None:
        """Expect nothing yet.

        Args:
            call_soon: the loop's method that another thread may call.
            progressed: takes the dump's id as bytes come.
            taken: takes the dump's id, the path of a file in memory here, and the descriptor of one
                in its place.
        """
        self._security = security
        self._call_soon = call_soon
        self._progressed = progressed
        self._taken = taken
        self._open: dict[tuple[int, int], MemoryInbox] = {}  # by rank and share

    def order(self, rank: int, save: protocol.Save) -> SaveFar:
        """What to order the node of a rank that is to write ``save.folder``, a file in memory here.

        Raises:
            OSError: no socket can be opened.
        """
        if (before := self._open.pop((rank, save.share), None)) is not None:
            before.close()

        inbox = self._open[rank, save.share] = MemoryInbox(
            f"msrun-memory-{save.step}-rank-{rank}",
            lambda file: self._hand_over(save, file),
            ThrottledProgress(lambda _: self._call_soon(self._progressed, save.dump_id)),
            self._security,
        )
        return SaveFar(rank, pack_said(save), inbox.port, inbox.key.hex())

    def _hand_over(self, save: protocol.Save, file: int) -> None:
        """Return once the loop has taken the file: only then may its sender say that it is here.

        What it says may be read by a turn of the loop that is queued already, so a call that is
        queued now could come after it.

        Raises:
            OSError: the loop stands still.
        """
        is_here = threading.Event()

        def take() -> None:
            self._taken(save.dump_id, save.folder, file)
            is_here.set()

        self._call_soon(take)
        if not is_here.wait(SILENCE_S):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def close(self) -> None:
        """Nothing is to come any more."""
        for inbox in self._open.values():
            inbox.close()
        self._open.clear()


class MemoryGiver:
    """Another node: what its ranks have written goes to the controller's node."""

    def __init__(self, host: str, security: Security = PLAIN) -> None:
        """Give nothing yet.

        Args:
            host: address of the controller's node.
        """
        self._host = host
        self._security = security
        # rank, share -> its file
        self._owed: dict[tuple[int, int], tuple[SaveFar, protocol.Save, int]] = {}

    def move(self, host: str) -> None:
        """The controller's node is another machine, which has ordered nothing yet."""
        self.close()
        self._host = host

    def place(self, order: SaveFar, wanted: int) -> protocol.Save:
        """The order to the rank: it writes into the memory of this process.

        ``wanted``: bytes that the rank will write.

        Raises:
            OSError: there is no room for it.
        """
        save = unpack_said(order.message)
        assert isinstance(save, protocol.Save)
        self._forget(order.rank, save.share)
        if why := shortage(wanted + SPARE, free_bytes()):
            raise OSError(why)
        name = f"msrun-memory-{save.step}-rank-{order.rank}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._owed[order.rank, save.share] = order, save, file
        return save._replace(folder=held(file))

    def take(
        self,
        written: protocol.Written,
        call_soon: CallSoon,
        tell: Callable[[protocol.Written | protocol.SaveFailed], object],
    ) -> bool:
        """Whether a rank has written for the controller's node; then it goes there, in a thread.

        Args:
            call_soon: the loop's method that another thread may call.
            tell: takes the same once the controller's node has all of it, or why it has not.
        """
        found = self._owed.get((written.rank, written.share))
        if found is None or (found[1].dump_id, found[1].round) != (written.dump_id, written.round):
            return False
        del self._owed[written.rank, written.share]

        def give_it() -> None:
            answer = self._given(*found, written)
            call_soon(tell, answer)

        threading.Thread(target=give_it, name="msrun-give", daemon=True).start()
        return True

    def forget(self, rank: int) -> None:
        """Nothing is to be written by this rank any more."""
        for owner in [owner for owner in self._owed if owner[0] == rank]:
            self._forget(*owner)

    def _forget(self, rank: int, share: int) -> None:
        if (found := self._owed.pop((rank, share), None)) is not None:
            os.close(found[2])

    def close(self) -> None:
        """Nothing is to be written any more."""
        for owner in tuple(self._owed):
            self._forget(*owner)

    def _given(
        self, order: SaveFar, save: protocol.Save, file: int, written: protocol.Written
    ) -> protocol.Written | protocol.SaveFailed:
        key = bytes.fromhex(order.key)
        try:
            with open(file, "rb") as readable:  # closes it
                give(self._host, order.port, key, readable, lambda _: None, self._security)
        except OSError as error:
            why = f"what it wrote cannot be brought to the controller: {describe_os_error(error)}"
            return not_written(written.rank, written.attempt, save, why)
        return written


def _manifest_of(manifest: Manifest, spans: Sequence[Span], files: Sequence[int], name: str) -> int:
    """A file in memory: the manifest with the files of this process, each of which is a span."""
    pairs = sorted(zip(spans, files, strict=True))
    begins = [span[:2] for span, _ in pairs]

    def here(shard: Shard) -> Shard:
        span, file = pairs[bisect(begins, (int(shard.file), shard.at)) - 1]
        return shard._replace(file=str(file), at=shard.at - span.at)

    here_all = manifest._replace(shards=tuple(map(here, manifest.shards)))
    return manifest_file(here_all, f"{name}-manifest")


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
