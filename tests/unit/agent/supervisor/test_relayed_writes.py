"""What ranks write to memory on a node without the controller: for the controller's node, and for this one."""

import fcntl
import os
from pathlib import Path

import pytest
from support.jobs import poll
from support.relayed_node import RelayedNode

from agent.nodes.run_messages import FromRank, SaveHere, pack_said, unpack_said
from agent.spread.far_writes import MemoryInboxes
from worker_hooks.contract import protocol, wire


@pytest.fixture
def node():
    node = RelayedNode()
    yield node
    node.close()


def far_save(node, rank=4):
    """The order, and what has come to the controller's node."""
    taken = []
    inboxes = MemoryInboxes(
        node.loop.call_soon_threadsafe, lambda _: None, lambda *about: taken.append(about)
    )
    save = protocol.Save(3, 6, "/proc/1/fd/9", 0, 1, is_quick=True, round=2)
    return inboxes, inboxes.order(rank, save), taken


def test_what_a_rank_writes_to_memory_goes_to_the_controllers_node(node):
    client, _ = node.registered()
    inboxes, order, taken = far_save(node)
    node.relay.hear(order)
    got, _ = wire.receive(client)
    assert got._replace(folder="") == protocol.Save(3, 6, "", 0, 1, is_quick=True, round=2)
    assert got.folder.startswith(f"/proc/{os.getpid()}/fd/")
    Path(got.folder).write_bytes(b"state")
    node.said.clear()
    written = protocol.Written(4, 0, 3, "", 5, "", "digest", 2)
    node.say(client, written)
    poll(lambda: node.turn() or any(isinstance(each, FromRank) for each in node.said))
    told = [unpack_said(each.message) for each in node.said if isinstance(each, FromRank)]
    assert told == [written]
    ((dump_id, path, file, is_cut),) = taken
    assert (dump_id, is_cut) == (3, False)
    assert (path, os.pread(file, 9, 0)) == ("/proc/1/fd/9", b"state")
    os.close(file)
    inboxes.close()


def test_a_rank_gets_no_order_where_there_is_no_room_for_what_it_would_write(node):
    client, _ = node.registered()
    node.say(client, protocol.Frozen(4, 0, 3, 6, True, nbytes=1 << 40))
    node.said.clear()
    inboxes, order, _ = far_save(node)
    node.relay.hear(order)
    (failed,) = (unpack_said(each.message) for each in node.said if isinstance(each, FromRank))
    assert (failed.rank, failed.dump_id, failed.is_place, failed.round) == (4, 3, True, 2)
    inboxes.close()


def test_a_rank_that_is_to_say_what_it_holds_writes_it_to_its_node_as_well(node):
    client, _ = node.registered()
    node.say(client, protocol.Frozen(4, 0, 3, 6, True, nbytes=1 << 20))
    digest = protocol.Save(3, 6, "", is_quick=True, round=2)
    node.relay.hear(SaveHere(((4,),), pack_said(digest)))
    got, _ = wire.receive(client)
    assert got == digest._replace(folder=got.folder, part=0, parts=1)
    Path(got.folder).write_bytes(b"state")
    node.said.clear()
    node.say(client, protocol.Written(4, 0, 3, "", 5, "", "d", 2))
    told = [unpack_said(each.message) for each in node.said if isinstance(each, FromRank)]
    assert told == [protocol.Digested(4, 0, 3, "d", 2)]
    node.relay.hear(SaveHere(((4,),), pack_said(digest._replace(round=3))))
    wire.receive(client)
    node.say(client, protocol.SaveFailed(4, 0, 3, "no room", is_place=True, round=3))
    assert wire.receive(client)[0] == digest._replace(round=3)
    ((part,),) = node.relay.writes.here.take().parts.values()
    assert os.pread(part.file, 9, 0) == b"state"
    os.close(part.file)


def empty_files(node):
    """Which of those that a rank was ordered to write nobody may write any more."""
    return [
        not os.fstat(owed.file).st_size
        and bool(fcntl.fcntl(owed.file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW)
        for owed in node.relay.writes._owed.values()
    ]


@pytest.mark.parametrize("end", ["another place", "a death", "the loss of node 0"])
def test_what_a_rank_was_to_write_to_its_node_is_freed(node, end):
    client, _ = node.registered()
    node.say(client, protocol.Frozen(4, 0, 3, 6, True, nbytes=1 << 20))
    digest = protocol.Save(3, 6, "", is_quick=True, round=2)
    node.relay.hear(SaveHere(((4,),), pack_said(digest)))
    assert empty_files(node) == [False]
    if end == "another place":
        node.relay.tell(4, digest._replace(is_quick=False))
    elif end == "a death":
        node.relay.hear_out(4)
    else:
        node.relay.forsake("node 0 is gone", is_proven=True)
    assert empty_files(node) == ([] if end == "a death" else [True])
