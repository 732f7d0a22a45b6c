"""A checkpoint in memory goes to other nodes, whose ranks read it there."""

import errno
import os
import threading
import zlib
from pathlib import Path

import pytest
from support.memory_nodes import DEADLINE_S, MEMORY, Nodes, in_memory, ranks, state_file

from agent.nodes.run_messages import TakeMemory
from agent.nodes.transfer import MemoryServer
from agent.spread import keeper, memory_copy, parts, room, sender
from agent.spread.parts import spans_of
from worker_hooks.contract import protocol
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import PRIVATE, REPLICATED
from worker_hooks.storage.memory_dump import HeldDump


@pytest.fixture(params=["with the order", "fetched"])
def comes(request, monkeypatch):
    """How what a node needs at once comes there."""
    if request.param == "fetched":
        monkeypatch.setattr(sender, "MOST_INSIDE", 0)
    return request.param


@pytest.fixture
def nodes(comes):
    assert comes
    made = Nodes()
    yield made
    made.close()


def test_the_copy_has_every_file_under_its_own_number(nodes):
    contents = [b"zero" * 100, b"one" * 10, b"two"]
    manifest = in_memory(contents)
    order = nodes.sender.begin(1, "/proc/1/fd/9", manifest, nodes.done.append, ranks(1))[1]
    nodes.keeper.take(order)
    nodes.run_until(lambda: nodes.told)
    (taken,) = nodes.told
    assert taken.why_not == ""
    here = Path(nodes.keeper.as_here(protocol.Rejoin(1, taken.path, "why")).path)
    assert manifests.is_in_memory(here)
    copy, folder = manifests.read(here), here.parent
    assert {one.rank: (folder / one.file).read_bytes() for one in copy.shards} == dict(
        enumerate(contents)
    )
    assert copy._replace(shards=(), saved_at=0) == manifest._replace(shards=(), saved_at=0)


def in_one_file(contents):
    """The state, and what ranks alone have, which is together in one file, the last rank first."""
    manifest = in_memory([b"state", b"".join(reversed(contents))])
    together, state = manifest.shards
    shards, at = [state], 0
    for rank in reversed(range(len(contents))):
        shards.append(together._replace(rank=rank, at=at, nbytes=len(contents[rank])))
        at += len(contents[rank])
    return manifest._replace(shards=tuple(shards), world_size=len(contents))


@pytest.mark.parametrize("most_whole", [0, 1])
def test_what_ranks_alone_have_is_sent_in_as_few_pieces_as_it_lies_in(
    nodes, monkeypatch, most_whole
):
    monkeypatch.setattr(sender, "MOST_WHOLE", most_whole)
    monkeypatch.setattr(parts, "PEERS", 2)
    contents = [b"%d" % rank * (1 + rank % 3) for rank in range(9)]  # of rank 0 a byte, and so on
    contents[4] = b""
    manifest = in_one_file(contents)._replace(stale_private=(7,))
    order = nodes.sender.begin(1, MEMORY, manifest, nodes.done.append, {3: range(6, 8)})[3]
    sent = manifests.decode(order.manifest)
    # ranks 6 to 8 adjoin, as does 0 to itself
    assert len(spans_of(sent)) == (2 if most_whole else 3)
    nodes.keeper.take(order)
    nodes.run_until(lambda: nodes.told)
    here = Path(nodes.keeper.as_here(protocol.Welcome(nodes.told[0].path)).resume)
    copy, folder = manifests.read(here), here.parent
    found = {
        one.rank: (folder / one.file).read_bytes()[one.at :][: one.nbytes]
        for one in copy.shards
        if one.kind == PRIVATE
    }
    wanted = range(9) if most_whole else (6, 7, 8, 0)
    assert found == {rank: contents[rank] for rank in wanted}
    held = HeldDump(folder, copy)  # as a rank opens it
    assert len(set(held.manifest.shards)) == len(copy.shards)
    held.close()


@pytest.mark.parametrize(
    ("lacks", "found"),
    [
        ("nothing", [0, 2]),
        ("the step", [0, 2, 3, 4]),
        ("the commit", [0, 2, 3, 4]),
        ("all", [0, 3, 4]),
    ],
)
def test_what_other_ranks_alone_have_is_for_ranks_that_lack_their_own(
    nodes, monkeypatch, lacks, found
):
    monkeypatch.setattr(sender, "MOST_WHOLE", 0)
    monkeypatch.setattr(parts, "PEERS", 2)
    manifest = in_memory([b"state", *(b"own" for _ in range(5))])
    if lacks == "the step":
        manifest = manifest._replace(stale_private=(2,))
    shards = (
        each._replace(is_early=each.rank == 2 and lacks == "the commit")
        for each in manifest.shards
        if each.rank != 2 or lacks != "all"
    )
    manifest = manifest._replace(shards=tuple(shards))
    order = nodes.sender.begin(1, "p", manifest, nodes.done.append, ranks(2))[2]
    assert sorted(each.rank for each in manifests.decode(order.manifest).shards) == found


def test_of_many_nodes_only_the_first_get_what_ranks_of_others_alone_have(
    nodes, comes, monkeypatch
):
    monkeypatch.setattr(sender, "MOST_WHOLE", 2)
    monkeypatch.setattr(parts, "PEERS", 2)
    manifest = in_memory([b"state", *(b"own" for _ in range(7))])  # of rank 0 nothing is private
    manifest = manifest._replace(stale_private=(7,))
    places = {node: range(2 * node, 2 * node + 2) for node in (1, 2, 3)}
    orders = nodes.sender.begin(1, "p", manifest, nodes.done.append, places)
    sent = {node: manifests.decode(order.manifest) for node, order in orders.items()}
    found = {node: [each.rank for each in one.shards] for node, one in sent.items()}
    # of its own ranks, and of the two behind them that have something
    assert {node: sorted(each) for node, each in found.items()} == {
        1: [*range(8)],
        2: [*range(8)],
        3: [0, 1, 2, 6, 7],
    }
    assert len({order.key for order in orders.values() if order.key}) == 3 * (comes == "fetched")


def test_what_comes_with_the_order_needs_no_connection(nodes, comes):
    contents = [b"state" * 100, b"own"]
    order = nodes.sender.begin(1, MEMORY, in_memory(contents), nodes.done.append, ranks(1))[1]
    nodes.sender.close()
    nodes.keeper.take(order)
    nodes.run_until(lambda: nodes.told)
    if comes == "fetched":
        assert "refused" in nodes.told[0].why_not
    else:
        path = Path(nodes.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path)
        assert contents_at(path) == dict(enumerate(contents))


@pytest.mark.parametrize("comes", ["with the order"], indirect=True)
@pytest.mark.parametrize(
    "other",
    [
        {"private": b"o"},
        {"private": b"owns"},
        {"alike": zlib.compress(bytes(400))},
        {"alike": b"nothing"},
    ],
)
def test_another_content_than_the_manifests_is_refused(nodes, other):
    manifest = in_memory([b"state" * 100, b"own"])
    order = nodes.sender.begin(1, MEMORY, manifest, nodes.done.append, ranks(1))[1]
    nodes.keeper.take(order._replace(**other))
    nodes.run_until(lambda: nodes.told)
    why = "decompressing" if other == {"alike": b"nothing"} else "in place of"
    assert why in nodes.told[0].why_not


@pytest.mark.parametrize("comes", ["with the order"], indirect=True)
def test_orders_to_many_nodes_hold_little_together(nodes, monkeypatch):
    """They wait in the memory of the controller's node."""
    manifest = in_memory([b"state", *(b"of this rank alone" for _ in range(4))])
    for most, are_fetched in ((400, False), (100, True)):
        monkeypatch.setattr(sender, "MOST_TO_ALL", most)
        orders = nodes.sender.begin(1, "p", manifest, nodes.done.append, ranks(1, 2, 3, 4))
        assert {bool(each.key) for each in orders.values()} == {are_fetched}
        inside = sum(len(each.alike) + len(each.private) for each in orders.values())
        assert inside <= most


def test_it_is_done_once_all_nodes_have_answered(nodes):
    nodes.sender.begin(1, "p", in_memory([b"x"]), nodes.done.append, ranks(1, 2, 3))
    nodes.sender.hear(1, "p", "")
    nodes.sender.hear(2, "another", "")  # about one before
    nodes.sender.lose(3)
    assert nodes.done == []
    nodes.sender.hear(2, "p", "")
    assert nodes.done == [""]


def test_one_node_without_room_is_enough_to_fail(nodes):
    nodes.sender.begin(1, "p", in_memory([b"x"]), nodes.done.append, ranks(1, 2))
    nodes.sender.hear(1, "p", "no room")
    nodes.sender.hear(2, "p", "")
    assert nodes.done == ["no room"]


def test_without_other_nodes_it_is_done_at_once(nodes):
    assert nodes.sender.begin(1, "p", in_memory([b"x"]), nodes.done.append, {}) == {}
    assert nodes.done == [""]


def test_what_was_forgotten_meanwhile_is_not_kept(nodes):
    order = nodes.sender.begin(1, "p", in_memory([b"x" * 9]), nodes.done.append, ranks(1))[1]
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
    assert taken.path == "p"
    assert "refused" in taken.why_not


def test_ranks_are_told_of_the_copy_here_or_of_no_file(nodes):
    order = nodes.sender.begin(1, MEMORY, in_memory([b"x"]), nodes.done.append, ranks(1))[1]
    rejoin, welcome = protocol.Rejoin(1, MEMORY, "why"), protocol.Welcome(MEMORY)
    for message, place in ((rejoin, "path"), (welcome, "resume")):
        told = getattr(nodes.keeper.as_here(message), place)
        assert told == keeper.NOWHERE
        assert not Path(told).exists()
    nodes.keeper.take(order)
    nodes.run_until(lambda: nodes.told)
    here = nodes.keeper.as_here(rejoin).path
    assert here == nodes.keeper.as_here(welcome).resume != MEMORY
    assert manifests.read(Path(here)).step == 7
    nodes.keeper.forget()
    assert nodes.keeper.as_here(rejoin).path == keeper.NOWHERE
    for other in (protocol.Rejoin(1, "/disk", "why"), protocol.Welcome(""), protocol.GoOn(1)):
        assert nodes.keeper.as_here(other) is other


# --- tensors that stay where they are -------------------------------------------------------------


LARGE = [
    state_file(b"{head}", bytes(range(256)) * 8192),
    *(state_file(b"{}", b"own of %d" % rank) for rank in (1, 2, 3)),
]


@pytest.fixture
def partial(nodes):
    """The copy of a node that starts no rank, as a rank there opens it; the node that does is 2."""
    orders = nodes.sender.begin(
        1, MEMORY, in_memory(LARGE), nodes.done.append, ranks(1, 2), [2], [2]
    )
    nodes.keeper.take(orders[1])
    nodes.run_until(lambda: nodes.told)
    assert nodes.told[0].why_not == ""
    return Path(nodes.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path)


def contents_at(path):
    """What the files of a manifest in memory have, by rank."""
    found = manifests.read(path).shards
    return {
        one.rank: (path.parent / one.file).read_bytes()[one.at :][: one.nbytes] for one in found
    }


def inode(path):
    """What a rank that has the copy open knows it by."""
    return HeldDump.at(str(path)).inode


def brought(nodes, path):
    """What the keeper answers to a rank that has to read the tensors."""
    answers = []
    nodes.keeper.bring(inode(path), (0,), lambda why, _: answers.append(why))
    nodes.run_until(lambda: answers)
    return answers[0]


@pytest.mark.parametrize(
    ("starting", "living", "whole"),
    [
        ([2], [1, 2, 3], {2}),
        ([2], [1, 3], {1, 2}),  # a new rank could not save it yet if the controller's node was lost
        ([2, 3], [1, 3], {2, 3}),
        ([2], [], {1, 2}),
        ([], [2, 3], {2}),  # all that start are on the controller's node
        ([1, 2, 3], [], {1, 2, 3}),
    ],
)
def test_tensors_go_to_nodes_that_start_ranks_and_to_one_where_ranks_live_on(
    nodes, comes, starting, living, whole
):
    places, done = ranks(1, 2, 3), nodes.done.append
    orders = nodes.sender.begin(1, MEMORY, in_memory(LARGE), done, places, starting, living)
    assert {node for node, order in orders.items() if order.own or order.late} == whole
    assert all(order.heads == (14,) and order.rest for order in orders.values())
    keys = {key for order in orders.values() for key in (order.key, order.rest)}
    assert len(keys) == (4 if comes == "fetched" else 2)  # the tensors' is the same for all


def test_a_sender_without_descriptors_fails_as_a_node_without_room_does(nodes, monkeypatch):
    manifest = in_memory(LARGE)
    closed, close = [], MemoryServer.close
    with monkeypatch.context() as changed:
        changed.setattr(
            MemoryServer, "close", lambda server: (closed.append(server), close(server))
        )
        changed.setattr(os, "dup", lambda _: os.open("/nowhere", os.O_RDONLY))
        done = nodes.done.append
        assert nodes.sender.begin(1, MEMORY, manifest, done, ranks(1, 2), [2], [2]) == {}
    assert nodes.done == ["No such file or directory: /nowhere"]
    nodes.sender.lose(1)
    assert len(nodes.done) == 1
    assert len(closed) == 1


@pytest.mark.parametrize("comes", ["with the order"], indirect=True)
def test_names_of_tensors_are_many_and_become_few(nodes, monkeypatch):
    header = b",".join(b'"model.layers.%d.weight":[4096,4096]' % layer for layer in range(4096))
    manifest = in_memory([state_file(header, bytes(1 << 20)), b"own"])
    assert len(header) > sender.MOST_INSIDE
    about = ranks(1, 2), [2], [2]
    order = nodes.sender.begin(1, MEMORY, manifest, nodes.done.append, *about)[1]
    assert not order.key
    nodes.keeper.take(order)
    nodes.run_until(lambda: nodes.told)
    path = Path(nodes.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path)
    assert contents_at(path) == {0: state_file(header, b""), 1: b"own"}
    monkeypatch.setattr(sender, "MOST_HEADS", len(header))  # without the number of its bytes
    assert nodes.sender.begin(1, MEMORY, manifest, nodes.done.append, *about)[1].key


def test_few_tensors_go_to_all(nodes):
    manifest = in_memory([state_file(b"{}", b"few"), b"own"])
    orders = nodes.sender.begin(1, MEMORY, manifest, nodes.done.append, ranks(1, 2), [2], [2])
    assert not any(order.heads or order.rest for order in orders.values())


def test_few_tensors_go_to_all_of_few_nodes(nodes, monkeypatch):
    """Thousands of nodes that get what most of them do not read have the controller's node send."""
    manifest = in_memory([state_file(b"{}", b"few"), b"own"])
    monkeypatch.setattr(parts, "MOST_TO_ALL", 12)
    for count, are_few in ((3, True), (4, False)):
        places = ranks(*range(1, count + 1))
        orders = nodes.sender.begin(1, MEMORY, manifest, nodes.done.append, places, [2], [2])
        assert {not each.heads for each in orders.values()} == {are_few}


def test_a_partial_copy_has_all_but_the_tensors_and_nobody_takes_it_for_whole(partial):
    found = contents_at(partial)
    assert manifests.read(partial).absent
    assert found[0] == LARGE[0][:14]  # who reads on comes to the end, and to no zeros
    assert found[1] == LARGE[1]
    dump = HeldDump.at(str(partial))
    numbers = {shard.kind: number for number, shard in enumerate(dump.manifest.shards)}
    with pytest.raises(OSError, match="its tensors are on another node"):
        dump.file(numbers[REPLICATED])
    assert b"".join(dump.file(numbers[PRIVATE]).tensors).startswith(b"own of")
    dump.close()


def test_the_tensors_are_brought_once_a_rank_reads_them(nodes, partial):
    dump = HeldDump.at(str(partial))  # a rank has it open
    answers = []
    for _ in range(2):  # two ranks
        nodes.keeper.bring(inode(partial), (0,), lambda *about: answers.append(about))
    nodes.run_until(lambda: len(answers) == 2)
    assert answers == [("", ()), ("", ())]
    assert (inode(partial), ()) in nodes.came
    assert contents_at(partial)[0] == LARGE[0]
    with pytest.raises(PermissionError):  # nobody changes them any more
        os.pwrite(int(manifests.read(partial).shards[0].file), b"x", 20)
    dump.complete()
    number = [shard.kind for shard in dump.manifest.shards].index(REPLICATED)
    assert b"".join(dump.file(number).tensors) == LARGE[0][14:]
    dump.close()
    now = Path(nodes.keeper.as_here(protocol.Rejoin(2, MEMORY, "why")).path)
    assert not manifests.read(now).absent
    assert contents_at(now) == contents_at(partial)
    for path in (now, partial):  # whoever had the order before it was whole
        assert brought(nodes, path) == ""


def test_the_tensors_can_be_had_until_the_memory_is_freed(nodes, partial):
    for node in (1, 2):
        nodes.sender.hear(node, MEMORY, "")
    assert nodes.done == [""]
    assert brought(nodes, partial) == ""


def test_nothing_is_sent_of_what_has_failed(nodes, partial):
    nodes.sender.hear(1, MEMORY, "")
    nodes.sender.hear(2, MEMORY, "no room")
    assert nodes.done == ["no room"]
    assert "refused" in brought(nodes, partial)


def test_a_rank_is_told_why_the_tensors_cannot_be_brought(nodes, partial, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(room, "free_bytes", lambda: 1 << 20)
        assert "no room for the state" in brought(nodes, partial)
    assert manifests.read(partial).absent
    assert brought(nodes, partial) == ""  # there is room again


def test_a_rank_is_told_that_no_descriptor_is_left(nodes, partial, monkeypatch):
    """An error that nobody takes would end msrun, and with it all ranks of the node."""
    dup, made = os.dup, []

    def scarce(file):
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(dup(file))
        return made[0]

    closed, close_all = [], memory_copy.close_all
    with monkeypatch.context() as changed:
        changed.setattr(os, "dup", scarce)
        changed.setattr(
            memory_copy, "close_all", lambda files: (closed.extend(files), close_all(files))
        )
        assert "Too many open files" in brought(nodes, partial)
    assert closed == made != []
    with monkeypatch.context() as changed:
        changed.setattr(memory_copy, "manifest_file", lambda *_: os.open("/nowhere", os.O_RDONLY))
        assert "No such file" in brought(nodes, partial)
    assert contents_at(partial)[0] == LARGE[0]
    assert brought(nodes, partial) == ""  # the tensors had come


def test_tensors_of_a_controller_that_is_gone_do_not_come(nodes, partial):
    nodes.sender.close()
    assert "refused" in brought(nodes, partial)


def test_what_is_forgotten_meanwhile_is_said_to_be(nodes, partial, monkeypatch):
    answers, is_forgotten = [], threading.Event()
    fetch = memory_copy.fetch
    monkeypatch.setattr(
        memory_copy, "fetch", lambda *args: is_forgotten.wait(DEADLINE_S) and fetch(*args)
    )
    known = inode(partial)
    nodes.keeper.bring(known, (0,), lambda why, _: answers.append(why))
    nodes.keeper.forget()
    assert answers == [keeper.FORGOTTEN]
    other = os.memfd_create("of the same number, perhaps")
    is_forgotten.set()
    nodes.calls.get(timeout=DEADLINE_S)()  # the thread has filled files that are nobody's
    assert os.fstat(other).st_size == 0
    os.close(other)
    nodes.keeper.bring(known, (0,), lambda why, _: answers.append(why))
    assert answers == [keeper.FORGOTTEN] * 2


def test_a_rank_that_has_an_older_copy_open_is_not_told_of_a_newer_one(nodes, partial):
    """The numbers of files are used again, so the newer one may lie at the same path."""
    dump, answers = HeldDump.at(str(partial)), []
    nodes.told.clear()
    places = ranks(1, 2)
    newer = nodes.sender.begin(2, MEMORY, in_memory(LARGE), nodes.done.append, places, [2], [2])
    nodes.keeper.take(newer[1])
    nodes.run_until(lambda: nodes.told)
    now = Path(nodes.keeper.as_here(protocol.Rejoin(2, MEMORY, "why")).path)
    nodes.keeper.bring(dump.inode, (0,), lambda why, _: answers.append(why))
    assert answers == [keeper.FORGOTTEN]
    assert brought(nodes, now) == ""
    dump.close()


def test_heads_of_other_files_are_refused(nodes):
    order = nodes.sender.begin(
        1, MEMORY, in_memory(LARGE), nodes.done.append, ranks(1, 2), [2], [2]
    )[1]
    for heads in ((), (1 << 40,), (14, 14)):
        nodes.told.clear()
        nodes.keeper.take(order._replace(heads=heads or (-1,)))
        nodes.run_until(lambda: nodes.told)
        assert "ValueError" in nodes.told[0].why_not
