"""Which socket is at the other end of a connection, whether the kernel is asked or its tables are read."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from worker_hooks.distributed import socket_peers as sockets
from worker_hooks.distributed.socket_peers import peers_of

CHILD = """\
import os, socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(os.fstat(end.fileno()).st_ino, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["asked", "read"])
def how(request, monkeypatch):
    """Either way."""
    if request.param == "read":
        monkeypatch.setattr(socket, "AF_NETLINK", 12345)
    else:
        monkeypatch.setattr(sockets, "_from_tables", pytest.fail)
    return request.param


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def inode(end):
    return os.fstat(end.fileno()).st_ino


def connected(stack, to, server):
    listener = stack.enter_context(server)
    one = stack.enter_context(socket.create_connection((to, listener.getsockname()[1])))
    other = stack.enter_context(listener.accept()[0])
    return listener, one, other


def any_server():
    return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)


SERVERS = {
    "4": ("127.0.0.1", lambda: socket.create_server(("127.0.0.1", 0))),
    "4 at a 6": ("127.0.0.1", any_server),
    "6": ("::1", lambda: socket.create_server(("::1", 0), family=socket.AF_INET6)),
}


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("kind", SERVERS)
def test_either_end_finds_the_other(stack, kind):
    to, server = SERVERS[kind]
    if "6" in kind and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    listener, one, other = connected(stack, to, server())
    found = peers_of([listener.fileno(), one.fileno(), other.fileno()])
    assert found == {one.fileno(): inode(other), other.fileno(): inode(one)}


@pytest.mark.usefixtures("how")
def test_all_else_has_none(stack, tmp_path):
    pair = [stack.enter_context(end) for end in socket.socketpair()]
    idle = stack.enter_context(socket.socket())
    datagrams = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    file = stack.enter_context((tmp_path / "file").open("w"))
    _, one, other = connected(stack, SERVERS["4"][0], SERVERS["4"][1]())
    other.close()
    gone = os.dup(0)
    os.close(gone)
    found = peers_of(
        [pair[0].fileno(), idle.fileno(), datagrams.fileno(), file.fileno(), one.fileno(), gone]
    )
    assert found.get(one.fileno(), 0) == 0  # it waits to be closed, and is nobody's
    assert found.keys() <= {one.fileno()}


@pytest.mark.usefixtures("how")
def test_it_may_be_another_process(stack):
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    words = [sys.executable, "-c", CHILD, str(listener.getsockname()[1])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        other = stack.enter_context(listener.accept()[0])
        assert peers_of([other.fileno()]) == {other.fileno(): int(child.stdout.readline())}
        child.stdin.close()


@pytest.mark.parametrize(
    ("where", "what", "other"),
    [(sockets, "_BY_FAMILY", 4711), (socket, "IPPROTO_TCP", socket.IPPROTO_SCTP)],
    ids=["no such question", "nothing of this kind"],
)
def test_a_kernel_that_does_not_tell_is_not_believed(stack, monkeypatch, where, what, other):
    monkeypatch.setattr(where, what, other)
    _, one, other = connected(stack, SERVERS["4"][0], SERVERS["4"][1]())
    assert peers_of([one.fileno()]) == {one.fileno(): inode(other)}


def test_who_listens_at_the_port_is_no_end_of_a_connection_to_elsewhere(stack):
    listener = stack.enter_context(socket.create_server(("", 0)))
    one = stack.enter_context(socket.create_connection(listener.getsockname()))
    link = sockets._link(one.fileno())
    elsewhere = link._replace(
        remote=(socket.inet_aton("192.0.2.1").ljust(16, b"\0"), link.remote[1])
    )
    kernel = stack.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, sockets._DIAG))
    assert sockets._ask(kernel, link) == inode(one)
    assert sockets._ask(kernel, elsewhere.reversed) == 0


@pytest.mark.usefixtures("how")
def test_nobodys_socket_becomes_another(stack):
    """Whatever is looked at blocks as before, also where scripts have a time-out of their own."""
    ends = [stack.enter_context(end) for end in socket.socketpair()]
    _, one, other = connected(stack, SERVERS["4"][0], SERVERS["4"][1]())
    ends += [one, other]
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        assert len(peers_of(end.fileno() for end in ends)) == 2
    finally:
        socket.setdefaulttimeout(before)
    assert [os.get_blocking(end.fileno()) for end in ends] == [True] * 4
