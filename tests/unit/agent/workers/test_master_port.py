"""MASTER_PORT is bound where workers look for it, or it is said in one sentence why not."""

from __future__ import annotations

import errno
import socket

import pytest

from agent.spec.job_spec import UsageError
from agent.workers import master_port as room
from agent.workers.master_port import (
    is_of_this_host,
    listen,
    listen_for_nodes,
    loopback_host,
)


def reach(address, port):
    socket.create_connection((address, port), timeout=5).close()


@pytest.mark.parametrize("port", [None, 0])
def test_without_a_port_a_free_one_is_taken(port):
    with listen("127.0.0.1", port) as listening:
        host, bound = listening.getsockname()
        assert (host, loopback_host(listening)) == ("127.0.0.1", "127.0.0.1")
        reach("127.0.0.1", bound)


def test_localhost_means_ipv4_first():
    with listen("localhost", None) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_loopback_is_bound_as_it_is():
    try:
        listening = listen("::1", None)
    except UsageError:
        pytest.skip("no IPv6 loopback here")
    with listening:
        assert loopback_host(listening) == "::1"


def test_an_outer_address_means_all_addresses():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this host has no outer address")
        outer = probe.getsockname()[0]
    with listen(outer, None) as listening:
        port = listening.getsockname()[1]
        reach(outer, port)
        reach("127.0.0.1", port)
        assert loopback_host(listening) == "127.0.0.1"


def test_a_port_in_use_is_named():
    with listen("127.0.0.1", None) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is already in use"):
            listen("127.0.0.1", port)


def test_a_port_of_a_job_that_just_ended_is_free():
    with listen("127.0.0.1", None) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
            pass  # a connection in TIME_WAIT stays behind
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["nohost.invalid", "", "a b", "a\0b", "\udcff", 70 * "a", "127.0.0.1.1"])  # fmt: skip
def test_a_host_that_does_not_resolve_is_named(host):
    with pytest.raises(UsageError) as raised:
        listen(host, None)
    assert f"--master-addr {host!r} does not resolve (" in str(raised.value)
    assert "Errno" not in str(raised.value)


def test_a_host_elsewhere_is_named():
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is not an address of this machine"):
        listen("192.0.2.1", None)


@pytest.mark.parametrize(
    "number, told",
    [
        (errno.EACCES, "port 80 needs privileges to bind: choose a --master-port above 1023"),
        (errno.EADDRINUSE, "port 80 on 127.0.0.1 is already in use"),
        (errno.EMFILE, "cannot listen on 127.0.0.1:80: Too many open files"),
    ],
)
def test_each_reason_has_its_words(monkeypatch, number, told):
    def refuse(*_):
        raise OSError(number, "Too many open files")

    monkeypatch.setattr(room, "_bind", refuse)
    with pytest.raises(UsageError) as raised:
        listen("127.0.0.1", 80)
    assert told in str(raised.value)


@pytest.fixture
def named(monkeypatch):
    """What the name of this host resolves to, for the test that says it."""

    def name(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        monkeypatch.setattr(room, "_resolve", lambda _: (family, (address, 0)))

    return name


def address_of(listening):
    with listening:
        return listening.getsockname()[0]


ALL = {"::", "0.0.0.0"}


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", "::1"])
def test_other_nodes_reach_a_host_whose_hosts_file_names_it_a_loopback(named, address):
    named(address)
    assert address_of(listen_for_nodes("thishost", 0)) in ALL
    if ":" not in address:
        assert address_of(listen("thishost", 0)) == address  # of a job on one node


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2"])
def test_a_meeting_point_that_is_this_machines_alone_stays_so(host):
    assert address_of(listen_for_nodes(host, 0)).startswith("127.0.0.")


def test_a_taken_port_is_named_to_nodes_by_the_name_that_was_given(named):
    named("127.0.1.1")
    with listen_for_nodes("thishost", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} on thishost is already in use"):
            listen_for_nodes("thishost", port)


def test_no_node_listens_at_the_address_of_another_machine():
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is not an address of this machine"):
        listen_for_nodes("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("nohost.invalid", False)],
)
def test_a_host_is_this_one_if_its_address_can_be_bound_here(host, is_ours):
    assert is_of_this_host(host) is is_ours


def test_no_name_server_is_asked_whose_an_address_is(monkeypatch):
    """It may be slow, or know this machine by another name than the one that was typed."""
    for name in ("gethostbyaddr", "getnameinfo", "getfqdn", "gethostname"):
        monkeypatch.setattr(room.socket, name, lambda *_: pytest.fail("it was asked"))
    assert [is_of_this_host(host) for host in ("localhost", "127.0.0.1", "192.0.2.1")] == [
        True,
        True,
        False,
    ]
    with listen_for_nodes("localhost", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
