"""Stores are reached in short tries, where that loses nobody."""

from __future__ import annotations

import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.jobs import poll

from worker_hooks.distributed import store_connection

LONG = timedelta(seconds=60)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Member:
    def __init__(self):
        self.asked, self.is_ejected = 0, False

    def check(self):
        self.asked += 1
        if self.is_ejected:
            raise InterruptedError


@pytest.fixture(scope="module", autouse=True)
def first_store():
    """torch opens two descriptors for all stores of a process with the first one."""
    store_connection.dist.TCPStore("127.0.0.1", 0, 1, True)


@pytest.fixture
def member(monkeypatch):
    module = sys.modules[store_connection._MODULE]
    monkeypatch.setattr(
        module, store_connection._FACTORY, getattr(module, store_connection._FACTORY)
    )
    found = Member()
    store_connection.connect_in_short_tries(found.check)
    return found


def connect(*told):
    return getattr(sys.modules[store_connection._MODULE], store_connection._FACTORY)(*told)


def test_a_store_that_nobody_serves_is_given_up(member, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(connect, "127.0.0.1", free_port(), 0, 2, LONG)
        poll(lambda: member.asked > 1)
        member.is_ejected = True
        with pytest.raises(InterruptedError):
            trying.result(LONG.total_seconds() / 2)


def test_a_rank_that_hosts_the_store_waits_for_a_late_one(member, monkeypatch):
    """In short tries it would forget who had come, and never have all of them."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(connect, "127.0.0.1", port, 0, 2, LONG)
        threading.Event().wait(3 * store_connection.CONNECT.total_seconds())  # the other is late
        assert not host.done()
        late = pool.submit(connect, "127.0.0.1", port, 1, 2, LONG)
        late.result(LONG.total_seconds()).set("key", "value")
        assert host.result(LONG.total_seconds()).get("key") == b"value"
    assert member.asked == 0


def test_who_asks_is_not_kept_alive(member, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store_connection.connect_in_short_tries(Member().check)
    with pytest.raises(store_connection.dist.DistError):
        connect("127.0.0.1", free_port(), 0, 2, timedelta(seconds=0.5))
    assert member.asked == 0
