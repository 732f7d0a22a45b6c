"""A checkpoint in memory of the controller's node, and another node that gets it."""

from __future__ import annotations

import os
from queue import SimpleQueue

from agent.spread.keeper import MemoryKeeper
from agent.spread.kept_parts import KeptParts
from agent.spread.sender import MemorySender
from agent.spread.written_here import WrittenHere
from worker_hooks.contract import protocol
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import MEMORY_KIND, PRIVATE, REPLICATED, Shard

DEADLINE_S = 60
OPENED = []


def in_memory(contents):
    """A checkpoint in memory with these files, of ranks in falling order: manifests sort them."""
    shards = []
    for rank, content in reversed(list(enumerate(contents))):
        file = os.memfd_create(f"rank-{rank}")
        OPENED.append(file)
        os.write(file, content)
        kind = PRIVATE if rank else REPLICATED
        shards.append(Shard(str(file), rank, kind, len(content), ""))
    return manifest_of(shards, len(contents))


def manifest_of(shards, world_size):
    """That of step 7 in memory."""
    return manifests.Manifest(
        MEMORY_KIND,
        step=7,
        epoch=0,
        batch=7,
        world_size=world_size,
        attempt=0,
        record_id="r",
        reason="test",
        shards=tuple(shards),
        digest="d",
    ).completed()


STATES = {"first": b"1" * (1 << 20), "second": b"2" * (1 << 20)}


def written_file(content):
    """A file in memory, as a rank of step 7 writes it."""
    file = os.memfd_create("msrun-memory-7-rank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, content)
    return file


def two_states():
    """The checkpoint of two replica groups: ranks 0 and 2, and 1 and 3; ranks 0 and 1 wrote it."""
    shards = []
    for rank, tensors in enumerate(STATES.values()):
        content = state_file(b"{}", tensors)
        OPENED.append(written_file(content))
        shards.append(Shard(str(OPENED[-1]), rank, REPLICATED, len(content), "", variant=rank))
    OPENED.append(written_file(b"own"))
    shards.append(Shard(str(OPENED[-1]), 2, PRIVATE, 3, ""))
    groups = ((0, 2), (1, 3))
    return manifest_of(shards, 4)._replace(digest=",".join(STATES), holders=groups)


MEMORY = "/proc/1/fd/9"


def ranks(*nodes):
    """Each of these nodes has one."""
    return {node: range(node, node + 1) for node in nodes}


def state_file(header, tensors):
    """A file as ranks write them: the length of its header, that, and the tensors."""
    return len(header).to_bytes(8, "little") + header + tensors


SAVE = protocol.Save(1, 7, "", is_quick=True)
SECOND = state_file(b"{ }", STATES["second"])  # as ranks of another node write it
HALVES = {4: SECOND[:100], 5: SECOND[100:]}  # by the rank that has written it


class Donors:
    """Nodes whose ranks 4 and 5 have each written a half of the second state."""

    def __init__(self, sender, nodes):
        self.sender, self.kept = sender, {node: KeptParts() for node in nodes}
        sender.expect(1)

    def keep(self, node, parts=(0, 1), nbytes=0):
        """Have a node say so; ``nbytes``: in place of the true size."""
        for part in parts:
            half = HALVES[4 + part]
            file = written_file(half)
            written = protocol.Written(4 + part, 0, 1, "", nbytes or len(half), "", "second")
            save = SAVE._replace(part=part, parts=2)
            self.sender.kept(node, self.kept[node].offer(save, written, file))
            os.close(file)

    def close(self):
        for each in self.kept.values():
            each.forget()


class Nodes:
    """A sender and one keeper, whose loops are a queue."""

    here = range(1, 2)  # the ranks of the keeper's node

    def __init__(self):
        self.calls, self.told, self.done = SimpleQueue(), [], []
        self.sender = MemorySender(self._soon, lambda _: None)
        self.written = WrittenHere()
        self.came = []
        came = lambda *about: self.came.append(about)  # noqa: E731
        about = self.told.append, came, self.here, self.written
        self.keeper = MemoryKeeper("127.0.0.1", self._soon, *about)

    def _soon(self, call, *args):
        self.calls.put(lambda: call(*args))

    def run_until(self, holds):
        while not holds():
            self.calls.get(timeout=DEADLINE_S)()

    def close(self):
        self.sender.close()
        self.keeper.forget()
        self.written.forget()
        while OPENED:
            os.close(OPENED.pop())
