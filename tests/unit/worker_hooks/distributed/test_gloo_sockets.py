"""Which of all sockets of a process are gloo's."""

import asyncio
import os
import select
import socket
from contextlib import ExitStack

from worker_hooks.distributed import abort
from worker_hooks.distributed.gloo_sockets import gloo_sockets


def connections(descriptors):
    """Those that are connected, with both ends."""
    found = []
    for descriptor in descriptors:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                found.append((end.getsockname(), end.getpeername()))
        except OSError:
            continue
    return found


def test_both_ends_are_found_and_nothing_of_the_scripts(groups):
    assert len(groups) == 2
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(listener.getsockname()))
        other = stack.enter_context(listener.accept()[0])
        poll = stack.enter_context(select.epoll())
        for end in (listener, one, other):
            poll.register(end, select.EPOLLIN)
        runner = stack.enter_context(asyncio.Runner())
        runner.get_loop().add_reader(other, lambda: None)
        found = gloo_sockets()
        assert not {each.fileno() for each in (listener, one, other)} & {*found}
        ends = connections(found)
        assert len(ends) == 2
        assert ends[0] == ends[1][::-1]
        assert abort.unblock(("127.0.0.1", 1)) in {1, 2}  # gloo may close the other end meanwhile
        assert connections(found) == []
        one.sendall(b"lives")
        assert other.recv(5) == b"lives"
