"""The controller's node sends a checkpoint in memory to the other nodes.

The tensors of a large one are for nodes that start ranks. If no rank lives on there, they are for
one more node: until all train again that dump is the state, and a rank that lives on saves it if
the controller's node is lost. What ranks that live on there have written themselves is not sent.
Other ranks that live on hold the tensors already: their nodes get the rest, and fetch the tensors
if one of these ranks has to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from agent.machine.loop_calls import CallSoon
from agent.nodes.run_messages import TakeMemory
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import MemoryServer, Span
from agent.spread.parts import NodeParts, heads_of, spans_of, split
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.durable_file import ThrottledProgress
from worker_hooks.storage.manifest import Manifest

MOST_WHOLE = 8  # nodes that get all of it; the others get what their ranks need


class _Spreading(NamedTuple):
    """A checkpoint that is on its way to other nodes."""

    path: str
    server: MemoryServer
    done: Callable[[str], None]
    awaited: set[int]  # nodes
    is_partial: bool  # some may come for the tensors later


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
        self._extra: list[MemoryServer] = []  # for nodes that came later, or lack the tensors

    def begin(
        self,
        dump_id: int,
        path: str,
        manifest: Manifest,
        done: Callable[[str], None],
        nodes: Mapping[int, range],
        starting: Collection[int] = (),
        living: Collection[int] = (),
    ) -> dict[int, TakeMemory]:
        """Begin; what to order these nodes.

        Args:
            manifest: its files are descriptors of this process.
            done: takes why it failed once all nodes have answered; empty: all have it.
            nodes: that are to have it, with their ranks.
            starting: those of them that start ranks.
            living: those of them on which ranks live on.
        """
        self.close()
        if not nodes:
            done("")
            return {}
        tell = ThrottledProgress(lambda _: self._call_soon(self._progressed, dump_id))
        try:
            server = MemoryServer(tell, self._security)
            try:
                heads = heads_of(manifest)
                whole = holders(nodes, starting, living) if heads else {*nodes}
                writing = whole & {*living} if heads else set[int]()
                orders = _orders(server, path, manifest, nodes, whole, writing, heads)
            except BaseException:
                server.close()
                raise
        except OSError as error:
            done(describe_os_error(error))
            return {}
        self._present = _Spreading(path, server, done, set(nodes), len(whole) < len(nodes))
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
            self._present = None
            if present.is_partial and not why_not:
                self._extra.append(present.server)
            else:
                present.server.close()
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


def holders(nodes: Collection[int], starting: Collection[int], living: Collection[int]) -> set[int]:
    """The nodes that are to have the tensors; arguments as of :meth:`MemorySender.begin`."""
    found = {*nodes} & {*starting}
    if nodes and not found & {*living}:
        found.add(min({*nodes} & {*living} or nodes))
    return found


def _orders(
    server: MemoryServer,
    path: str,
    manifest: Manifest,
    nodes: Mapping[int, range],
    whole: set[int],
    writing: set[int],
    heads: tuple[int, ...],
) -> dict[int, TakeMemory]:
    """What to order the nodes, of which ``whole`` get the tensors, unless they have written them.

    Raises:
        OSError: no descriptor is left.
    """
    parts, first = NodeParts(manifest), sorted(whole)[:MOST_WHOLE]
    encoded = manifests.QuickEncoder(manifest)
    orders = dict[int, TakeMemory]()
    for node in (*first, *nodes.keys() - {*first}):
        if node not in first:
            part = parts.of(nodes[node])
            text = encoded(part.shards)
        elif not orders:  # to say it again for each would take longer than to send it
            part, text = manifest, manifests.encode(manifest, is_for_people=False).decode()
        if node in whole - writing:
            key = _key(server, spans_of(part))
            orders[node] = TakeMemory(path, text, server.port, key)
        else:
            now, later = split(part, heads)
            about = path, text, server.port, _key(server, now), heads, _key(server, later)
            orders[node] = TakeMemory(*about, is_whole=node in whole)
    return orders


def _order(server: MemoryServer, path: str, manifest: Manifest) -> TakeMemory:
    """What fetches the checkpoint's files."""
    text = manifests.encode(manifest, is_for_people=False).decode()
    return TakeMemory(path, text, server.port, _key(server, spans_of(manifest)))


def _key(server: MemoryServer, spans: Iterable[Span]) -> str:
    """A new one to these."""
    return server.offer(spans).hex()
