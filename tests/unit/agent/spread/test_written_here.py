"""What ranks of a node have written of a checkpoint in memory does not come from the controller's."""

import os
from pathlib import Path

import pytest
from support.memory_nodes import (
    MEMORY,
    SAVE,
    STATES,
    Nodes,
    state_file,
    two_states,
    written_file,
)

from agent.nodes.run_messages import TakeMemory
from agent.spread import memory_copy, room
from worker_hooks.contract import protocol
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import PRIVATE, REPLICATED
from worker_hooks.storage.memory_dump import HeldDump


class Node(Nodes):
    """Node 1 has the ranks 2, 3 and more; those that live on have written what ``write`` was told."""

    here = range(2, 4)

    def __init__(self, monkeypatch):
        super().__init__()
        self.fetched, fetch = [], memory_copy.fetch

        def noted(host, port, key, spans, security, only=None):
            self.fetched.append(only)
            fetch(host, port, key, spans, security, only)

        monkeypatch.setattr(memory_copy, "fetch", noted)

    def write(self, digest, rank=2, content=b"", part=0, parts=1, step=7):
        """The rank's file has a header of its own, and lies in as many parts as ranks share it."""
        file = written_file(content or state_file(b"{ }", STATES[digest]))
        size = os.fstat(file).st_size
        written = protocol.Written(rank, 0, 1, "", size, "", digest)
        self.written.add(SAVE._replace(part=part, parts=parts, step=step), written, file)

    def take(self, starting=(1,), living=(1,)):
        """What a rank there reads, by variant and writer; what was said of it."""
        nodes, about = {1: range(2, 4)}, (starting, living)
        self.told.clear()
        orders = self.sender.begin(1, MEMORY, two_states(), self.done.append, nodes, *about)
        self.keeper.take(orders[1])
        self.run_until(lambda: self.told)
        if self.told[0].why_not:
            return self.told[0].why_not
        path = Path(self.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path)
        found = manifests.read(path)
        assert not found.absent
        assert {one.variant for one in found.heads} == {
            one.variant for one in found.shards if one.kind == REPLICATED and one.rank > 1
        }
        for one in found.heads:  # as the controller's node has them
            assert (path.parent / one.file).read_bytes()[one.at :][:10] == state_file(b"{}", b"")
        return {
            (one.kind, one.variant, one.rank): (path.parent / one.file).read_bytes()[one.at :][
                : one.nbytes
            ]
            for one in found.shards
        }


@pytest.fixture
def node(monkeypatch):
    made = Node(monkeypatch)
    yield made
    made.close()


OWN = {(PRIVATE, 0, 2): b"own"}
SENT = {
    (REPLICATED, rank, rank): state_file(b"{}", tensors)
    for rank, tensors in enumerate(STATES.values())
}
HERE = {
    (REPLICATED, variant, 2 + variant): state_file(b"{ }", tensors)
    for variant, tensors in enumerate(STATES.values())
}


def test_what_was_written_there_does_not_come(node):
    node.write("first")
    node.write("second", rank=3)
    assert node.take() == HERE | OWN
    assert node.fetched == []  # the headers, and what ranks alone have, came with the order


def test_of_several_states_those_come_that_were_not(node):
    node.write("second", rank=3)
    wanted = {(REPLICATED, 0, 0), (REPLICATED, 1, 3)}
    assert node.take() == {key: (SENT | HERE)[key] for key in wanted} | OWN
    assert node.fetched == [(0,)]


def test_ranks_that_share_it_out_have_written_it_together(node):
    halves = {0: b"half", 1: b"other half"}
    node.write("first")
    for part in (1, 0):
        node.write("second", 5 - part, halves[part], part, 2)
    expected = {(REPLICATED, 1, 5 - part): content for part, content in halves.items()}
    found = node.take()
    assert found == {(REPLICATED, 0, 2): HERE[REPLICATED, 0, 2]} | expected | OWN


@pytest.mark.parametrize("lack", ["nothing", "a part", "the digest", "the step"])
def test_what_is_no_whole_state_of_that_step_is_fetched_and_freed(node, lack):
    if lack == "a part":
        node.write("first", parts=2)
    if lack == "the digest":
        node.write("third", content=b"of a rank whose memory is broken")
    if lack == "the step":
        node.write("first", step=6)
    assert node.take() == SENT | OWN
    assert node.fetched == [(0, 1)]
    assert node.written.take().parts == {}


def test_nobody_changes_what_was_written(node):
    node.write("first")
    node.write("second", rank=3)
    node.take()
    path = node.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path
    dump = HeldDump.at(path)
    for shard in manifests.read(Path(path)).shards:
        with pytest.raises(PermissionError):
            os.pwrite(int(shard.file), b"x", 0)
    answers = []
    node.keeper.bring(dump.inode, (0,), lambda why, _: answers.append(why))
    assert answers == [""]
    dump.close()


def test_without_room_for_the_rest_the_node_has_nothing(node, monkeypatch):
    node.write("first")
    monkeypatch.setattr(room, "free_bytes", lambda: room.SPARE + (1 << 19))
    assert "no room for the state" in node.take()


def test_what_ranks_wrote_that_have_died_meanwhile_is_used(node):
    node.write("first")
    wanted = {(REPLICATED, 0, 2), (REPLICATED, 1, 1)}
    assert node.take(living=()) == {key: (SENT | HERE)[key] for key in wanted} | OWN
    assert node.fetched == [(1,)]


def test_where_no_rank_dies_one_node_has_it_as_well(node):
    """Until all train again ranks there save it if the controller's node is lost."""
    node.write("first")
    node.write("second", rank=3)
    assert node.take(starting=()) == HERE | OWN


def test_a_copy_that_is_forgotten_frees_it(node):
    node.write("first")
    node.write("second", rank=3)
    node.take()
    dump = HeldDump.at(node.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path)
    inode = dump.inode
    dump.close()
    node.keeper.forget()
    left = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            left.append(os.stat(f"/proc/self/fd/{fd}").st_ino)
        except OSError:
            continue
    assert inode not in left


@pytest.mark.usefixtures("no_threads")
def test_where_no_thread_can_be_begun_that_is_said(node):
    """An error that nobody takes would end msrun, and with it all ranks of the node."""
    orders = node.sender.begin(1, MEMORY, two_states(), node.done.append, {1: range(2, 4)}, [1], [])
    assert orders == {}
    assert "Resource temporarily unavailable" in node.done.pop()
    node.write("first")
    node.keeper.take(TakeMemory(MEMORY, "{}", 1, ""))
    assert "Resource temporarily unavailable" in node.told[0].why_not
    assert node.written.take().parts == {}


def test_a_rank_is_told_that_no_thread_can_be_begun(node, request):
    node.write("first")
    nodes = {1: range(2, 4), 2: range(4, 6)}
    orders = node.sender.begin(1, MEMORY, two_states(), node.done.append, nodes, [2], [2])
    node.keeper.take(orders[1])
    node.run_until(lambda: node.told)
    path = node.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path
    dump, answers = HeldDump.at(path), []
    request.getfixturevalue("no_threads")
    for _ in range(2):
        node.keeper.bring(dump.inode, (1,), lambda why, _: answers.append(why))
    assert len(answers) == 2
    assert all("Resource temporarily unavailable" in each for each in answers)
    dump.close()
