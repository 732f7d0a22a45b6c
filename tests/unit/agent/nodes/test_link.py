"""A line to another node: nothing is lost or cut, and its end says what is known."""

import asyncio
import errno
import os
import socket
import struct
import threading
from types import SimpleNamespace

import pytest
from support.stand_ins import turn

from agent.nodes import link as links
from agent.nodes.frames import FrameError, FrameReader, message_of
from agent.nodes.line import (
    TCP_RTO_MAX_MS,
    Line,
    Loss,
    LossKind,
    Pulse,
    bytes_of,
    loss_of,
    plain_address,
    set_options,
)
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import Beats, Ended, ShownStatus, ToRank


def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


class End:
    """One link on a loop, and all that it says."""

    def __init__(self, loop, line):
        self.loop = loop
        self.heard, self.losses = [], []
        self.link = NodeLink(line)
        self._news = asyncio.Event()

    def attach(self):
        self.link.attach(self.loop, self._hear, self._lose)
        return self

    def _hear(self, message):
        self.heard.append(message)
        self._news.set()

    def _lose(self, loss):
        self.losses.append(loss)
        self._news.set()

    def until(self, condition):
        async def wait():
            while not condition():
                self._news.clear()
                await asyncio.wait_for(self._news.wait(), 60)

        self.loop.run_until_complete(wait())

    def loss(self):
        self.until(lambda: self.losses)
        assert len(self.losses) == 1
        return self.losses[0]


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def ends(loop):
    """Two links that are connected."""
    both = [End(loop, Line(connection)).attach() for connection in pair()]
    yield both
    for end in both:
        end.link.close()


@pytest.fixture
def end(loop):
    """A link, and the plain socket at its other end."""
    one, other = pair()
    other.settimeout(60)
    end = End(loop, Line(one)).attach()
    end.peer = other
    yield end
    end.link.close()
    other.close()


def noted(number):
    return ShownStatus({"number": number})


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_messages_arrive_in_order_both_ways(ends):
    one, other = ends
    said = [noted(number) for number in range(500)]
    for message in said:
        one.link.send(message)
        other.link.send(message)
    one.until(lambda: len(one.heard) == 500)
    other.until(lambda: len(other.heard) == 500)
    assert one.heard == other.heard == said


def test_large_messages_both_ways_at_once_block_nobody(ends):
    one, other = ends
    large = ShownStatus({"text": os.urandom(3 << 20).hex()})
    for _ in range(3):
        one.link.send(large)
        other.link.send(large)
    one.until(lambda: len(one.heard) == 3)
    other.until(lambda: len(other.heard) == 3)
    assert one.heard == other.heard == [large] * 3


def test_half_frames_are_put_together(end):
    for octet in bytes_of(noted(1)) + bytes_of(noted(2)):
        end.peer.send(bytes([octet]))
        turn(end.loop)
    end.until(lambda: len(end.heard) == 2)
    assert end.heard == [noted(1), noted(2)]


def test_what_was_read_or_not_sent_before_the_link_was_made_is_not_lost(loop):
    one, other = pair()
    second = bytes_of(noted(2))
    early = End(loop, Line(one, bytes_of(noted(1)) + second[:5], bytes_of(noted(3))))
    late = End(loop, Line(other))
    late.link.send(noted(4))  # before it is attached
    other.sendall(second[5:])
    early.attach()
    late.attach()
    early.until(lambda: len(early.heard) == 3)
    late.until(lambda: late.heard)
    assert early.heard == [noted(1), noted(2), noted(4)]
    assert late.heard == [noted(3)]
    early.link.close()
    late.link.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_the_end_of_a_process_is_proof_and_its_last_words_are_heard(end, leave):
    end.peer.sendall(bytes_of(noted(1)) + bytes_of(noted(2)))
    leave(end.peer)
    assert end.loss().kind is LossKind.PROOF
    assert end.heard == [noted(1), noted(2)]
    assert not end.link.is_open


def test_last_words_are_heard_though_sending_fails_first(end):
    end.peer.sendall(bytes_of(noted(1)))
    reset(end.peer)
    for _ in range(3):
        end.link.send(noted(9))
    assert end.losses == []  # not while the caller sends
    assert end.loss().kind is LossKind.PROOF
    assert end.heard == [noted(1)]


def test_a_failure_of_sending_is_told_though_reading_then_only_sees_an_end(end):
    class Unplugged(socket.socket):
        def send(self, _):
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

    end.link._connection = Unplugged(fileno=end.link._connection.detach())
    end.peer.close()
    end.link.send(noted(1))
    end.link.end_turn()
    end.link._read()
    assert end.losses == [Loss(LossKind.SILENCE, "is lost (Connection timed out)")]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ECONNRESET, LossKind.PROOF),
        (errno.EPIPE, LossKind.PROOF),
        (errno.ECONNREFUSED, LossKind.PROOF),
        (errno.ETIMEDOUT, LossKind.SILENCE),
        (errno.EHOSTUNREACH, LossKind.SILENCE),
        (errno.ENETUNREACH, LossKind.SILENCE),
    ],
)
def test_only_what_a_living_kernel_says_is_proof(number, kind):
    assert loss_of(OSError(number, os.strerror(number))) == (
        kind,
        f"is lost ({os.strerror(number)})",
        0.0,
    )


@pytest.mark.parametrize("said", [b"\xff" * 8, b"\0\0\0\2{}", b'\0\0\0\x12{"kind":"Unheard"}'])
def test_nonsense_ends_the_line_but_proves_no_death(end, said):
    end.peer.sendall(bytes_of(noted(1)) + said)
    loss = end.loss()
    assert loss.kind is LossKind.SILENCE
    assert "nobody understands" in loss.why
    assert end.heard == [noted(1)]


def test_an_end_that_takes_nothing_is_lost_before_memory_is(end, monkeypatch):
    monkeypatch.setattr(links, "MOST_UNSENT", 1 << 20)
    text = "x" * (1 << 18)
    for number in range(100):
        end.link.send(ShownStatus({"number": number, "text": text}))
    loss = end.loss()
    assert loss.kind is LossKind.SILENCE
    assert "takes too little" in loss.why


def test_after_close_nothing_is_heard_sent_or_reported(end):
    end.peer.sendall(bytes_of(noted(1)))
    end.link.close()
    end.link.close()
    end.link.send(noted(2))
    turn(end.loop)
    assert (end.heard, end.losses, end.link.is_open) == ([], [], False)


def test_what_lies_unread_is_heard_at_once_when_somebody_is_to_be_judged(end, monkeypatch):
    monkeypatch.setattr(links, "RECEIVE_BYTES", 100)
    turn(end.loop)
    said = [noted(number) for number in range(20)]
    end.peer.sendall(b"".join(map(bytes_of, said)))
    end.link.catch_up()
    assert end.heard == said
    end.peer.sendall(bytes_of(noted(20)))
    end.peer.close()
    end.link.catch_up()
    end.link.catch_up()
    assert end.heard == [*said, noted(20)]
    assert end.loss().kind is LossKind.PROOF


def test_one_that_does_not_stop_talking_holds_up_nobody(end, monkeypatch):
    monkeypatch.setattr(links, "RECEIVE_BYTES", len(bytes_of(noted(1))))
    monkeypatch.setattr(links, "MOST_READS", 2)
    turn(end.loop)
    end.peer.sendall(bytes_of(noted(1)) * 3)
    end.link.catch_up()
    assert end.heard == [noted(1)] * 2


def test_what_was_read_before_the_link_was_made_comes_first(loop):
    one, other = pair()
    heard = []
    link = NodeLink(Line(one, heard=bytes_of(noted(1))))
    link.attach(loop, heard.append, lambda _: None)
    other.sendall(bytes_of(noted(2)))
    link.catch_up()
    turn(loop, 10)
    assert heard == [noted(1), noted(2)]
    link.close()
    other.close()


def test_who_closes_while_hearing_hears_no_more(loop):
    one, other = pair()
    link, heard = NodeLink(Line(one)), []

    def hear(message):
        heard.append(message)
        link.close()

    link.attach(loop, hear, lambda _: heard.append("lost"))
    other.sendall(bytes_of(noted(1)) + bytes_of(noted(2)))
    other.close()
    turn(loop, 10)
    assert heard == [noted(1)]


def test_a_message_that_cannot_travel_is_the_senders_mistake(end, monkeypatch):
    monkeypatch.setattr("agent.nodes.frames.MOST_BYTES", 100)
    with pytest.raises(FrameError):
        end.link.send(ShownStatus({"text": "x" * 100}))
    end.link.send(noted(1))
    turn(end.loop)
    assert FrameReader(message_of).feed(end.peer.recv(1000)) != []
    assert end.losses == []


def test_what_is_said_in_one_turn_goes_out_together_and_in_order(end, monkeypatch):
    calls = []
    send = socket.socket.send
    monkeypatch.setattr(
        socket.socket, "send", lambda one, data: calls.append(len(data)) or send(one, data)
    )
    said = [noted(1), ToRank(3, {"kind": "GoOn"}), ToRank(4, {"kind": "GoOn"}), noted(2)]
    for each in said:
        end.link.send(each)
    turn(end.loop)
    assert len(calls) == 1
    heard = FrameReader(message_of).feed(end.peer.recv(1000))
    assert [each["kind"] for each in heard] == ["ShownStatus", "ToRanks", "ShownStatus"]


def test_what_was_said_before_the_line_is_closed_still_goes(end):
    end.link.send(noted(1))
    end.link.close()
    assert FrameReader(message_of).feed(end.peer.recv(1000)) != []


def read_all(connection, reader, into):
    while data := connection.recv(1 << 16):
        into += reader.feed(data)


def test_draining_sends_everything_and_waits_for_the_other_end(end):
    large = ShownStatus({"text": "x" * (5 << 20)})
    end.link.send(large)
    end.link.send(Ended(3, "over"))
    heard = []
    reading = threading.Thread(target=read_all, args=(end.peer, FrameReader(message_of), heard))
    # unread, this must not take back what is sent
    end.peer.sendall(bytes_of(Beats.of(0, {}, {}, 0)))
    reading.start()
    closing = threading.Thread(target=lambda: (reading.join(), end.peer.close()))
    closing.start()
    assert end.link.drain(60)
    closing.join()
    assert [each["kind"] for each in heard] == ["ShownStatus", "Ended"]
    assert not end.link.is_open


def test_draining_gives_up_on_an_end_that_reads_nothing(end):
    end.link.send(ShownStatus({"text": "x" * (12 << 20)}))
    assert not end.link.drain(0.05)
    assert not end.link.is_open
    assert not end.link.drain(60)


def test_draining_a_line_whose_other_end_is_gone_ends_at_once(end):
    reset(end.peer)
    end.link.send(noted(1))
    end.link.drain(60)
    assert not end.link.is_open


def test_both_ends_may_drain_at_once(ends):
    one, other = ends
    one.link.send(noted(1))
    other.link.send(noted(2))
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(other.link.drain(60)))
    thread.start()
    assert one.link.drain(60)
    thread.join()
    assert outcomes == [True]


@pytest.mark.parametrize(("limit_s", "count", "user_ms"), [(10.0, 9, 10_000), (0.5, 1, 2000)])
def test_the_kernel_watches_for_silence(limit_s, count, user_ms):
    with socket.socket() as connection:
        set_options(connection, limit_s)
        tcp = socket.IPPROTO_TCP
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        wanted = {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: 1,
            socket.TCP_KEEPINTVL: 1,
            socket.TCP_KEEPCNT: count,
            socket.TCP_USER_TIMEOUT: user_ms,
        }
        assert {name: connection.getsockopt(tcp, name) for name in wanted} == wanted


def test_unacknowledged_data_is_sent_again_each_second():
    """Else a cable that is back after seven seconds is noticed behind the limit of ten alone."""
    with socket.socket() as connection:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 2000)
        except OSError:
            pytest.skip("Linux before 6.15 cannot be told")
        set_options(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) == 1000


def test_an_ipv4_address_is_shown_as_one():
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1") == "fe80::1"


# --- whether the other machine answers ----------------------------------------------------------


class Kernel:
    """What it tells of a connection; times in milliseconds."""

    def __init__(self):
        self.unacked, self.data_ago, self.ack_ago = 0, 900, 900
        self.is_old = self.is_gone = False

    def getsockopt(self, level, name, size):
        assert (level, name) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        if self.is_gone:
            raise OSError(errno.EBADF, "gone")
        numbers = [0] * 13
        numbers[4], numbers[11], numbers[12] = self.unacked, self.data_ago, self.ack_ago
        return struct.pack("=8B13I", *[0] * 8, *numbers)[: 40 if self.is_old else size]


@pytest.fixture
def kernel(monkeypatch):
    """With a clock that goes on 0.2 s at each look."""
    looks = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: 0.2 * next(looks))
    monkeypatch.setattr("agent.nodes.line.time", clock)
    return Kernel()


def test_an_idle_line_is_in_no_doubt(kernel):
    pulse = Pulse(kernel)
    assert not pulse.is_missed()


def test_what_is_not_acknowledged_is_missed(kernel):
    pulse = Pulse(kernel)
    kernel.unacked = 1
    assert pulse.is_missed()
    kernel.unacked = 0
    assert not pulse.is_missed()


@pytest.mark.parametrize("heard", ["data_ago", "ack_ago"])
def test_whoever_is_heard_lives(kernel, heard):
    pulse = Pulse(kernel)
    kernel.unacked = 1  # of what was sent just now
    setattr(kernel, heard, 210)  # the answer to what was sent at the last look, by a coarse clock
    assert not pulse.is_missed()
    setattr(kernel, heard, 240)
    assert pulse.is_missed()


@pytest.mark.parametrize("why", ["is_old", "is_gone"])
def test_a_kernel_that_does_not_tell_leaves_no_doubt(kernel, why):
    pulse = Pulse(kernel)
    kernel.unacked = 1
    setattr(kernel, why, True)
    assert not pulse.is_missed()
    assert pulse.unheard_s() == 0


def test_how_long_nothing_was_heard_is_known(kernel):
    kernel.data_ago, kernel.ack_ago = 7300, 5200
    assert Pulse(kernel).unheard_s() == 5.2


def test_a_machine_whose_msrun_reads_nothing_answers(end):
    """Its kernel does."""
    assert not end.link.is_in_doubt()
    for number in range(20):
        end.link.send(noted(number))
        assert not end.link.is_in_doubt()


def test_a_lost_line_is_in_doubt(end):
    assert end.link.unheard_s() < 5
    end.link.close()
    assert end.link.is_in_doubt()
    assert end.link.unheard_s() == 0


# --- a machine that says nothing any more ---------------------------------------------------------


class Quiet(socket.socket):
    """A connection whose kernel tells how long ago the other machine was heard."""

    heard_s = limit_s = 0.0
    clock = staticmethod(lambda: 0.0)
    dies_of = 0

    def recv(self, *words):
        if self.dies_of:
            raise OSError(self.dies_of, os.strerror(self.dies_of))
        return super().recv(*words)

    def getsockopt(self, level, name, *size):
        if level == socket.IPPROTO_TCP and name == socket.TCP_USER_TIMEOUT:
            return int(self.limit_s * 1000)
        if level == socket.IPPROTO_TCP and name == socket.TCP_INFO:
            ago = round(1000 * (self.clock() - self.heard_s))
            return struct.pack("=8B13I", *[0] * 8, *[0] * 11, ago, ago)
        return super().getsockopt(level, name, *size)


@pytest.fixture
def quiet(loop, monkeypatch):
    """A link with a limit of ten seconds, on a clock that stands still; heard at 0.7 s."""
    one, other = pair()
    now = [1.0]
    monkeypatch.setattr(loop, "time", lambda: now[0])
    connection = Quiet(fileno=one.detach())
    connection.clock, connection.heard_s, connection.limit_s = loop.time, 0.7, 10.0
    end = End(loop, Line(connection)).attach()
    end.peer, end.connection = other, connection

    def pass_until(at_s):
        now[0] = at_s
        turn(loop)

    end.pass_until = pass_until
    yield end
    end.link.close()
    other.close()


def test_silence_is_noticed_a_second_behind_the_limit_at_the_latest(quiet):
    """When the kernel does depends on what it had to send."""
    quiet.pass_until(11.69)
    assert not quiet.losses
    quiet.pass_until(11.71)
    (loss,) = quiet.losses
    assert loss[:2] == (LossKind.SILENCE, "is lost (Connection timed out)")
    assert loss.over_s == pytest.approx(1.0, abs=0.02)
    assert not quiet.link.is_open


def test_the_limit_counts_from_what_was_heard_last(quiet):
    quiet.connection.heard_s = 6.0
    quiet.pass_until(11.71)
    quiet.pass_until(16.99)
    assert not quiet.losses
    quiet.pass_until(17.01)
    assert len(quiet.losses) == 1


def test_a_clock_that_is_a_little_fast_does_not_bring_it_forward(quiet):
    """The loop may be early by its clock's resolution."""
    quiet.connection.clock = lambda: quiet.loop.time() - 0.1
    quiet.pass_until(11.71)
    assert not quiet.losses
    quiet.pass_until(11.82)
    assert len(quiet.losses) == 1


@pytest.mark.parametrize("kernel_tells", [True, False])
@pytest.mark.parametrize("at_s", [9.7, 10.9])
def test_it_is_said_how_long_it_was_as_the_kernel_noticed(quiet, at_s, kernel_tells):
    """It may be less than the limit: what this end said was not answered, the other one spoke."""
    quiet.pass_until(at_s)
    if not kernel_tells:
        quiet.connection.heard_s = at_s
    quiet.connection.dies_of = errno.ETIMEDOUT
    quiet.peer.send(b"wake")
    (loss,) = [quiet.loss()]
    assert loss[:2] == (LossKind.SILENCE, "is lost (Connection timed out)")
    assert loss.over_s == pytest.approx(at_s - 10.7 if kernel_tells else 0.0, abs=0.02)


@pytest.mark.parametrize("limit_s", [0.0, 30.0])
def test_the_limit_is_that_of_the_connection(quiet, loop, limit_s):
    one, other = pair()
    connection = Quiet(fileno=one.detach())
    connection.clock, connection.limit_s = loop.time, limit_s
    end = End(loop, Line(connection)).attach()
    quiet.pass_until(30.9)
    assert not end.losses
    quiet.pass_until(31.1)
    assert len(end.losses) == (1 if limit_s else 0)
    end.link.close()
    other.close()


def test_whoever_was_silent_gets_nothing_late(quiet):
    """What was ordered of it before it was given up must not be done behind that."""
    quiet.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    quiet.link.send(ShownStatus({"text": os.urandom(3 << 20).hex()}))
    turn(quiet.loop)
    quiet.pass_until(11.71)
    quiet.peer.settimeout(60)
    with pytest.raises(ConnectionResetError):
        while quiet.peer.recv(1 << 20):
            pass


def test_a_closed_link_does_not_look_any_more(quiet):
    quiet.link.close()
    quiet.pass_until(99.0)
    assert not quiet.losses
