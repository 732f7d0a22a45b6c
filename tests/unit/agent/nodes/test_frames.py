"""Frames of a stream: any cut, any garbage."""

import json
import zlib

import pytest

from agent.nodes import frames
from agent.nodes.frames import FrameError, FrameReader, frame, message_of

MESSAGES = [{"kind": "A"}, {"kind": "B", "text": "ä\udc80", "numbers": [1, 2.5, None]}]


def framed(body):
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_messages_come_whole_in_whatever_pieces_their_bytes_arrive(size):
    stream = b"".join(map(frame, MESSAGES * 3))
    reader, heard = FrameReader(message_of), []
    for at in range(0, len(stream), size):
        heard += reader.feed(stream[at : at + size])
    assert heard == MESSAGES * 3
    assert reader.rest() == b""


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_bytes_travel_beside_the_object(size):
    stream = frame({"kind": "A", "page": b"12", "more": {"b": b"345", "c": b""}}) + frame(
        MESSAGES[0]
    )
    reader, heard = FrameReader(message_of), []
    for at in range(0, len(stream), size):
        heard += reader.feed(stream[at : at + size])
    told = {"kind": "A", "page": 2, "more": {"b": 3, "c": 0}, "octets": b"12345"}
    assert heard == [told, MESSAGES[0]]


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00\x00\x00"])
def test_a_frame_without_room_for_the_size_of_its_object_is_refused(body):
    stream = (1 << 30 | len(body)).to_bytes(4, "big") + body + frame(MESSAGES[0])
    with pytest.raises(FrameError, match="cut short"):
        FrameReader(message_of).feed(stream)


def test_an_object_that_ends_behind_its_frame_is_refused():
    body = (13).to_bytes(4, "big") + b'{"kind":"A"}'
    with pytest.raises(FrameError, match="cut short"):
        FrameReader(message_of).feed((1 << 30 | len(body)).to_bytes(4, "big") + body)


def test_what_follows_the_last_message_taken_is_kept_for_another_reader():
    first, second = map(frame, MESSAGES)
    reader = FrameReader(message_of)
    reader.add(first + second[:9])
    assert reader.take() == MESSAGES[0]
    assert reader.take() is None
    other = FrameReader(message_of)
    assert other.feed(reader.rest() + second[9:]) == [MESSAGES[1]]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b'{"kind": 3}',
        b'{"kind": null}',
        b"\xff\xfe",
        '{"kind": "A"}'.encode("utf-16"),
        b"[" * 60_000,
        b'{"kind": "A", "n": ' + b"1" * 5000 + b"}",
    ],
)
def test_garbage_is_refused(body):
    with pytest.raises(FrameError):
        FrameReader(message_of).feed(framed(body))


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\xff" * 9]
)
def test_other_protocols_are_refused_at_their_first_bytes(data):
    with pytest.raises(FrameError):
        FrameReader(message_of).feed(data)


def test_a_length_over_the_limit_is_refused_before_its_bytes_come():
    reader = FrameReader(message_of, limit=100)
    assert reader.feed(framed(b'{"kind":"A"}')) == [{"kind": "A"}]
    with pytest.raises(FrameError, match="101 bytes is over 100"):
        reader.feed((101).to_bytes(4, "big"))


def test_the_limit_may_be_raised_for_a_peer_that_is_known():
    body = json.dumps({"kind": "A", "text": "x" * 200}).encode()
    reader = FrameReader(message_of, limit=100)
    reader.limit = frames.MOST_BYTES
    assert len(reader.feed(framed(body))) == 1


def test_a_message_that_no_frame_can_hold_is_not_sent(monkeypatch):
    monkeypatch.setattr(frames, "MOST_BYTES", 50)
    assert frame({"kind": "A"})
    with pytest.raises(FrameError, match="B of"):
        frame({"kind": "B", "text": "x" * 50})


def test_a_message_that_repeats_itself_travels_small():
    large = {"kind": "A", "nodes": [{"host": f"node{each}", "door": 1} for each in range(2000)]}
    stream = frame(large, is_deflated=True) + frame(MESSAGES[0])
    assert len(stream) < len(frame(large)) / 5
    assert FrameReader(message_of).feed(stream) == [large, MESSAGES[0]]


@pytest.mark.parametrize("cut", [0, 5])
def test_what_would_grow_over_the_limit_or_is_cut_short_is_refused(cut):
    whole = zlib.compress(json.dumps({"kind": "A", "text": " " * 10_000}).encode())
    body = whole[: len(whole) - cut]
    data = (1 << 31 | len(body)).to_bytes(4, "big") + body
    with pytest.raises(FrameError):
        FrameReader(message_of, limit=9_000 if not cut else 20_000).feed(data)
    with pytest.raises(FrameError):
        FrameReader(message_of).feed((1 << 31 | 3).to_bytes(4, "big") + b"abc")
