"""Copies of node 0's pages on another node, in the hands of its ranks."""

import os
from types import SimpleNamespace

import pytest
from support.status_pages import kept, make, write

from agent.hooks import page_copies as module
from agent.hooks.page_copies import CopiedPages, PageCopies
from agent.nodes.messages import pack, unpack
from agent.nodes.run_messages import PagesTold
from worker_hooks.contract import protocol
from worker_hooks.guard.peers import KnownPeers
from worker_hooks.storage.private_records import record

LOOP = SimpleNamespace(call_later=lambda *_: None)


class Links:
    """The ranks 4 and 5 of the other node."""

    def __init__(self):
        self.peers = {4: KnownPeers(), 5: KnownPeers()}
        self.is_full = False

    def send(self, rank, message, fds):
        assert isinstance(message, protocol.PeerPages)
        if not self.is_full:
            self.peers[rank].learn(message.ranks, message.pids, [os.dup(fd) for fd in fds])
        return not self.is_full


class Line:
    """Node 0 with the page of rank 0, the other node with copies of it, and what travels."""

    def __init__(self):
        self.pages, self.page = kept()
        self.links, self.said, self.kinds, self.kept = Links(), [], [], []
        self.sent = []
        self.copied = CopiedPages(self.links, (4, 5))
        self.copies = PageCopies(self.pages, (0, 1), self.said.append, self.kept.append)

    def take(self, message):
        self.kinds.append(type(message).__name__)
        self.copied.take(unpack(pack(message)), LOOP)

    def seen(self, rank=4, of=0):
        """The newest step that a rank of the other node finds there; ``None``: it has no page."""
        page = self.links.peers[rank].pages().get(of)
        return None if page is None else getattr(record(page, 10**6), "step", 0)

    def close(self):
        self.copied.clear()
        self.pages.clear()
        self.page = None  # with its file
        for peers in self.links.peers.values():
            peers.forget()


@pytest.fixture
def line():
    line = Line()
    yield line
    line.close()


def test_what_a_rank_writes_is_seen_on_the_other_node(line):
    write(line.page, 3, 3)
    line.copies.begin(line.take)
    assert line.kinds == ["PageSeen"]  # rank 1 has no page yet
    assert line.seen() is None  # rank 4 has not registered: it expects no pages
    line.copied.registered(4, LOOP)
    assert line.seen() == 3
    write(line.page, 4, 4)
    line.copies.tell(0)
    assert line.kinds == ["PageSeen", "PageNews"]
    assert line.seen() == 4
    line.copied.registered(5, LOOP)  # later, and gets all of it
    assert line.seen(5) == 4
    peers = line.links.peers[4]
    assert (peers.copied, list(peers), peers.awake(), peers.gone()) == ({0}, [], set(), set())


def test_the_other_node_confirms_what_was_sent_before(line):
    told = PagesTold(0, 5)
    line.copies.confirm(told)
    assert line.kept == [told]  # nobody keeps copies
    line.copies.begin(line.sent.append)
    assert line.sent[-1:] == [told]  # the node before may not have answered
    line.copies.confirm(PagesTold(0, 6))
    assert (line.sent[-1], line.kept) == (PagesTold(0, 6), [told])


def test_another_page_of_a_rank_takes_the_place_of_the_last(line):
    line.copies.begin(line.take)
    line.copied.registered(4, LOOP)
    fd, page = make(0, attempt=1)
    write(page, 9, 9)
    line.pages.keep(0, 1, fd)
    line.copies.show(0)
    assert line.seen() == 9


def test_a_process_that_takes_a_ranks_place_gets_the_pages(line):
    write(line.page, 3, 3)
    line.copies.begin(line.take)
    line.copied.registered(4, LOOP)
    line.copied.drop(4)
    line.links.peers[4].forget()
    line.copies.show(0)
    assert line.seen() is None
    line.copied.registered(4, LOOP)
    assert line.seen() == 3


def test_pages_are_sent_again_when_the_kernel_took_none(line):
    line.links.is_full = True
    line.copies.begin(line.take)
    line.copied.registered(4, LOOP)
    assert line.seen() is None
    line.links.is_full = False
    line.copied.share(LOOP)
    assert line.seen() == 0


def test_pages_that_another_node_keeps_from_now_on_are_forgotten(line):
    write(line.page, 3, 3)
    line.copies.begin(line.take)
    line.copied.registered(4, LOOP)
    line.copied.registered(5, LOOP)
    line.links.is_full = True
    line.copied.leave(LOOP)
    assert line.seen() == 3
    line.links.is_full = False
    line.copied.share(LOOP)
    assert [line.links.peers[rank].copied for rank in (4, 5)] == [set(), set()]
    line.copies.begin(line.take)  # it is the next one again
    assert [line.seen(rank) for rank in (4, 5)] == [3, 3]


def test_a_page_is_sent_as_that_of_its_own_attempt(line):
    """The job may have begun another one, whose page it has not sent yet."""
    line.copies.begin(line.take)
    line.copied.registered(4, LOOP)
    fd, page = make(0, attempt=1)
    write(page, 9, 9)
    line.pages.keep(0, 1, fd)
    line.copies.begin(line.take)
    assert line.seen() == 9


def test_a_new_next_node_gets_all_of_it(line):
    line.copies.begin(line.take)
    line.copies.begin(None)
    write(line.page, 3, 3)
    line.copies.tell(0)
    assert line.kinds == ["PageSeen"]
    line.copies.begin(line.take)
    line.copied.registered(4, LOOP)
    assert line.seen() == 3


def test_a_page_that_fits_no_message_is_said_once(line, monkeypatch):
    monkeypatch.setattr(module, "MOST_SHOWN", 10)
    line.copies.begin(line.take)
    line.copies.show(0)
    line.copies.tell(0)
    assert line.kinds == []
    (said,) = line.said
    assert said.startswith("what rank 0 alone holds (buffers, data position, variables) is too")


# --- what its ranks have said -----------------------------------------------------------------------

HELLO = protocol.Hello(0, 0, 77, "/c", wants_resume=False)
REGISTERED = protocol.Registered(0, 0, 2)


def test_what_a_rank_has_said_that_stays_true_is_known_there_with_its_page(line):
    line.copies.hear(HELLO)  # before another node keeps copies
    line.copies.begin(line.take)
    line.copies.hear(REGISTERED)
    line.copies.hear(protocol.Leaving(0, 0))
    line.copies.hear(REGISTERED._replace(rank=4))  # of another node, which does not die with this
    told = dict(line.copied.told())
    assert list(told) == [HELLO, REGISTERED]
    assert not told[HELLO]
    assert told[REGISTERED] == line.copied._pages.packed(0) != b""


def test_the_next_node_hears_it_too_and_the_last_one_forgets_it(line):
    line.copies.begin(line.take)
    line.copies.hear(HELLO)
    assert line.kinds.count("WordKept") == 1
    line.copies.begin(line.take)
    assert line.kinds.count("WordKept") == 2
    line.copied.leave(LOOP)
    assert list(line.copied.told()) == []


def test_pages_of_other_ranks_are_not_sent_on(line):
    """A controller that has taken node 0's part has copies of all, and one node dies with it."""
    copies = PageCopies(line.pages, (4,), line.said.append, line.kept.append)
    copies.begin(line.take)
    copies.show(0)
    copies.tell(0)
    assert line.kinds == []
