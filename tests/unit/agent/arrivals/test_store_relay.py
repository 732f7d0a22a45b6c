"""A rank that names the port at which the nodes met reaches the store of its attempt there."""

import socket

import pytest
from support.certificates import PASSWORDS, authority
from support.meeting_nodes import LONG_S, TOKEN, is_closed, node

from agent.arrivals import late as arrivals
from agent.arrivals.store_relay import HELLO, Store, is_of_node
from agent.launch.certificates import TlsConfig, tls_context
from agent.nodes.join import RefusedError
from agent.nodes.tls import Tls

MUCH = 5 << 20


@pytest.fixture
def store(late):
    """What stands for the store; ranks are led to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_S)
        late.said = []
        late.store = Store(lambda: listener.getsockname()[1], lambda: (), late.said.append)
        yield listener


def is_unreached(store):
    store.setblocking(False)
    with pytest.raises(BlockingIOError):
        store.accept()
    return True


def reached(store):
    connection = store.accept()[0]
    connection.settimeout(LONG_S)
    return connection


def read(connection, count):
    """So many bytes, or what came until the end."""
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def test_what_is_said_goes_both_ways(job, store):
    client = job.connect(HELLO + b"set")
    with reached(store) as server:
        assert read(server, 8) == HELLO + b"set"
        server.sendall(b"done")
        assert read(client, 4) == b"done"
        client.sendall(b"get")
        assert read(server, 3) == b"get"


def test_each_has_a_connection_of_its_own(job, store):
    clients = [job.connect(HELLO + bytes([each])) for each in range(3)]
    for number, client in enumerate(clients):
        with reached(store) as server:
            assert read(server, 6) == HELLO + bytes([number])
            server.sendall(bytes([number]))
            assert read(client, 1) == bytes([number])
            assert server.close() is None
            assert is_closed(client)


def test_who_reads_slowly_loses_nothing(job, store):
    client = job.connect(HELLO)
    with reached(store) as server:
        assert read(server, 5) == HELLO
        server.setblocking(False)
        sent = 0
        data = bytes(range(256)) * (MUCH // 256)
        while sent < MUCH:
            try:
                sent += server.send(data[sent : sent + (1 << 16)])
            except BlockingIOError:
                break  # both kernels' buffers are full, and nothing more is taken
        assert read(client, sent) == data[:sent]


def test_who_closes_ends_both(job, store):
    client = job.connect(HELLO)
    with reached(store) as server:
        assert read(server, 5) == HELLO
        client.sendall(b"last words")
        client.close()
        assert read(server, 10) == b"last words"
        assert server.recv(1) == b""


def test_without_a_store_it_is_a_stranger(job, late):
    assert is_closed(job.connect(HELLO))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    late.store = Store(lambda: port, lambda: (), pytest.fail)  # nobody listens there
    assert is_closed(job.connect(HELLO))


def test_nodes_are_answered_as_ever(job, late, store):
    client = job.connect(HELLO)
    with reached(store) as server:
        assert read(server, 5) == HELLO
        assert isinstance(job.join(node("mn2"), TOKEN).exception(LONG_S), RefusedError)
        late.loop.call_soon_threadsafe(late.close, None)
        assert is_closed(client)
        assert server.recv(1) == b""
        late.loop.call_soon_threadsafe(late._listen)  # for the fixture


@pytest.mark.parametrize(
    ("peer", "own", "is_one"),
    [
        ("10.0.0.2", "10.0.0.1", True),  # of a node that has joined
        ("10.0.0.3", "10.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", True),  # of this machine
        ("127.0.0.1", "127.0.1.1", True),
        ("::1", "::1", True),
        ("::ffff:10.0.0.2", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.1.1", True),
        ("fe80::2%eth0", "fe80::1%eth0", True),
        ("fe80::3%eth0", "fe80::1%eth0", False),
        ("10.0.0.20", "10.0.0.1", False),
    ],
)
def test_only_ranks_on_nodes_of_the_job_are_led_to_the_store(peer, own, is_one):
    assert is_of_node(peer, own, ("10.0.0.2", "fe80::2%eth0")) == is_one


def test_who_is_on_no_node_of_the_job_is_turned_away_and_it_is_said_once(
    job, late, store, monkeypatch
):
    asked = []
    monkeypatch.setattr(arrivals, "is_of_node", lambda *about: asked.append(about))
    late.store = late.store._replace(addresses=lambda: ("10.0.0.2",))
    for _ in range(3):
        assert is_closed(job.connect(HELLO + b"get"))
    assert asked == [("127.0.0.1", "127.0.0.1", ("10.0.0.2",))] * 3
    assert is_unreached(store)
    (said,) = late.said
    port = job.listener.getsockname()[1]
    assert said.startswith(f"127.0.0.1 asks for torch's store at port {port}, where only nodes of")
    assert 'init_method="env://"' in said
    assert late.strangers == 3


def test_a_job_with_certificates_leads_nobody_to_its_store(job, late, store, tmp_path):
    config = TlsConfig.read(authority(tmp_path).config())
    late._security = Tls(tls_context(config, PASSWORDS, pytest.fail, is_server=True))
    for _ in range(2):
        assert is_closed(job.connect(HELLO + b"get"))
    assert is_unreached(store)
    (said,) = late.said
    assert said.startswith("127.0.0.1 asks for torch's store at port ")
    assert "with --tls-config" in said
    assert 'init_method="env://"' in said
