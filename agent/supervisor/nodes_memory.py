"""Checkpoints in memory, on all nodes: brought to those that lack them, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, KeysView, Sequence

from agent.controller import actions as do
from agent.controller import events as ev
from agent.dump.flush import Written
from agent.dump.node_copies import CopyGatherer
from agent.dump.target import Advance, OtherNodes, Target
from agent.nodes.checkpoint_copy import CheckpointOffers, CheckpointPlace
from agent.nodes.run_messages import (
    CopyWritten,
    PartKept,
    SaveFar,
    SaveHere,
    WriteCopy,
    pack_said,
)
from agent.nodes.tls import Security
from agent.ranks.parts import seated
from agent.spread.far_writes import MemoryInboxes
from agent.spread.sender import MemorySender, holders
from agent.supervisor.hooks_bridge import HooksBridge
from agent.supervisor.job_controller import JobController
from agent.supervisor.remote_node import RemoteNode
from agent.workers.master_port import is_loopback
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import Manifest, Shard

KEEPERS = 2  # nodes that keep a part of the state which this node has only the headers of
EVERY = -1  # in place of a rank's group: all hold the same, so that it is not said who does


class NodesMemory:
    """What the nodes of one job have in memory, and of the disk of the controller's node."""

    def __init__(
        self,
        others: Sequence[RemoteNode],
        hooks: HooksBridge,
        controller: JobController,
        call_soon: Callable[..., object],
        security: Security,
        say: Callable[[str], None],
        world: int,
    ) -> None:
        """Nothing is there yet.

        Args:
            others: all nodes but the controller's.
            hooks: of all ranks.
            controller: hears of what comes, and of what does not.
            call_soon: the loop's method that another thread may call.
            security: of connections between nodes.
            say: prints one sentence for people.
            world: how many ranks the job has.
        """
        self._others = others
        self._security = security
        self._every = range(world)
        self._by_rank = {node.facts.rank: node for node in others}
        self._controller = controller
        self._hooks = hooks
        self._say = say
        self._newest: tuple[str, Manifest] | None = None  # the newest checkpoint in memory
        self._gone = frozenset[int]()  # ranks that are to be replaced
        self._elsewhere = dict[int, int]()  # rank of another node, as it is made -> that node
        self._reached: KeysView[int] = {}.keys()  # nodes that others can reach
        self._is_unreached = False  # a node got nothing where others had some of it
        self._dump_id = -1  # of the newest
        self._readers = frozenset[int]()  # ranks that do not hold its step, dead ones too
        self._readers_here = frozenset[int]()  # those of them that belong to this node
        self._there = frozenset[int]()  # other nodes that are there as a dump is made
        self._lasting = dict[int, tuple[Sequence[int], bool]]()  # by a group's id, see _lasts
        # by some ranks of a part, and their number: who keeps it, and how many do
        self._keepers = dict[tuple[int, int, int, int], tuple[set[int], int]]()
        self._holders = set[int]()  # nodes that are to have all of the dump that is being made
        self._gatherer = CopyGatherer()
        self._sender = MemorySender(call_soon, self._progressed, security)
        self._offers = CheckpointOffers(call_soon, security)
        self._inboxes = MemoryInboxes(call_soon, self._progressed, hooks.take_memory, security)
        hooks.dump_with(OtherNodes(self._stays, self._spread, self._gather, self._collect))

    def begin(self) -> None:
        """Another attempt begins, from a checkpoint on the disk or from nothing."""
        self._offers.begin()

    def forget(self) -> None:
        """It is freed."""
        self._newest = None
        self._sender.forget()
        self._inboxes.close()

    def close(self) -> None:
        """The job is over."""
        self._sender.close()
        self._inboxes.close()
        self._offers.close()

    def lose(self, node: RemoteNode, why: str) -> None:
        """A node is lost: nothing is awaited of it."""
        self._sender.lose(node.facts.rank)
        self._gatherer.lose(node.facts.rank, why)

    def bring(self, node: RemoteNode) -> bool:
        """Send a node the checkpoint in memory, if it lacks that; whether it has to wait for it."""
        if self._newest is None or node.has_memory(self._newest[0]) or node.is_here:
            return False
        try:
            rank = node.facts.rank
            order = self._sender.again(*self._newest, rank, node.ranks, self._addresses())
            node.take_memory(order)
        except OSError as error:
            self._say(f"{node.name} cannot be sent the state: {describe_os_error(error)}")
            return False
        return True

    def _spread(
        self, dump_id: int, path: str, manifest: Manifest, done: Callable[[str], None]
    ) -> None:
        """Bring a checkpoint in memory to the other nodes."""
        self._newest = path, manifest
        there = {node.facts.rank: node for node in self._others if node.is_there}
        for node in (node for node in there.values() if node.is_here):
            node.share_memory(path)
        ranks = {rank: node.ranks for rank, node in there.items() if not node.is_here}
        about = *self._alive(), self._addresses()
        is_whole = not self._hooks.has_common_folder
        holding = {rank for rank, node in self._elsewhere.items() if node in there} - self._readers
        orders = self._sender.begin(
            dump_id, path, manifest, done, ranks, *about, holding, is_whole=is_whole
        )
        for rank, order in orders.items():
            there[rank].take_memory(order)

    def _addresses(self) -> dict[int, str]:
        """Of the nodes that are there, those by which others can reach them."""
        found = {node.facts.rank: node.facts.address for node in self._others if node.is_there}
        near = {rank for rank, address in found.items() if is_loopback(address)}
        if len(near) == len(found):  # all are on this machine
            return found
        return {rank: address for rank, address in found.items() if rank not in near}

    def kept(self, node: int, kept: PartKept) -> None:
        """A node has a file of a state, which others may fetch."""
        self._sender.kept(node, kept)

    def taken(self, node: int, path: str, why_not: str) -> None:
        """A node has the checkpoint in memory, or has not because of ``why_not``."""
        if why_not and self._newest is not None and self._newest[1].absent:
            self._is_unreached = True  # from now on all comes here: the nodes reach this one
        self._sender.hear(node, path, why_not)
        if self._newest is None or path != self._newest[0]:
            return
        other = self._by_rank[node]
        if other.has_memory(path):
            other.go_on(self._controller.view)
            return
        for event in other.give_up(f"{other.name} did not get the state: {why_not}", is_lost=False):
            self._controller.post(event)

    def _gather(
        self,
        dump_id: int,
        files: int,
        manifest: Manifest,
        folder: str,
        done: Callable[[Written], None],
    ) -> None:
        """Have the others write what their ranks have copied."""
        parts = [
            (node, tuple(each for each in manifest.shards if each.rank in node.ranks))
            for node in self._others
        ]
        parts = [(node, shards) for node, shards in parts if shards]
        self._gatherer.begin(dump_id, folder, [node.facts.rank for node, _ in parts], done)
        for node, _ in parts:
            if not node.is_there:
                self._gatherer.lose(node.facts.rank, node.lost_why)
                return
        for node, shards in parts:
            part = manifests.encode(manifest._replace(shards=shards), is_for_people=False).decode()
            node.pass_on(WriteCopy(dump_id, files, part, folder))

    def _collect(self, manifest: Manifest) -> Callable[[Target, Advance], tuple[Shard, ...]]:
        """What writes of a checkpoint in memory what other nodes have."""
        return self._sender.collected(manifest, self._addresses()).write

    def copy_written(self, node: int, answer: CopyWritten) -> None:
        """A node has written what its ranks had copied, or has not."""
        self._gatherer.hear(node, answer)

    def save(self, action: do.SaveRanks) -> None:
        """A dump is made: note which nodes are to have all of it, as far as is known by now."""
        self._gone = frozenset(action.gone)
        self._sender.expect(action.dump_id)
        others = (node for node in self._others if not node.is_here)
        self._elsewhere = {rank: node.facts.rank for node in others for rank in node.ranks}
        self._reached = self._addresses().keys()
        if action.digesters or action.dump_id != self._dump_id:
            seats = (*action.writers, *action.digesters)
            parts = seated(len(self._every), action.parts) if action.parts else None
            whole = seats if parts is None else parts.ranks_of(seats)
            self._readers = frozenset(self._every).difference(whole)
        self._readers_here = self._readers - self._elsewhere.keys()
        self._there = frozenset(node.facts.rank for node in self._others if node.is_there)
        self._dump_id = action.dump_id
        self._lasting.clear()
        self._keepers.clear()
        starting, living = self._alive()
        self._holders = holders({*starting, *living}, starting, living)

    def _alive(self) -> tuple[list[int], list[int]]:
        """The other nodes that will start ranks, and those of which ranks live on."""
        starting, living = list[int](), list[int]()
        for node in (each for each in self._others if each.is_there and not each.is_here):
            workers = node.workers.values()
            alive = [each.rank for each in workers if each.is_alive and each.rank not in self._gone]
            # who lives and does not hold the step reads it as a new rank does
            if len(alive) < len(workers) or not self._readers.isdisjoint(alive):
                starting.append(node.facts.rank)
            if alive:
                living.append(node.facts.rank)
        return starting, living

    def far_order(self, rank: int, save: protocol.Save) -> SaveFar:
        """How a rank of another node writes to this node's memory.

        Raises:
            OSError: no socket can be opened.
        """
        is_left = save.parts <= 1 and self._stays(rank, save.share)
        return self._inboxes.order(rank, save, is_left=is_left)

    def _stays(self, rank: int, share: int) -> bool:
        return self._is_left(rank, self._group(rank, share))

    def _is_left(self, rank: int, group: Sequence[int]) -> bool:
        """Whether what a rank writes is left there: others can fetch it, and no rank here reads it.

        If nobody is replaced, it goes through this node's memory to its disk, and all of it comes.
        So it does if the nodes could not save what they have into one folder, were this one lost.
        """
        if not self._gone or not self._security.is_both_ways or self._is_unreached:
            return False
        if self._elsewhere.get(rank) not in self._reached or not self._hooks.has_common_folder:
            return False
        return self._lasts(group)

    def _lasts(self, group: Sequence[int]) -> bool:
        """Whether two other nodes will have what these ranks hold, and no rank here reads it.

        Of two nodes one may be lost. If nobody knows who holds the same, it is not known either.
        """
        if id(group) not in self._lasting:  # quick: thousands are asked of the same one
            having = {self._elsewhere.get(each) for each in group} & self._there
            lasts = self._readers_here.isdisjoint(group) and len(having) > 1
            self._lasting[id(group)] = group, lasts
        return self._lasting[id(group)][1]

    def _group(self, rank: int, share: int) -> Sequence[int]:
        """The ranks that hold a part of the state; none: nobody knows."""
        told = self._hooks.replicated(rank)
        if share < len(told.parts):
            return told.parts[share]
        return told.alike or (() if told.why_not else self._every)

    def here_order(self, node: int, ranks: tuple[int, ...], save: protocol.Save) -> SaveHere | None:
        """How ranks of another node write what they are to say they hold to that node's memory.

        ``None``: it is not to have it. Each part is in the memory of two nodes at least, if ranks
        of as many hold it: one of them may be lost.
        """
        if node not in self._holders and not any(
            self._is_kept_by(node, rank, save.share) for rank in ranks
        ):
            return None
        groups = dict[int, list[int]]()
        for rank in ranks:
            told = self._hooks.replicated(rank)
            alone = rank if told.why_not else EVERY
            groups.setdefault(told.alike[0] if told.alike else alone, []).append(rank)
        return SaveHere(tuple(map(tuple, groups.values())), pack_said(save))

    def _is_kept_by(self, node: int, rank: int, share: int) -> bool:
        """Whether a node is one of the few that keep what a rank holds."""
        group = self._group(rank, share)
        if not group or not self._security.is_both_ways:
            return False
        # quick: it is asked of every rank
        about = group[0], group[len(group) // 2], group[-1], len(group)
        if about not in self._keepers:
            self._keepers[about] = set(), self._how_many_keep(group)
        keepers, most = self._keepers[about]
        if len(keepers) < most:
            keepers.add(node)
        return node in keepers

    def _how_many_keep(self, group: Sequence[int]) -> int:
        """How many nodes besides those that are to have all of what their ranks hold."""
        holding = [rank for rank in group if rank not in self._readers]
        if self._elsewhere.keys() >= {*holding} and any(
            self._is_left(rank, group) for rank in holding
        ):
            return KEEPERS
        return int(self._holders.isdisjoint(map(self._elsewhere.get, holding)))

    def offer(self, path: str, told: Callable[[CheckpointPlace | None], object]) -> None:
        """``told`` takes where a checkpoint on this node's disk is to be had."""
        self._offers.place(path, told)

    def _progressed(self, dump_id: int) -> None:
        self._controller.post(ev.DumpProgressed(dump_id))
