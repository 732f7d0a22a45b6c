"""Nodes whose ranks have written a state send it to those that start ranks, which get no other."""

import os
from pathlib import Path

import pytest
from support.memory_nodes import (
    HALVES,
    MEMORY,
    STATES,
    Donors,
    Nodes,
    state_file,
    two_states,
)

from agent.nodes.run_messages import Donor, DonorFile, PartKept
from agent.spread import memory_copy
from agent.spread.donors import KnownDonors
from worker_hooks.contract import protocol
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import REPLICATED
from worker_hooks.storage.memory_dump import HeldDump


class Node(Nodes):
    """Node 1 has rank 3, which resumes from the second state, and starts it."""

    here = range(3, 4)

    def __init__(self, monkeypatch):
        super().__init__()
        self.asked, fetch = [], memory_copy.fetch

        def noted(host, port, *about):
            self.asked.append(port)
            fetch(host, port, *about)

        monkeypatch.setattr(memory_copy, "fetch", noted)
        self.far = Donors(self.sender, (2, 3))

    def take(self, **changes):
        """What is there of the states, by writer, once it is said to be; and what is absent."""
        order = self.order()._replace(**changes)
        self.keeper.take(order)
        self.run_until(lambda: self.told)
        assert self.told[0].why_not == ""
        return self.there()

    def order(self):
        about = {1: self.here, 9: range(1)}, [1], [9], {2: "127.0.0.1"}  # node 9 has all of it
        return self.sender.begin(1, MEMORY, two_states(), self.done.append, *about)[1]

    @property
    def path(self):
        """As a rank there opens it."""
        return Path(self.keeper.as_here(protocol.Rejoin(1, MEMORY, "why")).path)

    def there(self):
        found = manifests.read(self.path)
        contents = {
            (one.variant, one.rank): (self.path.parent / one.file).read_bytes()[: one.nbytes]
            for one in found.shards
            if one.kind == REPLICATED and one.variant not in found.absent
        }
        return contents, found.absent

    def close(self):
        self.far.close()
        super().close()


@pytest.fixture
def node(monkeypatch):
    made = Node(monkeypatch)
    yield made
    made.close()


SENT = {
    (variant, variant): state_file(b"{}", tensors)
    for variant, tensors in enumerate(STATES.values())
}
DONATED = {(1, rank): content for rank, content in HALVES.items()}


def test_it_comes_from_the_ranks_that_wrote_it_and_the_headers_from_the_controllers_node(node):
    node.far.keep(2)
    assert node.take() == (DONATED, (0,))
    (donor,) = node.order().donors
    assert node.asked == [each.port for each in donor.files]
    (one,) = manifests.read(node.path).heads
    assert one.variant == 1
    assert (node.path.parent / one.file).read_bytes()[:10] == state_file(b"{}", b"")
    for shard in manifests.read(node.path).shards:
        if shard.variant == 1:
            with pytest.raises(PermissionError):  # nobody changes it any more
                os.pwrite(int(shard.file), b"x", 0)


def test_of_states_of_which_no_rank_there_resumes_only_headers_come(node):
    assert node.take() == ({(1, 1): SENT[1, 1]}, (0,))
    dump = HeldDump.at(str(node.path))
    shards = enumerate(dump.manifest.shards)
    (far,) = (at for at, one in shards if one.variant == 0 and one.kind == REPLICATED)
    with pytest.raises(OSError, match="its tensors are on another node"):
        dump.file(far)
    assert not node.keeper.lacks()
    answers = []
    node.keeper.bring(dump.inode, (0,), lambda *about: answers.append(about))
    node.run_until(lambda: answers)
    assert answers == [("", ())]
    assert node.there() == (SENT, ())
    dump.close()


@pytest.mark.parametrize("lost", ["the node", "a file", "its memory"])
def test_from_the_controllers_node_comes_what_no_other_sends(node, lost):
    node.far.keep(2)
    order = node.order()
    (donor,) = order.donors
    if lost == "the node":
        node.far.close()
    if lost == "a file":
        files = donor.files[0], donor.files[1]._replace(key="00" * 32)
        order = order._replace(donors=(donor._replace(files=files),))
    if lost == "its memory":
        files = tuple(each._replace(nbytes=each.nbytes + 1) for each in donor.files)
        order = order._replace(donors=(donor._replace(files=files),))
    node.keeper.take(order)
    node.run_until(lambda: node.told)
    assert node.told[0].why_not == ""
    assert node.there() == ({(1, 1): SENT[1, 1]}, (0,))


def test_what_a_rank_waits_for_does_not_fail_with_what_nobody_reads(node, monkeypatch):
    """The node has no room for that."""
    bring = memory_copy.MemoryCopy.bring

    def scarce(copy, variants, files):
        if 0 in variants:
            raise OSError("no room")
        bring(copy, variants, files)

    monkeypatch.setattr(memory_copy.MemoryCopy, "bring", scarce)
    node.take(own=())
    dump, answers = HeldDump.at(str(node.path)), []
    for variants in ((1,), (0,)):
        node.keeper.bring(dump.inode, variants, lambda *told: answers.append(told))
    node.run_until(lambda: len(answers) == 2)
    assert answers == [("", (0,)), ("no room", (0,))]
    dump.close()


def test_each_of_those_that_have_it_sends_it_to_some_nodes(node):
    for each in (2, 3):
        node.far.keep(each)
    starting = (1, 2, 4, 5)
    places = {**{place: range(3, 4) for place in starting}, 9: range(1)}
    about = node.done.append, places, starting, [9], {2: "two", 3: "three"}
    orders = node.sender.begin(1, MEMORY, two_states(), *about)
    asked = {place: [donor.files[0].host for donor in orders[place].donors] for place in starting}
    assert all(orders[place].own == (1,) for place in starting)
    assert asked == {1: ["two", "three"], 2: ["three"], 4: [], 5: ["two", "three"]}


def kept(part, **changes):
    return PartKept(1, "d", part, 2, 6 + part, 9, 77, "ab")._replace(**changes)


def known(*told):
    found = KnownDonors()
    found.begin(1)
    for node, each in told:
        found.hear(node, each)
    return found


def donor(*hosts):
    files = (DonorFile(6 + part, 9, host, 77, "ab") for part, host in enumerate(hosts))
    return Donor(0, tuple(files))


def test_every_part_is_somewhere():
    donors = known((4, kept(1)), (4, kept(0)), (5, kept(0)))
    both = [donor("a", "a"), donor("b", "a")]
    assert donors.found({4: "a", 5: "b", 6: "c"}) == {"d": both}
    assert donors.found({4: "a"}) == {"d": both[:1]}
    assert donors.found({5: "b"}) == {}


def test_parts_that_different_nodes_have_make_up_a_state():
    donors = known((4, kept(0)), (5, kept(1)))
    assert donors.found({4: "a", 5: "b"}) == {"d": [donor("a", "b")]}
    assert known((4, kept(0)), (5, kept(0))).found({4: "a", 5: "b"}) == {}
    # of another cut
    assert known((4, kept(0)), (5, kept(1, parts=3))).found({4: "a", 5: "b"}) == {}


def test_a_donor_is_none_any_more_once_its_node_is_lost():
    donors = known((4, kept(1)), (4, kept(0)))
    donors.begin(1)  # another round of the same
    assert donors.found({4: "a"})
    donors.lose(4)
    assert not donors.found({4: "a"})
    donors = known((4, kept(1)))
    donors.begin(2)
    donors.hear(4, kept(0))  # late, of the one before
    assert not donors.found({4: "a"})


def test_the_dump_before_counts_until_the_next_one():
    """All return to it if that one fails."""
    donors = known((4, kept(1)), (4, kept(0)), (5, kept(1)), (5, kept(0)))
    donors.begin(2)
    donors.lose(4)
    assert donors.found({4: "a", 5: "b"}) == {"d": [donor("b", "b")]}
    donors.begin(3)
    assert donors.found({5: "b"}) == {}
