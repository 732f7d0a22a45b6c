"""Nodes that find each other over real sockets: in any order, past strangers, deaths and mistakes."""

import asyncio
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent.nodes import gather as gathering
from agent.nodes import guest, messages
from agent.nodes import join as joining
from agent.nodes.frames import PREAMBLE, FrameReader
from agent.nodes.gather import MissingNodesError, gather
from agent.nodes.join import NeverBegunError, RefusedError, join
from agent.nodes.late import LateGuests, NodePlace
from agent.nodes.line import bytes_of
from agent.nodes.link import NodeLink
from agent.nodes.messages import (
    ANY_RANK,
    Admitted,
    Begin,
    Challenge,
    Join,
    NodeFacts,
    Refused,
    Spare,
)
from agent.nodes.roster import OwnNode, WantedNodes
from agent.nodes.run_messages import Order, ShownStatus
from agent.nodes.token import Proofs, Side

LONG_S = 30.0  # no test waits for it to pass
TOKEN = b"a token"


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
        self, nnodes=3, own=None, token=b"", timeout_s=LONG_S, settings=None, world=None, say=None
    ):
        own = own or node("mn0")
        self.listener.listen(100)
        told = settings or {"port": 1}
        args = (token, timeout_s, say or self.lines.put, lambda _: told)
        return self._start(gather, self.listener, own, WantedNodes(nnodes, world), *args)

    def join(self, own, token=b"", timeout_s=LONG_S, say=None):
        return self._start(
            join, "127.0.0.1", self.port, own, token, timeout_s, say or self.lines.put
        )

    def _start(self, function, *args):
        future = self.pool.submit(function, *args)
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


@pytest.fixture
def job():
    with ThreadPoolExecutor(16) as pool:
        job = Job(pool)
        yield job
    for each in job.closes:
        each.close()


@pytest.fixture
def talkative(monkeypatch):
    """People hear everything at once."""
    for module in (gathering, joining):
        monkeypatch.setattr(module, "FIRST_WORD_S", 0.0)
        monkeypatch.setattr(module, "NEXT_WORD_S", 0.01)


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
    return messages.unpack(packed)


def joined_by_hand(job, own, token=b"", **more):
    connection, reader = job.connect(PREAMBLE), FrameReader()
    connection.sendall(bytes_of(wish(own, heard(connection, reader), token, **more)))
    return connection, reader


def met_by_hand(job):
    """The controller's end of a node's connection that has joined."""
    connection, reader = job.accept(), FrameReader()
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


@pytest.mark.parametrize("token", [b"", TOKEN])
@pytest.mark.parametrize("order", ["gather first", "join first"])
@pytest.mark.usefixtures("talkative")
def test_nodes_meet_whoever_starts_first(job, order, token):
    if order == "gather first":
        controller = job.gather(token=token)
        job.until("1 of 3 nodes is here (mn0); node ranks 1, 2 are missing")
    nodes = [job.join(node("mn2", 2, nproc=3), token), job.join(node("mn1", 1), token)]
    if order == "join first":
        job.until(f"waiting to begin: 127.0.0.1:{job.port} does not answer (Connection refused)")
        controller = job.gather(token=token)
    second, first = (each.result(LONG_S) for each in nodes)
    whole = controller.result(LONG_S)
    facts = [
        (each.rank, each.host, each.address, each.nproc, each.pid) for each in whole.roster.nodes
    ]
    assert facts == [
        (0, "mn0", "127.0.0.1", 2, 100), (1, "mn1", "127.0.0.1", 2, 101), (2, "mn2", "127.0.0.1", 3, 102),
    ]  # fmt: skip
    assert first.roster.nodes == second.roster.nodes == whole.roster.nodes
    assert (whole.node_rank, first.node_rank, second.node_rank) == (0, 1, 2)
    assert first.settings == {"port": 1}
    assert sorted(whole.lines) == [1, 2]
    for one, two in ((whole.lines[1], first.line), (whole.lines[2], second.line)):
        assert one.connection.getsockname() == two.connection.getpeername()


def test_a_job_of_one_node_begins_at_once(job):
    whole = job.gather(nnodes=1).result(LONG_S)
    assert (whole.roster.world_size, whole.node_rank, whole.lines) == (2, 0, {})


def test_the_node_that_gathers_may_have_any_rank(job):
    other = job.join(node("mn1", 0))
    assert job.gather(nnodes=2, own=node("mn0", 1)).result(LONG_S).node_rank == 1
    assert other.result(LONG_S).node_rank == 0


def test_nodes_come_until_there_are_enough_workers(job):
    controller = job.gather(nnodes=9, world=7)
    others = [job.join(node("mn1", nproc=1)), job.join(node("mn2", nproc=4))]
    assert controller.result(LONG_S).roster.world_size == 7
    assert [each.result(LONG_S).roster.world_size for each in others] == [7, 7]


@pytest.mark.parametrize(
    ("wrong", "token", "words"),
    [
        (node("mn9", 1), b"other", "the token of mn9 (127.0.0.1) is not that of the job"),
        (node("mn9", 1), b"", "this job needs a token: give MSRUN_TOKEN or --token-file"),
        (node("mn9", 1, run_id="other"), TOKEN, "belongs to the job 'other'"),
        (node("mn9", 1, version="2.0"), TOKEN, "install the same version on all nodes"),
        (node("mn9", 0), TOKEN, "mn9 (127.0.0.1) and mn0 both have node rank 0"),
        (node("mn9", 2), TOKEN, "mn9 (127.0.0.1) has node rank 2, but the job has 2 nodes"),
    ],
)
def test_a_node_with_a_mistake_is_refused_and_the_others_go_on(job, wrong, token, words):
    controller = job.gather(nnodes=2, token=TOKEN)
    refused = job.join(wrong, token).exception(LONG_S)
    assert isinstance(refused, RefusedError)
    assert words in refused.why
    assert refused.exit_code == 2
    good = job.join(node("mn1", 1), TOKEN)
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn1"]
    assert good.result(LONG_S).node_rank == 1


def test_a_node_with_another_version_is_refused_by_the_controller_too(job):
    controller = job.gather(nnodes=2)
    connection, reader = joined_by_hand(job, node("mn9", 1), version="2.0")
    assert "runs msrun '2.0'" in heard(connection, reader).why
    assert is_closed(connection)
    job.join(node("mn1", 1))
    controller.result(LONG_S)
    assert "a node was refused: a node at 127.0.0.1 runs msrun '2.0'" in job.until("refused")


def test_a_node_with_a_token_does_not_join_a_job_without(job):
    controller = job.gather(nnodes=2)
    refused = job.join(node("mn9", 1), TOKEN).exception(LONG_S)
    assert "mn9 (127.0.0.1) has a token, the job has none" in str(refused)
    job.join(node("mn1", 1))
    controller.result(LONG_S)


@pytest.mark.parametrize("proof", ["", "wrong", Proofs("run", "c", "n").proof(TOKEN, Side.NODE)])
def test_a_node_obeys_no_controller_that_does_not_know_its_token(job, proof):
    joiner = job.join(node("mn1", 1), TOKEN)
    connection, _ = met_by_hand(job)
    connection.sendall(bytes_of(Admitted(1, proof)))
    assert f"127.0.0.1:{job.port} does not know the token" in str(joiner.exception(LONG_S))


@pytest.mark.usefixtures("talkative")
def test_missing_nodes_are_named_to_everybody(job, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(gathering, "time", clock)
    controller = job.gather()
    here = job.join(node("mn2", 2))
    job.until("2 of 3 nodes are here")
    clock.late_s = LONG_S
    error = controller.exception(LONG_S)
    assert isinstance(error, MissingNodesError)
    assert str(error).startswith("not all nodes came within ")
    assert str(error).endswith("2 of 3 nodes are here (mn0, mn2); node rank 1 is missing")
    assert (here.exception(LONG_S).why, here.exception().exit_code) == (str(error), 1)


@pytest.mark.usefixtures("talkative")
def test_who_waits_hears_that_the_controller_was_interrupted(job):
    def interrupt(text):
        if "2 of 3 nodes" in text:
            raise KeyboardInterrupt

    controller, here = job.gather(say=interrupt), job.join(node("mn2", 2))
    assert "msrun on mn0 ended before all nodes were here" in str(here.exception(LONG_S))
    assert isinstance(controller.exception(LONG_S), KeyboardInterrupt)


@pytest.mark.usefixtures("talkative")
def test_the_seat_of_a_node_that_dies_while_others_are_awaited_is_free(job):
    controller = job.gather()
    connection, _ = joined_by_hand(job, node("mn8", 1))
    job.until("2 of 3 nodes are here (mn0, mn8)")
    connection.close()
    job.until("1 of 3 nodes is here (mn0)")
    others = [job.join(node("mn1", 1)), job.join(node("mn2", 2))]
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn1", "mn2"]
    assert [each.result(LONG_S).node_rank for each in others] == [1, 2]


@pytest.mark.usefixtures("talkative")
def test_a_node_that_lost_its_connection_takes_its_own_seat_again(job):
    controller = job.gather(nnodes=3)
    old, _ = joined_by_hand(job, node("mn1", 1))  # as if the network had forgotten this connection
    job.until("2 of 3 nodes are here")
    again = job.join(node("mn1", 1))
    assert is_closed(old)
    job.join(node("mn2", 2))
    controller.result(LONG_S)
    assert again.result(LONG_S).node_rank == 1


def test_a_node_that_speaks_before_the_job_begins_is_none(job):
    controller = job.gather(nnodes=3)
    connection, _ = joined_by_hand(job, node("mn8", 1))
    connection.sendall(bytes_of(ShownStatus({})))
    assert is_closed(connection)
    job.join(node("mn1", 1))
    job.join(node("mn2", 2))
    assert controller.result(LONG_S).roster.nodes[1].host == "mn1"


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


@pytest.mark.parametrize("patience_s", [0.0, 0.02])
def test_strangers_are_closed_without_a_word_and_make_nobody_wait(job, monkeypatch, patience_s):
    monkeypatch.setattr(gathering, "MOST_UNKNOWN", 8)
    monkeypatch.setattr(gathering, "PATIENCE_S", patience_s)
    monkeypatch.setattr(gathering, "ANSWER_S", LONG_S)
    controller = job.gather(nnodes=2)
    for data in STRANGERS[:3]:
        assert is_closed(job.connect(data))
    for data in STRANGERS[3:]:
        connection, reader = job.connect(data), FrameReader()
        assert isinstance(heard(connection, reader), Challenge)
        assert is_closed(connection)
    silent = [job.connect() for _ in range(40)]
    assert is_closed(silent[0])  # there is no room for so many
    other = job.join(node("mn1", 1))
    whole = controller.result(LONG_S)
    assert whole.strangers >= len(STRANGERS)
    assert other.result(LONG_S).roster.world_size == 4
    assert all(map(is_closed, silent))
    assert job.lines.empty()


def test_who_says_nothing_is_closed_in_time(job, monkeypatch):
    monkeypatch.setattr(gathering, "ANSWER_S", 0.05)
    controller = job.gather(nnodes=2)
    assert is_closed(job.connect())
    assert is_closed(job.connect(PREAMBLE[:2]))
    monkeypatch.setattr(gathering, "ANSWER_S", 60.0)
    job.join(node("mn1", 1))
    assert controller.result(LONG_S).strangers == 2


def test_who_fills_the_room_has_a_moment_to_say_who_it_is(job, monkeypatch):
    monkeypatch.setattr(gathering, "MOST_UNKNOWN", 1)
    monkeypatch.setattr(gathering, "PATIENCE_S", LONG_S)
    controller = job.gather(nnodes=2)
    slow, reader = job.connect(PREAMBLE), FrameReader()
    challenge = heard(slow, reader)
    for _ in range(5):
        job.connect()
    slow.sendall(bytes_of(wish(node("mn1", 1), challenge)))
    assert isinstance(heard(slow, reader), Admitted)
    controller.result(LONG_S)


def test_a_node_dials_again_if_the_controller_dies_before_the_job_begins(job):
    joiner = job.join(node("mn1", 1))
    connection, wish = met_by_hand(job)
    assert (wish.host, wish.node_rank, wish.proof) == ("mn1", 1, "")
    connection.close()
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes_of(ShownStatus({})),
        bytes_of(Challenge("c", "1.0")) + bytes_of(ShownStatus({})),
        bytes_of(Challenge("c", "1.0")) + bytes_of(Admitted(5, "")) + bytes_of(Begin((), {})),
        b"",
    ],
)
def test_a_node_dials_again_if_something_else_answers(job, answer):
    joiner = job.join(node("mn1", 1))
    connection = job.accept()
    connection.sendall(answer)
    connection.shutdown(socket.SHUT_WR)
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


def test_a_node_dials_again_if_who_answers_stays_silent(job, monkeypatch):
    monkeypatch.setattr(joining, "CHALLENGE_S", 0.2)
    joiner = job.join(node("mn1", 1))
    assert is_closed_after(job.accept(), PREAMBLE)
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


@pytest.mark.usefixtures("talkative")
def test_the_name_of_the_controller_may_be_known_late(job, monkeypatch):
    fails = iter([True, True])
    real = socket.getaddrinfo

    def late(*args, **more):
        if next(fails, False):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(*args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    joiner = job.join(node("mn1", 1))
    job.until("does not resolve (Name or service not known)")
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


@pytest.mark.usefixtures("talkative")
def test_a_node_that_nobody_answers_ends_with_the_last_error(job, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    joiner = job.join(node("mn1", 1))
    job.until("Connection refused")
    clock.late_s = LONG_S
    error = joiner.exception(LONG_S)
    assert isinstance(error, NeverBegunError)
    assert str(error).startswith("the job did not begin within ")
    assert str(error).endswith(f": 127.0.0.1:{job.port} does not answer (Connection refused)")


@pytest.mark.usefixtures("talkative")
def test_a_node_whose_job_never_begins_says_what_it_waited_for(job, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    controller, joiner = job.gather(nnodes=3), job.join(node("mn1", 1))
    job.until("waiting to begin: 127.0.0.1:")
    job.until("waits for other nodes")
    clock.late_s = LONG_S
    assert str(joiner.exception(LONG_S)).endswith("waits for other nodes")
    clock.late_s = 0.0
    for name in ("mn1", "mn2"):
        job.join(node(name), timeout_s=None)
    controller.result(LONG_S)


def test_what_follows_begin_at_once_is_not_lost(job):
    joiner = job.join(node("mn1", 1))
    connection, _ = met_by_hand(job)
    nodes = tuple(NodeFacts(rank, f"mn{rank}", "127.0.0.1", 2, 1) for rank in range(2))
    more = bytes_of(Order({"kind": "Sweep", "reason": "why"}))
    begin = bytes_of(Admitted(1, "")) + bytes_of(Begin(nodes, {}))
    connection.sendall(begin + more + more[:7])
    line = joiner.result(LONG_S).line
    loop, orders = asyncio.new_event_loop(), []
    link = NodeLink(line)

    def hear(message):
        orders.append(message)
        if len(orders) == 2:
            loop.stop()

    link.attach(loop, hear, lambda _: loop.stop())
    connection.sendall(more[7:])
    loop.run_forever()
    loop.close()
    link.close()
    assert [each.action["kind"] for each in orders] == ["Sweep", "Sweep"]


def test_settings_that_no_socket_takes_at_once_arrive(job):
    settings = {"text": "x" * (12 << 20)}
    controller, other = job.gather(nnodes=2, settings=settings), job.join(node("mn1", 1))
    line = controller.result(LONG_S).lines[1]
    assert line.unsent  # so the test sees to what it is about
    loop = asyncio.new_event_loop()
    link = NodeLink(line)
    link.attach(loop, lambda _: None, lambda _: None)
    joined = loop.run_until_complete(asyncio.wrap_future(other, loop=loop))
    assert joined.settings == settings
    link.close()
    loop.close()


OVER = Refused("the job is over: all ranks succeeded", 0)


@pytest.fixture
def late(job):
    """A job that has begun, and its loop."""
    job.listener.listen(100)
    loop = asyncio.new_event_loop()
    answers = [Refused("the job has begun with all its nodes (mn0, mn1)", 2)]
    admitted = queue.Queue()
    guests = LateGuests(
        job.listener, "1.0", TOKEN, lambda *_: answers[0], lambda *about: admitted.put(about)
    )
    guests.attach(loop)
    guests.loop, guests.answers, guests.admitted = loop, answers, admitted
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield guests
    loop.call_soon_threadsafe(guests.close, OVER)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_late_node_hears_that_the_job_has_begun(job, late):
    error = job.join(node("mn7"), TOKEN).exception(LONG_S)
    assert (error.why, error.exit_code) == ("the job has begun with all its nodes (mn0, mn1)", 2)
    assert "needs a token" in str(job.join(node("mn8")).exception(LONG_S))
    assert (late.refused, late.strangers) == (2, 0)


def test_late_strangers_are_closed_and_only_so_many_are_kept(job, late, monkeypatch):
    monkeypatch.setattr("agent.nodes.late.MOST_GUESTS", 4)
    monkeypatch.setattr("agent.nodes.late.ANSWER_S", 2 * LONG_S)
    for data in STRANGERS[:3]:
        assert is_closed(job.connect(data))
    silent = [job.connect() for _ in range(12)]
    assert all(is_closed(each) for each in silent[:8])
    assert "has begun" in str(job.join(node("mn7"), TOKEN).exception(LONG_S))
    assert late.strangers >= 11


@pytest.mark.usefixtures("late")
def test_late_strangers_that_say_nothing_are_closed_in_time(job, monkeypatch):
    monkeypatch.setattr("agent.nodes.late.ANSWER_S", 0.05)
    assert is_closed(job.connect())


# --- spare nodes ----------------------------------------------------------------------------------

SEAT = NodePlace(1, Begin((NodeFacts(0, "mn0", "", 2, 1), NodeFacts(1, "mn7", "", 2, 2)), {"x": 1}))


def spare(job, say=None, timeout_s=LONG_S):
    """A node that waits; the event is set once it knows that it does."""
    waits = threading.Event()
    own = node("mn7", is_spare=True)
    args = (own, TOKEN, timeout_s, say or job.lines.put)
    future = job._start(join, "127.0.0.1", job.port, *args, 10.0, waits.set)
    return future, waits


def test_a_spare_node_takes_a_place_that_becomes_free(job, late):
    late.answers[0] = Spare()
    future, waits = spare(job)
    assert waits.wait(LONG_S)
    assert not future.done()
    late.answers[0] = SEAT
    late.loop.call_soon_threadsafe(late.seat)
    joined = future.result(LONG_S)
    assert (joined.node_rank, joined.settings) == (1, {"x": 1})
    rank, line = late.admitted.get(timeout=LONG_S)
    assert rank == 1
    line.connection.close()


def test_a_spare_node_waits_longer_than_nodes_of_the_job_may(job, late, monkeypatch):
    late.answers[0] = Spare()
    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    future, waits = spare(job, timeout_s=5.0)
    assert waits.wait(LONG_S)
    clock.late_s = 1e6
    late.answers[0] = SEAT
    late.loop.call_soon_threadsafe(late.seat)
    assert future.result(LONG_S).node_rank == 1
    late.admitted.get(timeout=LONG_S)[1].connection.close()


def test_a_spare_node_that_was_not_needed_ends_as_the_job(job, late):
    late.answers[0] = Spare()
    future, waits = spare(job)
    assert waits.wait(LONG_S)
    late.loop.call_soon_threadsafe(late.close, OVER)
    error = future.exception(LONG_S)
    assert (error.why, error.exit_code) == (OVER.why, 0)
    late.loop.call_soon_threadsafe(late.attach, late.loop)  # for the fixture


def test_a_spare_node_that_is_gone_gets_no_place(job, late):
    late.answers[0] = Spare()
    connection = job.connect(PREAMBLE)
    reader = FrameReader()
    challenge = heard(connection, reader)
    own = node("mn8", is_spare=True)
    proofs = Proofs(own.run_id, challenge.nonce, "00" * 16)
    proof = proofs.proof(TOKEN, Side.NODE)
    about = (own.run_id, own.record_id, ANY_RANK, 2, own.host, own.pid, own.version, "")
    wish = Join(*about, "00" * 16, proof, is_spare=True)
    connection.sendall(bytes_of(wish))
    assert heard(connection, reader) == Spare()
    connection.close()
    future, waits = spare(job)
    assert waits.wait(LONG_S)  # by then the other end is known to be closed
    late.answers[0] = SEAT
    late.loop.call_soon_threadsafe(late.seat)
    assert future.result(LONG_S).node_rank == 1
    late.admitted.get(timeout=LONG_S)[1].connection.close()
    assert late.admitted.empty()


def test_a_spare_node_that_loses_the_job_ends(job):
    future, waits = spare(job)
    connection = job.accept()
    connection.sendall(bytes_of(Challenge("00" * 16, "1.0")))
    connection.sendall(bytes_of(Spare()))
    assert waits.wait(LONG_S)
    connection.close()
    error = future.exception(LONG_S)
    assert isinstance(error, RefusedError)
    assert "the job has ended, or node 0 is lost" in error.why
    assert error.exit_code == 1


def test_a_spare_node_takes_no_place_while_nodes_gather(job):
    controller = job.gather(nnodes=2, token=TOKEN)
    future, waits = spare(job, timeout_s=1.5)
    error = future.exception(LONG_S)
    assert isinstance(error, NeverBegunError)
    assert "has not begun the job yet" in str(error)
    assert not waits.is_set()
    other = job.join(node("mn1"), TOKEN)
    assert controller.result(LONG_S).node_rank == 0
    assert other.result(LONG_S).node_rank == 1


def test_a_guest_that_fills_memory_is_a_stranger(job):
    controller = job.gather(nnodes=2)
    connection = job.connect(PREAMBLE)
    size = guest.STRANGER_BYTES + 1
    connection.sendall(size.to_bytes(4, "big"))
    reader = FrameReader()
    assert isinstance(heard(connection, reader), Challenge)
    assert is_closed(connection)
    job.join(node("mn1", 1))
    controller.result(LONG_S)
