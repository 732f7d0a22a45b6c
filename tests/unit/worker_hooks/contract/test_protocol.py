"""The messages of one node: each arrives as it was sent, and junk is refused by name."""

import json
import os
import socket

import pytest

from worker_hooks.contract import protocol
from worker_hooks.contract.protocol import (
    Forked,
    ForkFailed,
    Preload,
    Ready,
    StartStore,
    StartWorkers,
    StoreForked,
    WorkerOrder,
)
from worker_hooks.contract.wire import (
    MOST_FDS,
    PACKET_BYTES,
    ProtocolError,
    decode,
    encode,
    receive,
    send,
)

PLAIN = WorkerOrder(0, ("python", "-u", "train.py"), {"RANK": "0"}, "", "")
BOUND = WorkerOrder(7, ("a b", "ä\n"), {}, "/l/o.log", "/l/e.log", cpus=(0, 3))
MESSAGES = [
    StartWorkers(0, ()),
    StartWorkers(3, (PLAIN, BOUND)),
    StartWorkers(3, (BOUND,), keeps=True),
    StartStore(1, "127.0.0.1", 29500),
    Preload(()),
    Preload(("torch", "torch.optim")),
    Ready(0.25),
    Ready(0.0, "torch started threads"),
    Forked(1, 0, 4711),
    ForkFailed(1, 0, "Resource temporarily unavailable"),
    StoreForked(2, 4712),
    StoreForked(2, 0, "no process"),
    protocol.ProtectWorker(4713),
    protocol.Hello(3, 1, 4714, "/ckpt", wants_resume=True),
    protocol.Welcome("/ckpt/step_5"),
    protocol.Welcome("", "no checkpoint", "/logs/dumps", 10, 20.5),
    protocol.Registered(3, 1, 5),
    protocol.PageWritten(3, 1),
    protocol.Fingerprinted(3, 1, 6, {"model.weight": "0a1b", "lr": "=0.1"}, True, "why"),
    protocol.CheckpointCompleted(0, 1, 7, "/ckpt/net-1_7"),
    protocol.Unprotected(0, 1, "train.py:41 `best` begins anew", True),
    protocol.Raised(3, 1, "ValueError: \ud800"),
    protocol.Hello(3, 1, 4714, "", False, "/somewhere/graceful_exit.json", "/checkpoints", "Net"),
    protocol.Leaving(3, 1),
    protocol.ExitRequested(3, 1, "rank 3 received SIGTERM"),
    protocol.Hold(2),
    protocol.Standing(3, 1, 2, 6),
    protocol.Proceed(2, 7),
    protocol.NotesMeasured(3, 1, 0.0004, 0.12, "the state is on an accelerator"),
    protocol.EndNotes("notes take 3 % of a step"),
    protocol.Leave(2, 7, "graceful exit: msrun received SIGTERM"),
    protocol.Dismiss("the job is stopping"),
    protocol.Freeze(2, 0.5),
    protocol.Frozen(3, 1, 2, 10**100, is_whole=True),
    protocol.Frozen(3, 1, 2, 5, is_whole=False, why="torn"),
    protocol.Frozen(3, 1, 2, 5, is_whole=True, nbytes=10**12),
    protocol.Save(2, 5, "/ckpt/step_5_tmp"),
    protocol.Save(2, 5, "/ckpt/step_5_tmp", 1, 3),
    protocol.Written(3, 1, 2, "rank_3/x", 100, "ab", "cd"),
    protocol.Digested(3, 1, 2, "cd"),
    protocol.SaveFailed(3, 1, 2, "full", is_place=True),
    protocol.Progress(3, 1, 2, 10**12),
    protocol.Release("done"),
    protocol.SaveAlone("the controller's node is lost"),
    protocol.SaveAlone("the controller's node is lost", True, "/proc/4711/fd/12"),
    protocol.Rejoin(2, "/proc/4711/fd/12", "rank 3 was killed"),
    protocol.Rejoining(3, 2),
    protocol.BringMemory(3, 2, 77, [4]),
    protocol.MemoryBrought(77, "why", [1, 2]),
    protocol.GoOn(2),
    protocol.PeerPages([0, 3], [4711, 4712]),
    protocol.Replicated("the ranks hold different state"),
    protocol.Replicated("", [0, 4]),
    protocol.Replicated("", [1], [[0, 1], [1, 3]], [["e"], ["w", "x"]], 4),
    protocol.NotShared("/data", "/data is not one folder for all nodes"),
    protocol.OpenVote(),
    protocol.OpenVote(is_over_nodes=True, is_cut=False),
    protocol.VoteOpened(3, 1, 41, "it has an accelerator"),
    protocol.Copy(40, "/proc/7/fd/12", "/proc/7/fd/13", 1, 4),
    protocol.Copied(3, 1, 40, 1 << 30, 4096, "ab" * 32, 2, 7, 0.25, "the state changed", True, 3),
    protocol.Inspect(1),
    protocol.Stack(3, 2, 1, is_in_collective=True, text="all_reduce"),
    protocol.ShadowPageWanted(3, 1),
    protocol.ShadowPage(1),
    protocol.ShadowMade(3, 1, 40, 4711, {"0": 42, "copies": 7}, 0.02),
    protocol.ShadowRefused(3, 1, 40, "the script has a TrainState", True),
    protocol.WakeShadow(2, {"RANK": "3"}, "/logs/worker_3.log", ""),
]


@pytest.fixture
def link():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_as_many_descriptors_arrive_as_travel_beside_a_message_and_no_child_has_them(link):
    ours, theirs = link
    send(ours, protocol.PeerPages([1], [2]), [0] * MOST_FDS)
    message, fds = receive(theirs)
    inherited = [fd for fd in fds if os.get_inheritable(fd)]
    for fd in fds:
        os.close(fd)
    assert (message, len(fds), inherited) == (protocol.PeerPages([1], [2]), MOST_FDS, [])


def test_every_kind_of_message_is_tried():
    assert {type(message) for message in MESSAGES} == set(protocol.Message.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_a_message_arrives_as_it_was_sent(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_a_message_is_readable_json(message):
    assert json.loads(encode(message))["kind"] == type(message).__name__


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (protocol.Leaving(0, 0), "rank", "0"),
        (protocol.Leaving(0, 0), "rank", 0.0),
        (protocol.Leaving(0, 0), "attempt", None),
        (protocol.Leaving(0, 0), "attempt", True),
        (protocol.Frozen(0, 0, 1, 5, is_whole=True), "is_whole", 1),
        (protocol.Frozen(0, 0, 1, 5, is_whole=True), "why", ["x"]),
        (protocol.Freeze(1, 1.0), "update_grace_s", "1"),
        (protocol.Freeze(1, 1.0), "update_grace_s", False),
        (protocol.ProtectWorker(5), "pid", {}),
    ],
)
def test_a_field_of_another_type_is_refused(message, field, value):
    fields = {"kind": type(message).__name__, **message._asdict(), field: value}
    with pytest.raises(ProtocolError, match="unreadable message"):
        decode(json.dumps(fields).encode())


def test_an_argument_that_is_not_text_arrives_byte_by_byte():
    """Linux file names are bytes; Python carries what is no UTF-8 as lone surrogates."""
    odd = os.fsdecode(b"train-\xff.py")
    order = WorkerOrder(0, ("python", odd), {"NAME": odd}, "", "")
    assert decode(encode(StartWorkers(0, (order,)))).workers == (order,)


JUNK = [
    b"not json",
    b"\xff\xfe",
    b"[]",
    b"7",
    b"null",
    b"{}",
    b'{"kind": "Unknown"}',
    b'{"kind": ["Forked"]}',
    b'{"kind": "Forked", "rank": 1}',
    b'{"kind": "Forked", "rank": 1, "attempt": 0, "pid": 1, "more": 1}',
    b'{"kind": "Preload"}',
    b'{"kind": "Preload", "modules": 3}',
    b'{"kind": "StartWorkers", "attempt": 0}',
    b'{"kind": "StartWorkers", "attempt": "x", "workers": []}',
    b'{"kind": "StartWorkers", "attempt": 0, "workers": [1]}',
    b'{"kind": "StartWorkers", "attempt": 0, "workers": [{}]}',
    b'{"kind": "StartWorkers", "attempt": 0, "workers": [{"rank": 0, "argv": 1, "environ": {}, "stdout": "", "stderr": ""}]}',
]


DEEP = pytest.param(b"[" * 100_000, id="deep")


@pytest.mark.parametrize("packet", [*JUNK, DEEP], ids=repr)
def test_junk_is_refused(packet):
    with pytest.raises(ProtocolError, match="unreadable message"):
        decode(packet)


def test_a_refusal_shows_no_more_than_a_line():
    with pytest.raises(ProtocolError) as refusal:
        decode(b"x" * PACKET_BYTES)
    assert len(str(refusal.value)) < 200


def test_a_message_that_fits_no_packet_is_refused_where_it_is_made():
    with pytest.raises(ValueError, match=f"ForkFailed of .* is over {PACKET_BYTES}"):
        encode(ForkFailed(0, 0, "x" * PACKET_BYTES))


def test_the_largest_message_passes_a_socket(link):
    ours, theirs = link
    message = ForkFailed(0, 0, "x" * (PACKET_BYTES - 100))
    send(ours, message)
    assert receive(theirs) == (message, [])


def test_messages_keep_their_borders(link):
    ours, theirs = link
    for message in MESSAGES:
        send(ours, message)
    assert [receive(theirs)[0] for _ in MESSAGES] == MESSAGES


def test_descriptors_travel_beside_a_message(link):
    ours, theirs = link
    reading, writing = os.pipe()
    try:
        send(ours, StartStore(0, "localhost", 1), [writing])
        message, fds = receive(theirs)
        os.write(fds[0], b"through")
        os.close(fds[0])
        assert (message, os.read(reading, 10)) == (StartStore(0, "localhost", 1), b"through")
    finally:
        os.close(reading)
        os.close(writing)


def test_a_peer_that_is_gone_is_told_apart_from_silence(link):
    ours, theirs = link
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(theirs)
    ours.close()
    assert receive(theirs) == (None, [])


def test_sending_to_a_peer_that_is_gone_is_an_oserror(link):
    ours, theirs = link
    theirs.close()
    with pytest.raises(OSError):
        send(ours, Preload(()))


def test_what_was_sent_before_the_peer_died_is_still_heard(link):
    ours, theirs = link
    send(ours, Forked(0, 0, 1))
    ours.close()
    assert [receive(theirs)[0], receive(theirs)[0]] == [Forked(0, 0, 1), None]
