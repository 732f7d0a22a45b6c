"""Lines to training scripts: who is let in, what is heard, and what never stops the agent."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from agent.hooks.listener import name_of, open_listener
from agent.hooks.rank_links import BURST, RankLinks
from worker_hooks.contract import protocol, wire


class Diary:
    """A journal for tests."""

    def __init__(self):
        self.events = []

    def event(self, what, **fields):
        self.events.append((what, fields))

    def why(self):
        return [fields["why"] for _, fields in self.events]


class Room:
    """Links on a loop of their own."""

    def __init__(self, ranks=(0, 1, 2)):
        self.loop = asyncio.new_event_loop()
        self.door = open_listener("test")
        self.diary = Diary()
        self.links = RankLinks(self.door, ranks, self.diary)
        self.heard, self.lost, self.fds = [], [], []
        self.links.attach(self.loop, self._hear, lambda rank, pid: self.lost.append((rank, pid)))
        self.links.begin(0)
        self.clients = []

    def _hear(self, message, fds):
        self.heard.append(message)
        self.fds += fds
        fds.clear()  # they are its own now

    def turn(self, times=4):
        for _ in range(times):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def connect(self):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect("\0" + name_of(self.door))
        client.settimeout(5)
        self.clients.append(client)
        return client

    def hello(self, rank=0, attempt=0):
        client = self.connect()
        wire.send(client, protocol.Hello(rank, attempt, os.getpid(), "/ckpt", False))
        self.turn()
        return client

    def is_closed(self, client):
        client.setblocking(False)
        try:
            return client.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def close(self):
        self.links.close()
        self.door.close()
        self.loop.close()
        for thing in self.clients:
            thing.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.close()


def test_the_name_cannot_be_guessed_and_is_no_file():
    doors = [open_listener("a-run") for _ in range(2)]
    names = [name_of(door) for door in doors]
    assert len(set(names)) == 2
    assert all(name.startswith("msrun-a-run-") and len(name) > 24 for name in names)
    assert not any(os.path.exists(name) for name in names)
    for door in doors:
        door.close()


def test_a_rank_is_heard_after_its_hello(room):
    client = room.hello(1)
    wire.send(client, protocol.Leaving(1, 0))
    room.turn()
    assert [type(message) for message in room.heard] == [protocol.Hello, protocol.Leaving]
    assert room.links.pid(1) == os.getpid()
    assert room.links.pid(0) == 0


def test_a_rank_is_told(room):
    client = room.hello()
    room.links.send(0, protocol.Release("go"))
    assert wire.receive(client) == (protocol.Release("go"), [])
    room.links.send(2, protocol.Release("go"))  # nobody there
    assert room.lost == []


@pytest.mark.parametrize(
    "first",
    [
        protocol.Leaving(0, 0),
        protocol.Hello(7, 0, 1, "", False),
        protocol.Hello(0, 1, 1, "", False),
        protocol.Hello(0, -1, 1, "", False),
        protocol.Freeze(1, 1.0),
        protocol.StartWorkers(0, ()),
    ],
    ids=lambda message: str(message)[:30],
)
def test_whoever_does_not_greet_as_a_rank_of_this_attempt_is_closed(room, first):
    client = room.connect()
    wire.send(client, first)
    room.turn()
    assert room.is_closed(client)
    assert room.heard == []
    assert room.lost == []
    assert len(room.diary.events) == 1


def test_a_second_hello_of_a_rank_is_closed_and_does_not_disturb_the_first(room):
    first = room.hello()
    second = room.hello()
    assert room.is_closed(second)
    assert room.lost == []
    room.links.send(0, protocol.Release("still there"))
    assert wire.receive(first)[0] == protocol.Release("still there")
    first.close()
    room.turn()
    assert room.lost == [(0, os.getpid())]
    assert not room.is_closed(room.hello())  # who made a new state after the old one ended


def test_survivors_lines_go_on_in_a_new_attempt(room):
    gone, living = room.hello(0), room.hello(1)
    room.links.renew(1, [1, 2])
    room.turn()
    assert room.is_closed(gone)
    assert room.lost == []
    assert room.links.pid(0) == 0
    with open(os.devnull) as page:  # said before it was told: of no account, and no offence
        wire.send(living, protocol.Registered(1, 0, 5), [page.fileno()])
    wire.send(living, protocol.Rejoining(1, 1))
    room.turn()
    assert room.heard[2:] == [protocol.Rejoining(1, 1)]
    assert room.fds == []
    assert room.is_closed(room.hello(2, 0))
    assert not room.is_closed(room.hello(2, 1))
    wire.send(living, protocol.Rejoining(1, 2))
    room.turn()
    assert room.lost == [(1, os.getpid())]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"nonsense",
        b"[]",
        b'{"kind": "Gone"}',
        b'{"kind": "Frozen", "rank": 0}',
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({"kind": "Leaving", "rank": "0", "attempt": 0}).encode(),
        json.dumps({"kind": "Leaving", "rank": True, "attempt": 0}).encode(),
        json.dumps({"kind": "Leaving", "rank": 1, "attempt": 0}).encode(),
        json.dumps({"kind": "Leaving", "rank": 0, "attempt": 3}).encode(),
        json.dumps(
            {**protocol.Frozen(0, 0, 1, 5, True)._asdict(), "kind": "Frozen", "step": "5"}
        ).encode(),
        json.dumps(
            {**protocol.Frozen(0, 0, 1, 5, True)._asdict(), "kind": "Frozen", "is_whole": 1}
        ).encode(),
        json.dumps({"kind": "Ready", "preload_s": 1}).encode(),
    ],
    ids=lambda nonsense: nonsense[:40].decode(errors="replace"),
)
def test_nonsense_closes_its_own_line_only(room, nonsense):
    bad, good = room.hello(0), room.hello(1)
    bad.send(nonsense)
    room.turn()
    assert room.is_closed(bad)
    assert room.lost == [(0, os.getpid())]
    wire.send(good, protocol.Leaving(1, 0))
    room.turn()
    assert room.heard[-1] == protocol.Leaving(1, 0)


def test_descriptors_come_with_their_message(room):
    client = room.hello()
    read, write = os.pipe()
    wire.send(client, protocol.Registered(0, 0, 5), [read])
    room.turn()
    assert room.heard[-1] == protocol.Registered(0, 0, 5)
    os.write(write, b"x")
    assert os.read(room.fds[0], 1) == b"x"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("packet", [b"nonsense", wire.encode(protocol.Leaving(2, 0))])
def test_descriptors_beside_nonsense_are_closed(room, packet):
    client = room.hello()
    open_before = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    socket.send_fds(client, [packet], [read, write])
    os.close(read)
    os.close(write)
    room.turn()
    assert room.is_closed(client)
    assert len(os.listdir("/proc/self/fd")) == open_before - 1  # the line


def test_who_connects_without_end_costs_a_few_lines_and_a_count(room, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        for _ in range(123):
            room.connect().close()
        room.turn(20)
    user = os.geteuid()
    assert room.diary.why() == [
        f"it is user {user}'s",
        f"it is user {user}'s, for the 10th time",
        f"it is user {user}'s, for the 100th time",
    ]
    room.links.end()
    room.close = lambda: None
    room.links.close()
    assert room.diary.why()[3:] == [f"123 connections were user {user}'s"]
    room.door.close()
    room.loop.close()
    for client in room.clients:
        client.close()


def test_another_user_is_not_let_in(room, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    client = room.connect()
    wire.send(client, protocol.Hello(0, 0, 1, "", False))
    room.turn()
    assert room.is_closed(client)
    assert room.heard == []
    assert "user" in room.diary.why()[0]


def test_a_rank_that_reads_nothing_is_lost_and_nobody_waits_for_it(room):
    room.hello()
    for _ in range(100_000):
        room.links.send(0, protocol.Release("x" * 1000))
        if room.lost:
            break
    assert room.lost == [(0, os.getpid())]
    assert room.links.pid(0) == 0


def test_a_new_attempt_closes_the_lines_of_the_old_one(room):
    old, stranger = room.hello(0), room.connect()
    room.turn()
    room.links.begin(1)
    assert room.is_closed(old)
    assert room.is_closed(stranger)
    assert room.lost == []
    room.turn()
    assert room.is_closed(room.hello(0, attempt=0))
    assert not room.is_closed(room.hello(0, attempt=1))


def test_what_a_rank_said_before_it_died_is_heard(room):
    client = room.hello()
    for _ in range(5):
        wire.send(client, protocol.Progress(0, 0, 1, 10))
    client.close()
    room.heard.clear()
    room.links.hear_out(0)
    assert len(room.heard) == 5
    assert room.links.pid(0) == 0
    room.links.hear_out(0)


def test_however_much_a_rank_said_before_it_died_is_heard(room):
    client = room.hello()
    for _ in range(2 * BURST + 1):
        wire.send(client, protocol.Progress(0, 0, 1, 10))
    client.close()
    room.heard.clear()
    room.links.hear_out(0)
    assert len(room.heard) == 2 * BURST + 1


def test_a_rank_that_died_before_it_read_everything_is_heard(room):
    """The kernel says first that the connection was reset; a new status page may wait behind."""
    client = room.hello()
    room.links.send(0, protocol.Release("unread"))
    with open(os.devnull) as page:
        wire.send(client, protocol.Registered(0, 0, 4, "", True), [page.fileno()])
    room.heard.clear()
    client.close()
    room.turn()
    assert [type(each) for each in room.heard] == [protocol.Registered]
    assert len(room.fds) == 1
    assert room.lost == [(0, os.getpid())]


def test_a_rank_that_died_unnoticed_is_heard_although_it_cannot_be_told(room):
    client = room.hello()
    wire.send(client, protocol.Progress(0, 0, 1, 10))
    room.heard.clear()
    client.close()
    assert room.links.send(0, protocol.Release("too late"))
    assert room.links.send(0, protocol.Release("too late"))
    assert room.heard == room.lost == []
    room.turn()
    assert len(room.heard) == 1
    assert room.lost == [(0, os.getpid())]


def test_what_others_said_before_a_death_is_taken_in_with_it(room):
    dead, living = room.hello(0), room.hello(1)
    room.heard.clear()
    wire.send(living, protocol.Leaving(1, 0))
    dead.close()
    room.links.hear_out(0)
    room.links.catch_up((0, 1, 2))
    assert room.heard == [protocol.Leaving(1, 0)]
    assert room.links.pid(1) != 0


def test_a_flood_leaves_others_their_turn(room):
    noisy, quiet = room.hello(0), room.hello(1)
    for _ in range(2 * BURST):
        wire.send(noisy, protocol.Progress(0, 0, 1, 1))
    wire.send(quiet, protocol.Leaving(1, 0))
    room.heard.clear()
    room.turn(2)
    assert protocol.Leaving(1, 0) in room.heard
    room.turn(8)
    assert len(room.heard) == 2 * BURST + 1


def test_a_thousand_ranks():
    room = Room(range(1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip("this user may not open that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
    try:
        clients = [room.connect() for _ in range(1000)]
        for rank, client in enumerate(clients):
            wire.send(client, protocol.Hello(rank, 0, 1, "", False))
        room.turn(40)
        assert {message.rank for message in room.heard} == set(range(1000))
    finally:
        room.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_descriptors_are_waited_for_without_spinning(room, monkeypatch):
    monkeypatch.setattr("agent.hooks.rank_links.RETRY_S", 0.05)
    client = room.connect()
    wire.send(client, protocol.Hello(0, 0, 1, "", False))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for fd in used:
            stack.callback(os.close, fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        room.turn(50)
        assert len(room.diary.events) == 1  # said once, then the door rests
    room.loop.run_until_complete(asyncio.sleep(0.1))
    room.turn()
    assert [type(message) for message in room.heard] == [protocol.Hello]


def test_the_peers_pid_is_the_agents(room):
    """Hooks learn from the socket whose death they must watch for."""
    client = room.connect()
    creds = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    assert array.array("i", creds)[0] == os.getpid()


# --- newcomers that are early -----------------------------------------------------------------------


def test_who_is_expected_may_greet_before_its_attempt_begins(room):
    old = room.hello(1)
    room.links.expect(1, (2,))
    early = room.hello(2, attempt=1)
    assert [hello.attempt for hello in room.heard] == [0]
    assert not room.is_closed(early)
    assert room.links.pid(2) == 0
    room.links.renew(1, (1,))
    room.links.admit()
    assert [(hello.rank, hello.attempt) for hello in room.heard] == [(1, 0), (2, 1)]
    assert room.links.pid(2) == os.getpid()
    early.setblocking(True)
    wire.send(early, protocol.Leaving(2, 1))
    room.turn()
    assert room.heard[-1] == protocol.Leaving(2, 1)
    assert room.lost == [] and not room.is_closed(old)


@pytest.mark.parametrize(("rank", "attempt"), [(1, 1), (2, 2)])
def test_others_may_not(room, rank, attempt):
    room.links.expect(1, (2,))
    assert room.is_closed(room.hello(rank, attempt))
    assert room.heard == room.lost == []


def test_one_of_a_rank_is_enough(room):
    room.links.expect(1, (2,))
    first, second = room.hello(2, attempt=1), room.hello(2, attempt=1)
    assert room.is_closed(second)
    assert not room.is_closed(first)


def test_who_speaks_or_leaves_before_is_not_admitted(room):
    room.links.expect(1, (0, 2))
    gone, hasty = room.hello(0, attempt=1), room.hello(2, attempt=1)
    gone.close()
    wire.send(hasty, protocol.Leaving(2, 1))
    room.turn()
    assert room.is_closed(hasty)
    room.links.renew(1, (1,))
    room.links.admit()
    assert room.heard == room.lost == []


def test_nobody_is_admitted_to_another_attempt(room):
    room.links.expect(1, (2,))
    early = room.hello(2, attempt=1)
    room.links.begin(1)  # all ranks anew: those of before are gone
    assert room.is_closed(early)
    room.links.admit()
    assert room.heard == []


def test_a_rank_is_not_lost_because_too_many_descriptors_are_on_their_way(room, monkeypatch):
    """The kernel's limit counts all of a user's; those that are to be sent are sent later."""
    room.hello()

    def refuse(*_):
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    with monkeypatch.context() as patch:
        patch.setattr(wire, "send", refuse)
        assert not room.links.send(0, protocol.PeerPages([1], [2]), [0])
    assert (room.links.pid(0), room.lost) == (os.getpid(), [])
    assert room.links.send(0, protocol.Release("later"))
    assert room.links.send(7, protocol.Release("it is not there"))


def test_a_rank_of_another_node_is_sent_to_through_its_node(room):
    sent = []
    room.links.relay_others(lambda ranks, message: sent.append((*ranks, message)))
    assert room.links.send(7, protocol.Release("go"))
    assert room.links.send(2, protocol.Release("go"))  # of this node, and not there
    room.links.send_all((2, 7, 8), protocol.GoOn(1))
    room.links.send_all((2,), protocol.GoOn(2))
    assert sent == [(7, protocol.Release("go")), (7, 8, protocol.GoOn(1))]


def test_what_a_rank_of_another_node_has_said_is_heard(room):
    room.links.hear_relayed(protocol.Registered(7, 0, 3))
    room.links.hear_relayed(protocol.Leaving(7, 0))
    assert room.heard == [protocol.Registered(7, 0, 3), protocol.Leaving(7, 0)]


@pytest.mark.parametrize("attempt", [0, 2])
def test_what_was_said_in_another_attempt_is_not_heard(room, attempt):
    room.links.begin(1)
    room.links.hear_relayed(protocol.Registered(7, attempt, 3))
    assert room.heard == []


def test_a_wish_to_exit_is_of_no_attempt(room):
    room.links.begin(3)
    room.links.hear_relayed(protocol.ExitRequested(7, 1, "a file asks"))
    assert room.heard == [protocol.ExitRequested(7, 3, "a file asks")]
    room.links.end()
    room.links.hear_relayed(protocol.ExitRequested(7, 3, "a file asks"))
    assert len(room.heard) == 1
