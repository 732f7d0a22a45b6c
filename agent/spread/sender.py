"""The controller's node sends a checkpoint in memory to the other nodes.

Of a large one, nodes that start ranks get the tensors that these resume from: from any node whose
ranks have written them, and unless that is the node itself. Until all train again that dump is the
state, and if the controller's node is lost, ranks that live on save it, each what its node has. So
one node gets what the controller's alone has; what new ranks get as well only once these take long.
Other ranks that live on hold the tensors already: their nodes get the rest, and fetch the tensors
if one of these ranks has to read them.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from types import MappingProxyType
from typing import NamedTuple

from agent.machine.loop_calls import CallSoon
from agent.nodes.run_messages import Donor, PartKept, TakeMemory
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import MemoryServer, Span
from agent.spread.collected import Collected
from agent.spread.donors import Donors, KnownDonors
from agent.spread.parts import (
    MOST_TO_ALL,
    NodeParts,
    Pieces,
    content_of,
    digests_of,
    heads_of,
    private_of,
    size_of,
    split,
    variants_of,
)
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.durable_file import ThrottledProgress
from worker_hooks.storage.manifest import Manifest

NOWHERE: Mapping[int, str] = MappingProxyType({})
NOBODY = "no node is left that holds a part of the state"
MOST_WHOLE = 8  # nodes that get all of it; the others get what their ranks need
MOST_INSIDE = 64 << 10  # bytes of an order, if the nodes are few: what is more is fetched
MOST_HEADS = 1 << 20  # bytes; the names and places of tensors become a tenth when deflated


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
        self._donors = KnownDonors()
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
        addresses: Mapping[int, str] = NOWHERE,
        holding: Collection[int] = (),
        *,
        is_whole: bool = False,
    ) -> dict[int, TakeMemory]:
        """Begin; what to order these nodes.

        Args:
            manifest: its files are descriptors of this process.
            done: takes why it failed once all nodes have answered; empty: all have it.
            nodes: that are to have it, with their ranks.
            starting: those of them that start ranks.
            living: those of them on which ranks live on.
            addresses: of nodes that are there, by which others reach them.
            holding: ranks of these nodes that live on, and hold the step.
            is_whole: one node gets all, as nodes could not save what they have into one folder.
        """
        self.close()
        donors = self._donors.found(addresses)
        if not all(_of_absent(manifest, donors)):
            done(NOBODY)
            return {}
        if not nodes:
            done("")
            return {}
        tell = ThrottledProgress(lambda _: self._call_soon(self._progressed, dump_id))
        try:
            server = MemoryServer(tell, self._security)
            try:
                spread = _Spread(server, path, manifest, nodes, donors)
                orders = spread.orders(starting, living, holding, is_whole=is_whole)
            except BaseException:
                server.close()
                raise
        except OSError as error:
            done(describe_os_error(error))
            return {}
        self._present = _Spreading(path, server, done, set(nodes), spread.is_partial)
        return orders

    def again(
        self,
        path: str,
        manifest: Manifest,
        node: int,
        ranks: range,
        addresses: Mapping[int, str] = NOWHERE,
    ) -> TakeMemory:
        """What to order a node that lacks a checkpoint which is complete.

        Args:
            path: of the checkpoint's manifest.
            manifest: as of :meth:`begin`.
            node: which.
            ranks: its ranks, which start.
            addresses: as of :meth:`begin`.

        Raises:
            OSError: no socket can be opened.
        """
        server = MemoryServer(lambda _: None, self._security)
        self._extra.append(server)
        donors = self._donors.found(addresses)
        spread = _Spread(server, path, manifest, {node: ranks}, donors)
        return spread.orders((node,))[node]

    def collected(self, manifest: Manifest, addresses: Mapping[int, str]) -> Collected:
        """What of a checkpoint is in the memory of other nodes alone; as of :meth:`begin`."""
        found = _of_absent(manifest, self._donors.found(addresses))
        return Collected(manifest, found, self._security)

    def expect(self, dump_id: int) -> None:
        """Ranks are about to write a dump."""
        self._donors.begin(dump_id)

    def kept(self, node: int, kept: PartKept) -> None:
        """A node has a file of a state, which others may fetch."""
        self._donors.hear(node, kept)

    def lose(self, node: int) -> None:
        """A node is gone, which is no failure."""
        self._donors.lose(node)
        self.hear(node, "", "")

    def hear(self, node: int, path: str, why_not: str) -> None:
        """A node has it, or has not because of ``why_not``."""
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
    """The nodes that are to have tensors; arguments as of :meth:`MemorySender.begin`."""
    found = {*nodes} & {*starting}
    return found | {second(nodes, starting, living)} if nodes else found


def second(nodes: Collection[int], starting: Collection[int], living: Collection[int]) -> int:
    """The node that is to have what the controller's alone has; arguments as before."""
    alive = {*nodes} & {*living}
    return min(alive & {*starting} or alive or nodes)


class _Spread:
    """What nodes are ordered to fetch of one checkpoint."""

    def __init__(
        self,
        server: MemoryServer,
        path: str,
        manifest: Manifest,
        nodes: Mapping[int, range],
        donors: Donors,
    ) -> None:
        self._server = server
        self._path = path
        self._manifest = manifest
        self._nodes = nodes
        self._digests = digests_of(manifest)
        self._donors = donors
        self._turns = Counter[str]()  # by digest, how many nodes have donors of it
        self._heads = heads_of(manifest, len(nodes))
        self.is_partial = False
        """Whether a node may come for tensors later."""

    def orders(
        self,
        starting: Collection[int],
        living: Collection[int] | None = None,
        holding: Collection[int] = (),
        *,
        is_whole: bool = False,
    ) -> dict[int, TakeMemory]:
        """They, by node; arguments as of :meth:`MemorySender.begin`.

        ``living``: ``None``: other nodes have all that the controller's has.

        Raises:
            OSError: no descriptor is left.
        """
        nodes, manifest = self._nodes, self._manifest
        having = holders(nodes, starting, living or ()) if self._heads else {*nodes}
        first = sorted(having)[:MOST_WHOLE]
        parts, encoded = NodeParts(manifest), manifests.QuickEncoder(manifest)
        of_all = split(manifest, self._heads)
        inside = _Inside(of_all, len(nodes))
        rest = _key(self._server, of_all.later) if self._heads else ""
        orders = dict[int, TakeMemory]()
        for node in (*first, *nodes.keys() - {*first}):
            if node not in first:
                part = parts.of(nodes[node])
                text = encoded(part.shards)
            elif not orders:  # to say it again for each would take longer than to send it
                part, text = manifest, manifests.encode(manifest, is_for_people=False).decode()
            pieces = of_all._replace(own=private_of(part))
            key, alike, private = "", b"", b""
            if inside.has_room(pieces):
                alike, private = inside.alike, content_of(pieces.own)
            else:
                key = _key(self._server, pieces.now)
            orders[node] = TakeMemory(
                self._path,
                text,
                self._server.port,
                key,
                self._heads,
                rest,
                alike=alike,
                private=private,
            )
        if self._heads:
            read = {node: variants_of(manifest, nodes[node]) for node in having & {*starting}}
            alone = set[int]() if living is None else self._alone(is_whole=is_whole)
            # if no living rank of these nodes holds a part, a new one is about to get it
            soon = set[int]() if is_whole else {*chain(*read.values())}
            late = alone & soon.difference(variants_of(manifest, holding))
            to_have_it = second(nodes, starting, living or ())
            for node in having:
                own = {*read.get(node, ()), *(alone - late if node == to_have_it else ())}
                more = late - own if node == to_have_it else ()
                orders[node] = self._with_tensors(orders[node], own, more)
            self.is_partial = len(having) < len(nodes) or len(self._digests) > 1
        return orders

    def _with_tensors(
        self, order: TakeMemory, own: Iterable[int], late: Iterable[int]
    ) -> TakeMemory:
        """The order with the states whose tensors the node gets at once, and later."""
        now, later = tuple(sorted(own)), tuple(sorted(late))
        donors = tuple(donor for variant in now for donor in self._of(variant))
        return order._replace(own=now, late=later, donors=donors)

    def _alone(self, *, is_whole: bool) -> set[int]:
        """The states that only the controller's node has; all, if ``is_whole``."""
        states = {*range(len(self._digests))}
        if is_whole:
            return states
        whole = {
            digest
            for digest, donors in self._donors.items()
            if any(len({(file.host, file.port) for file in each.files}) == 1 for each in donors)
        }
        here = states.difference(self._manifest.absent)
        return {variant for variant in here if self._digests[variant] not in whole}

    def _of(self, variant: int) -> Sequence[Donor]:
        """Who is to be asked for a state before the controller's node; each has its turn."""
        digest = self._digests[variant]
        ways: list[Donor | None] = [*self._donors.get(digest, ())]
        if variant not in self._manifest.absent:
            ways.append(None)  # the controller's node
        if not ways:
            return ()
        turn = self._turns[digest] % len(ways)
        self._turns[digest] += 1
        before = [*ways[turn:], *ways[:turn]]
        return [each._replace(variant=variant) for each in takewhile(bool, before) if each]


class _Inside:
    """What may travel within the orders: it waits in this process's memory for all nodes."""

    def __init__(self, pieces: Pieces, nodes: int) -> None:
        """``pieces``: of the whole checkpoint."""
        most = min(MOST_INSIDE, MOST_TO_ALL // nodes)
        is_little = size_of(pieces.alike) <= (MOST_HEADS if pieces.later else most)
        self.alike = zlib.compress(content_of(pieces.alike), 1) if is_little else b""
        """What all nodes get, deflated."""
        self._room = most - len(self.alike) if is_little else -1

    def has_room(self, pieces: Pieces) -> bool:
        """Whether what a node gets of its own fits in, too."""
        return size_of(pieces.own) <= self._room


def _of_absent(manifest: Manifest, donors: Donors) -> list[Sequence[Donor]]:
    """Of each state that the controller's node lacks from where it can be fetched; none: lost."""
    digests = digests_of(manifest)
    return [donors.get(digests[variant], ()) for variant in manifest.absent]


def _key(server: MemoryServer, spans: Iterable[Span]) -> str:
    """A new one to these."""
    return server.offer(spans).hex()
