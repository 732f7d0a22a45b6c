"""A rank that names the port at which the nodes met reaches the store of its attempt there."""

import socket

import pytest
from support.certificates import PASSWORDS, authority
from support.meeting_nodes import LONG_S, TOKEN, is_closed, node

from agent.arrivals.store_relay import HELLO
from agent.launch.certificates import TlsConfig, tls_context
from agent.nodes.join import RefusedError
from agent.nodes.tls import Tls

MUCH = 5 << 20


@pytest.fixture
def store(late):
    """What stands for the store; ranks are led to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_S)
        late.store_port = lambda: listener.getsockname()[1]
        yield listener


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
    late.store_port = lambda: port  # nobody listens there
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


def test_a_job_with_certificates_has_such_ranks_too(job, late, store, tmp_path):
    config = TlsConfig.read(authority(tmp_path).config())
    late._security = Tls(tls_context(config, PASSWORDS, pytest.fail, is_server=True))
    client = job.connect(HELLO + b"get")
    with reached(store) as server:
        assert read(server, 8) == HELLO + b"get"
        server.sendall(b"it")
        assert read(client, 2) == b"it"
