"""Whether somebody listens at a door: real sockets, and a clock that is put forward for silence."""

import errno
import socket
import threading

import pytest
from support.jobs import poll
from support.meeting_nodes import Clock

from agent.launch import doors as module
from agent.launch.doors import Address, DoorWatch
from agent.nodes.roster import Doors


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@pytest.fixture
def watch(listener):
    """Node 0 listens, of node 1 the port is closed, node 2 has no address that anybody has."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        ports = listener.getsockname()[1], closed.getsockname()[1]
    one = DoorWatch(
        {
            0: Address("127.0.0.1", ports[0]),
            1: Address("127.0.0.1", ports[1]),
            2: Address("no.such.host.invalid", 1),
        }
    )
    yield one
    one.close()


def seen(watch, ranks, wanted):
    poll(lambda: watch.look(ranks) == wanted, 30)


def test_a_door_is_open_or_nobody_is_there(watch, listener):
    seen(watch, {0, 1, 2}, Doors(open=frozenset({0}), gone=frozenset({1})))
    seen(watch, {1}, Doors(gone=frozenset({1})))
    port = listener.getsockname()[1]
    listener.close()
    seen(watch, {0}, Doors(gone=frozenset({0})))
    with socket.create_server(("127.0.0.1", port)):
        seen(watch, {0}, Doors(open=frozenset({0})))


def test_nothing_is_heard_of_a_door(watch, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    seen(watch, {0, 2, 7}, Doors(open=frozenset({0})))  # of a node without a door nothing is known
    for clock.late_s in (4.0, 8.0, 11.0):
        watch.look({0, 2})
    seen(watch, {0, 2}, Doors(open=frozenset({0}), silent=frozenset({2})))


def test_a_door_that_nobody_looked_at_is_not_silent(watch, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    seen(watch, {0, 1}, Doors(open=frozenset({0}), gone=frozenset({1})))
    clock.late_s = 60.0
    assert watch.look({0, 1, 2}).silent == set()


def found(*addresses):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in addresses]


@pytest.fixture
def named(monkeypatch, listener):
    """The door of a name that has several addresses, of which the first refuse, or are silent."""
    monkeypatch.setattr(module, "DIAL_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refuses = closed.getsockname()
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    filler = socket.create_connection(full.getsockname())  # what comes now is not answered
    where = {"open": listener.getsockname(), "closed": refuses, "silent": full.getsockname()}

    def made(*kinds):
        monkeypatch.setattr(
            module.socket, "getaddrinfo", lambda *_, **__: found(*(where[kind] for kind in kinds))
        )
        return DoorWatch({0: Address("name", 1)})

    yield made
    filler.close()
    full.close()


@pytest.mark.parametrize("others", [["closed"], ["silent"], ["closed", "silent", "closed"]])
def test_one_of_the_addresses_of_a_name_is_enough(named, others):
    watch = named(*others, "open")
    seen(watch, {0}, Doors(open=frozenset({0})))
    watch.close()


def test_a_name_is_gone_if_all_of_its_addresses_are(named, monkeypatch):
    watch = named("closed", "closed")
    seen(watch, {0}, Doors(gone=frozenset({0})))
    watch.close()
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    watch = named("closed", "silent")
    for clock.late_s in (0, 3, 6, 9, 12):
        for _ in range(5):
            assert watch.look({0}).gone == set()
    assert watch.look({0}).silent == {0}
    watch.close()


def test_a_resolver_that_takes_its_time_stops_nobody(monkeypatch, listener):
    answers = threading.Event()

    def slow(*_, **__):
        assert answers.wait(30)
        return found(listener.getsockname())

    monkeypatch.setattr(module.socket, "getaddrinfo", slow)
    watch = DoorWatch({0: Address("name", 1)})
    assert watch.look({0}) == Doors()
    answers.set()
    seen(watch, {0}, Doors(open=frozenset({0})))
    watch.close()


def test_without_a_descriptor_nothing_is_known(monkeypatch, listener):
    watch = DoorWatch({0: Address(*listener.getsockname())})

    def none_left(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module.socket, "socket", none_left)
    assert watch.look({0}) == Doors()


def test_a_stranger_at_the_other_end_is_left_in_peace(watch, listener):
    """Who knocks says nothing, and is gone at once."""
    seen(watch, {0}, Doors(open=frozenset({0})))
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(30)
        assert connection.recv(1) == b""
