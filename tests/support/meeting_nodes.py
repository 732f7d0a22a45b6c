"""Nodes that meet over real sockets, for tests: a job's listener, and who dials it."""

import contextlib
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from agent.nodes.frames import PREAMBLE, FrameReader, message_of
from agent.nodes.gather import gather
from agent.nodes.join import join
from agent.nodes.line import bytes_of
from agent.nodes.messages import ANY_RANK, Challenge, Join, Newer, Refused, unpack
from agent.nodes.roster import OwnNode, WantedNodes
from agent.nodes.run_messages import ShownStatus
from agent.nodes.tls import PLAIN
from agent.nodes.token import Proofs, Side

LONG_S = 30.0  # no test waits for it to pass
TOKEN = b"a token"
OVER = Refused("the job is over: all ranks succeeded", 0)


def node(host, rank=ANY_RANK, **more):
    return OwnNode(rank, 2, host, 100 + int(host[-1]), "run", f"{host}-record", "1.0")._replace(
        **more
    )


class Clock:
    """Time that can be put forward; in place of the module ``time``."""

    late_s = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self):
        return time.monotonic() + self.late_s


class Job:
    """A listener, and threads that gather and join at it."""

    def __init__(self, pool):
        self.pool = pool
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.lines = queue.Queue()  # for people
        self.closes = [self.listener]

    def gather(
        self,
        nnodes=3,
        own=None,
        token=b"",
        timeout_s=LONG_S,
        settings=None,
        world=None,
        say=None,
        security=PLAIN,
        succession=None,
        shows=print,
        resuming=None,
        **wanted,
    ):
        own = own or node("mn0")
        self.listener.listen(100)
        told = settings if callable(settings) else lambda *_: settings or {"port": 1}
        args = (token, timeout_s, say or self.lines.put, told)
        wanted = WantedNodes(nnodes, world, **wanted)
        more = {"security": security, "succession": succession}
        more |= {"shows": shows, "resuming": resuming}
        return self._start(gather, self.listener, own, wanted, *args, **more)

    def join(
        self,
        own,
        token=b"",
        timeout_s=LONG_S,
        say=None,
        security=PLAIN,
        is_once=False,
        late_s=0.0,
        shows=print,
        seek=lambda _: Newer(),
    ):
        read = token if callable(token) else lambda: token
        args = ("127.0.0.1", self.port, own, read, timeout_s, say or self.lines.put)
        more = {"security": security, "is_once": is_once, "late_s": late_s}
        more |= {"shows": shows, "seek": seek}
        return self._start(join, *args, **more)

    def _start(self, function, *args, **more):
        future = self.pool.submit(function, *args, **more)
        future.add_done_callback(self._keep)
        return future

    def _keep(self, future):
        if not future.exception():
            result = future.result()
            lines = getattr(result, "lines", None)
            self.closes += [
                each.connection for each in (lines.values() if lines else [result.line])
            ]

    def connect(self, data=b""):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S)
        self.closes.append(connection)
        connection.sendall(data)
        return connection

    def accept(self):
        self.listener.listen(100)
        self.listener.settimeout(LONG_S)
        connection = self.listener.accept()[0]
        connection.settimeout(LONG_S)
        self.closes.append(connection)
        return connection

    def until(self, words):
        """The next line for people with these words."""
        while words not in (line := self.lines.get(timeout=LONG_S)):
            pass
        return line


def wish(own, challenge, token=b"", **more):
    proof = Proofs(own.run_id, challenge.nonce, "n").proof(token, Side.NODE)
    fields = (
        own.run_id,
        own.record_id,
        own.node_rank,
        own.nproc,
        own.host,
        own.pid,
        own.version,
        "",
        "n",
        proof,
    )
    return Join(*fields)._replace(**more)


def heard(connection, reader):
    while (packed := reader.take()) is None:
        data = connection.recv(1 << 16)
        assert data, "closed"
        reader.add(data)
    return unpack(packed)


def joined_by_hand(job, own, token=b"", **more):
    connection, reader = job.connect(PREAMBLE), FrameReader(message_of)
    connection.sendall(bytes_of(wish(own, heard(connection, reader), token, **more)))
    return connection, reader


def met_by_hand(job):
    """The controller's end of a node's connection that has joined."""
    connection, reader = job.accept(), FrameReader(message_of)
    assert connection.recv(len(PREAMBLE), socket.MSG_WAITALL) == PREAMBLE
    connection.sendall(bytes_of(Challenge("c", "1.0")))
    return connection, heard(connection, reader)


def is_closed(connection):
    """Waits until the other end says something or closes."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def is_closed_after(connection, data):
    return connection.recv(len(data), socket.MSG_WAITALL) == data and is_closed(connection)


STRANGERS = [
    b"GET / HTTP/1.1\r\nHost: mn0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"\x00\xce\xf7\x85\x3c",
    PREAMBLE + b"\0\0\0\2{}",
    PREAMBLE + b"\0\1\0\1",
    PREAMBLE + bytes_of(ShownStatus({})),
    PREAMBLE + bytes_of(Join("run", "r", 1, 0, "mn1", 1, "1.0", "", "n", "")),
    PREAMBLE + b"\0\0\0\x0f" + b'{"kind":"Join"}',
]  # fmt: skip


@contextlib.contextmanager
def meeting():
    """A job whose nodes meet; it ends with the test."""
    with ThreadPoolExecutor(16) as pool:
        job = Job(pool)
        yield job
    for each in job.closes:
        each.close()
