"""A checkpoint in memory goes to other nodes, whose ranks read it there."""

import os
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from agent.dump.node_memory import MemoryKeeper, MemorySender
from agent.nodes.run_messages import TakeMemory
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
    return manifests.new(
        MEMORY_KIND,
        step=7,
        epoch=0,
        batch=7,
        world_size=len(contents),
        attempt=0,
        record_id="r",
        reason="test",
        shards=shards,
        digest="d",
    )


class Nodes:
    """A sender and one keeper, whose loops are a queue."""

    def __init__(self):
        self.calls, self.told, self.done = SimpleQueue(), [], []
        self.sender = MemorySender(self._soon, lambda _: None)
        self.keeper = MemoryKeeper("127.0.0.1", self._soon, self.told.append)

    def _soon(self, call, *args):
        self.calls.put(lambda: call(*args))

    def run_until(self, holds):
        while not holds():
            self.calls.get(timeout=DEADLINE_S)()


@pytest.fixture
def nodes():
    made = Nodes()
    yield made
    made.sender.close()
    made.keeper.forget()
    while OPENED:
        os.close(OPENED.pop())


def test_the_copy_has_every_file_under_its_own_number(nodes):
    contents = [b"zero" * 100, b"one" * 10, b"two"]
    manifest = in_memory(contents)
    order = nodes.sender.begin(1, "/proc/1/fd/9", manifest, nodes.done.append, {1})
    nodes.keeper.take(order)
    nodes.run_until(lambda: nodes.told)
    (taken,) = nodes.told
    assert taken.why_not == ""
    assert manifests.is_in_memory(Path(taken.here))
    copy = manifests.read(Path(taken.here))
    folder = Path(taken.here).parent
    assert {one.rank: (folder / one.file).read_bytes() for one in copy.shards} == dict(
        enumerate(contents)
    )
    assert copy._replace(shards=(), saved_at=0) == manifest._replace(shards=(), saved_at=0)


def test_it_is_done_once_all_nodes_have_answered(nodes):
    nodes.sender.begin(1, "p", in_memory([b"x"]), nodes.done.append, {1, 2, 3})
    nodes.sender.hear(1, "p", "")
    nodes.sender.hear(2, "another", "")  # about one before
    nodes.sender.hear(3, "", "")  # it is gone
    assert nodes.done == []
    nodes.sender.hear(2, "p", "")
    assert nodes.done == [""]


def test_one_node_without_room_is_enough_to_fail(nodes):
    nodes.sender.begin(1, "p", in_memory([b"x"]), nodes.done.append, {1, 2})
    nodes.sender.hear(1, "p", "no room")
    nodes.sender.hear(2, "p", "")
    assert nodes.done == ["no room"]


def test_without_other_nodes_it_is_done_at_once(nodes):
    assert nodes.sender.begin(1, "p", in_memory([b"x"]), nodes.done.append, set()) is None
    assert nodes.done == [""]


def test_what_was_forgotten_meanwhile_is_not_kept(nodes):
    order = nodes.sender.begin(1, "p", in_memory([b"x" * 9]), nodes.done.append, {1})
    nodes.keeper.take(order)
    nodes.keeper.forget()
    for thread in threading.enumerate():
        if thread.name == "msrun-fetch":
            thread.join(DEADLINE_S)
    while not nodes.calls.empty():
        nodes.calls.get()()
    assert nodes.told == []


def test_a_node_says_why_it_has_nothing(nodes):
    text = manifests.encode(in_memory([b"x"])).decode()
    nodes.keeper.take(TakeMemory("p", text, 1, "00" * 32))
    nodes.run_until(lambda: nodes.told)
    (taken,) = nodes.told
    assert (taken.path, taken.here) == ("p", "")
    assert "refused" in taken.why_not
