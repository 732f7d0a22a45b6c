"""What stays in the memory of the nodes that hold it: node 0 knows of it, and saves it if need be."""

import os
import socket
from pathlib import Path

import pytest
from support.memory_nodes import (
    HALVES,
    MEMORY,
    Donors,
    Nodes,
    manifest_of,
    state_file,
    two_states,
    written_file,
)

from agent.dump.memory import MemoryTarget
from agent.dump.target import LostStateError
from agent.spread import collected, parts, sender
from worker_hooks.contract import protocol
from worker_hooks.storage.manifest import REPLICATED, Shard
from worker_hooks.storage.memory_dump import HeldDump

HERE = {2: "127.0.0.1", 3: "127.0.0.1"}


@pytest.fixture
def nodes():
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def far(nodes):
    made = Donors(nodes.sender, HERE)
    yield made
    made.close()


ABSENT = {"absent": (1,)}


class Folder:
    """Takes files as a folder does."""

    def __init__(self):
        self.files, self.why = {}, None

    def write(self, shard, head, chunks, advance):
        content = head + b"".join(map(bytes, chunks))
        if self.why:
            raise self.why
        advance(len(content))
        self.files[shard.file] = content
        return shard._replace(nbytes=len(content))


def saved(nodes, folder):
    """What is written of what is absent, by rank and variant."""
    manifest = two_states()._replace(**ABSENT)
    shards = nodes.sender.collected(manifest, HERE).write(folder, lambda _: None)
    return {(one.rank, one.variant): folder.files[one.file] for one in shards}


# --- to a disk ------------------------------------------------------------------------------------


def test_it_is_written_to_a_disk_as_it_comes(nodes, far):
    far.keep(2)
    folder = Folder()
    found = saved(nodes, folder)
    assert found == {(4, 1): HALVES[4], (5, 1): HALVES[5]}
    assert sorted(folder.files) == [
        "rank_4/ttp_rank_4-1_7.safetensors",
        "rank_5/ttp_rank_5-1_7.safetensors",
    ]


@pytest.mark.parametrize("lost", ["the node", "its file"])
def test_what_one_node_does_not_send_another_one_does(nodes, far, lost):
    far.keep(2, parts=(0,), nbytes=101 if lost == "its file" else 0)
    far.keep(2, parts=(1,))
    far.keep(3)
    if lost == "the node":
        far.kept[2].forget()
    folder = Folder()
    found = saved(nodes, folder)
    assert found == {(4, 1): HALVES[4], (5, 1): HALVES[5]}
    assert len(folder.files) == 2


def test_parts_of_different_nodes_make_up_a_state(nodes, far):
    far.keep(2, parts=(0,))
    far.keep(3, parts=(1,))
    assert saved(nodes, Folder()) == {(4, 1): HALVES[4], (5, 1): HALVES[5]}


def test_nobody_has_it_any_more(nodes, far):
    far.keep(2)
    nodes.sender.lose(2)
    with pytest.raises(LostStateError, match="in the memory of other nodes: no node is left"):
        saved(nodes, Folder())
    far.keep(3)
    far.kept[3].forget()
    with pytest.raises(LostStateError, match=r"127\.0\.0\.1: .*refused"):
        saved(nodes, Folder())


def test_no_two_files_get_one_name(nodes, far):
    """A rank may have brought another part of its state to the controller's node."""
    far.keep(2)
    manifest = two_states()
    near = Shard(manifest.shards[0].file, 4, REPLICATED, 9, "", variant=0)
    manifest = manifest._replace(shards=(*manifest.shards, near), **ABSENT)
    shards = nodes.sender.collected(manifest, HERE).write(Folder(), lambda _: None)
    assert [shard.file for shard in shards] == [
        "rank_4/ttp_rank_4-1_7-part1.safetensors",
        "rank_5/ttp_rank_5-1_7.safetensors",
    ]


def test_of_a_silent_node_it_is_not_awaited_for_long(nodes, far, monkeypatch):
    """A flush is given up where nothing moves, and another node has it."""
    monkeypatch.setattr(collected, "SILENT_S", 0.05)
    moved = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far.keep(2)
        far.keep(3)
        mute = {"port": silent.getsockname()[1]}
        for by_node in nodes.sender._donors._parts["second", 2].values():
            by_node[2] = by_node[2]._replace(**mute)
        manifest = two_states()._replace(**ABSENT)
        shards = nodes.sender.collected(manifest, HERE).write(Folder(), moved.append)
    assert [shard.rank for shard in shards] == [4, 5]
    assert moved[:2] == [0, 0]  # it moves: another one is asked


def test_a_disk_that_takes_nothing_is_not_taken_for_a_node_that_sends_nothing(nodes, far):
    far.keep(2)
    folder = Folder()
    folder.why = OSError("no space left")
    with pytest.raises(OSError, match="no space left"):
        saved(nodes, folder)


# --- to other nodes -------------------------------------------------------------------------------


def test_it_is_not_complete_once_nobody_has_a_part_of_it(nodes):
    manifest = two_states()._replace(**ABSENT)
    for places in ({}, {1: range(3, 4)}):
        orders = nodes.sender.begin(
            1, MEMORY, manifest, nodes.done.append, places, places, [], HERE
        )
        assert orders == {}
        assert nodes.done.pop() == sender.NOBODY


@pytest.mark.parametrize("absent", [(), (1,)])
def test_what_node_0_alone_has_goes_to_one_node_more(nodes, far, absent):
    """Before it is complete: node 0 may be lost, and the others save what they have."""
    far.keep(2)
    manifest, places = two_states()._replace(absent=absent), {1: range(3, 4), 4: range(1)}
    about = nodes.done.append, places, [1], [4], HERE
    orders = nodes.sender.begin(1, MEMORY, manifest, *about)
    assert {node: (order.own, order.late) for node, order in orders.items()} == {
        1: ((1,), ()),
        4: ((0,), ()),
    }
    assert [len(order.donors) for order in orders.values()] == [1, 0]


def test_what_nodes_of_new_ranks_get_as_well_comes_to_it_later(nodes, far):
    """It shares no line with what new ranks wait for, unless nodes could not save it together."""
    places = {1: range(3, 4), 4: range(1)}
    about = MEMORY, two_states(), nodes.done.append, places, [1], [4], HERE
    order = nodes.sender.begin(1, *about)[4]
    assert (order.own, order.late) == ((0,), (1,))
    order = nodes.sender.begin(1, *about, is_whole=True)[4]
    assert (order.own, order.late) == ((0, 1), ())
    order = nodes.sender.begin(1, *about, holding=(1,))[4]  # a rank that lives on holds the second
    assert (order.own, order.late) == ((0, 1), ())
    far.keep(2, parts=(0,))
    far.keep(3, parts=(1,))  # no node has it whole
    order = nodes.sender.begin(1, *about)[4]
    assert (order.own, order.late) == ((0,), (1,))
    far.keep(2)
    order = nodes.sender.begin(1, *about)[4]
    assert (order.own, order.late) == ((0,), ())


def test_what_is_little_is_not_sent_at_once_if_the_rest_is_elsewhere():
    """Node 0 has but the headers."""
    shards = [Shard(str(written_file(state_file(b"{}", b"x"))), 0, REPLICATED, 11, "")]
    try:
        manifest = manifest_of(shards, 2)
        assert parts.heads_of(manifest, 2) == ()
        assert parts.heads_of(manifest._replace(absent=(0,)), 2) == (10,)
    finally:
        os.close(int(shards[0].file))


@pytest.mark.parametrize("is_long", [True, False])
def test_late_tensors_come_once_that_is_said(nodes, is_long):
    about = nodes.done.append, {1: range(2, 3)}, [1], [1], HERE
    order = nodes.sender.begin(1, MEMORY, two_states(), *about)[1]
    nodes.keeper.take(order._replace(own=(0,), late=(1,)))
    nodes.run_until(lambda: nodes.told)
    path = Path(nodes.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path)
    held = HeldDump.at(str(path))
    assert held.manifest.absent == (1,)
    if not is_long:
        nodes.keeper.forget()
    nodes.keeper.complete()
    if is_long:
        nodes.run_until(lambda: nodes.came)
    assert nodes.came == [(held.inode, ())] * is_long  # the ranks that have it open hear of that
    held.close()


def test_a_late_node_is_not_sent_what_nobody_has_any_more(nodes):
    manifest = two_states()._replace(**ABSENT)
    order = nodes.sender.again(MEMORY, manifest, 1, range(3, 4), HERE)
    assert (order.own, order.donors) == ((1,), ())
    nodes.keeper.take(order)
    nodes.run_until(lambda: nodes.told)
    assert "no node sends what is missing" in nodes.told[0].why_not


def test_the_controllers_node_is_not_asked_for_what_it_lacks(nodes, far):
    for node in HERE:
        far.keep(node)
    places = {place: range(3, 4) for place in (1, 4, 5)}
    about = nodes.done.append, places, places, [], HERE
    orders = nodes.sender.begin(1, MEMORY, two_states()._replace(**ABSENT), *about)
    ports = {node: each._server.port for node, each in far.kept.items()}
    first = [order.donors[0].files[0].port for order in orders.values()]
    assert first == [ports[2], ports[3], ports[2]]
    assert [len(order.donors) for order in orders.values()] == [2, 2, 2]


# --- in the controller's memory -------------------------------------------------------------------


@pytest.fixture
def target():
    made = MemoryTarget(7, 0, 0)
    made.begin()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("is_cut", "content", "absent"),
    [(True, b"\x02" + bytes(7) + b"{}", (3,)), (True, b"\x02" + bytes(7) + b"{}" + b"x" * 90, ())],
)
def test_a_file_may_come_without_its_tensors(target, is_cut, content, absent):
    path = target.place_of(4)
    assert target.take(path, written_file(content), is_cut=is_cut)
    shard = target.accept(protocol.Written(4, 0, 1, "", 100, "", "d"), 3)
    assert (shard.nbytes, shard.variant, target.absent) == (100, 3, absent)


def test_a_file_that_has_to_have_its_tensors_is_not_taken_without_them(target):
    head = b"\x02" + bytes(7) + b"{}"
    for is_cut, content in ((False, head), (True, head + b"x")):
        path = target.place_of(4)
        assert target.take(path, written_file(content), is_cut=is_cut)
        with pytest.raises(OSError, match="bytes instead of 100"):
            target.accept(protocol.Written(4, 0, 1, "", 100, "", "d"), 3)
    assert target.absent == ()
