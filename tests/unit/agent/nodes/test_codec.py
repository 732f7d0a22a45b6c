"""Every event, action and message survives the journey, and nothing else does."""

import contextlib
import enum
import json
import random
import tracemalloc
from typing import NamedTuple, get_args, get_origin, get_type_hints

import pytest

from agent.controller import actions, events
from agent.controller.actions import Action
from agent.controller.events import Event
from agent.machine.process_use import ProcessNews
from agent.nodes import codec, messages
from agent.nodes.frames import OCTETS, FrameError, FrameReader, frame, message_of
from agent.nodes.line import bytes_of, message_in
from agent.nodes.run_messages import Beats, PageNews, PageSeen
from agent.nodes.vocabulary import MOST_NUMBERS, CodecError, Vocabulary
from worker_hooks.contract import protocol

EVENTS, ACTIONS = get_args(Event), get_args(Action)
MESSAGES = get_args(messages.NodeMessage)


PLAIN = {
    int: [0, 1, -9, 7, 1 << 40],
    float: [0.0, 1.5, -2.25, 3e300, 7],
    bool: [False, True],
    bytes: [b"", b"\x00", b"{}", bytes(5000)],
    str: ["", "SIGTERM", "ä€\udc80", '"\n\x00'],
    object: [None, 3, "x", [1, {"a": None}], True],
    type(None): [None],
    tuple[int, ...]: [(), (0,), (0, 1, 2, 9), (3, 1), (1, 1), (-1, 2), tuple(range(64))],
}


def some(declared, rng):
    """A value of a declared type."""
    origin, inner = get_origin(declared), get_args(declared)
    if declared in PLAIN:
        return rng.choice(PLAIN[declared])
    if origin is tuple:
        return tuple(some(inner[0], rng) for _ in range(rng.randrange(4)))
    if origin is dict:
        return {f"key {at}": some(inner[1], rng) for at in range(rng.randrange(4))}
    if inner:  # a union
        return some(rng.choice(inner), rng)
    if issubclass(declared, enum.Enum):
        return rng.choice(list(declared))
    return instance(declared, rng)


def instance(kind, rng):
    names = kind._fields if issubclass(kind, tuple) else kind.__dataclass_fields__
    hints = get_type_hints(kind)
    return kind(**{name: some(hints[name], rng) for name in names})


def travelled(packed):
    (found,) = FrameReader(message_of).feed(frame(packed))
    return found


@pytest.mark.parametrize(
    ("kinds", "pack", "unpack"),
    [
        (EVENTS, codec.pack_event, codec.unpack_event),
        (ACTIONS, codec.pack_action, codec.unpack_action),
        (MESSAGES, messages.pack, messages.unpack),
    ],
)
def test_every_kind_survives_the_journey(kinds, pack, unpack):
    rng = random.Random(7)
    for kind in kinds:
        for _ in range(40):
            value = instance(kind, rng)
            back = unpack(travelled(pack(value)))
            assert back == value
            assert type(back) is kind


def test_every_message_that_can_be_told_is_nested_as_itself():
    for kind in get_args(get_type_hints(actions.Tell)["message"]):
        tell = actions.Tell((1, 2), instance(kind, random.Random(1)), "why")
        assert type(codec.unpack_action(travelled(codec.pack_action(tell))).message) is kind


def test_names_are_unique_among_all_that_is_unpacked_alike():
    for kinds in (EVENTS, ACTIONS, MESSAGES):
        assert len({kind.__name__ for kind in kinds}) == len(kinds)


def test_ranks_that_increase_travel_as_ranges():
    order = actions.SaveRanks(
        1, 2, (*range(16_383), 16_384), (5, 3), 0, "why", groups=((0, 1), (2,))
    )
    packed = codec.pack_action(order)
    assert packed["writers"] == "0-16382,16384"
    assert packed["digesters"] == [5, 3]
    assert packed["groups"] == ["0-1", "2"]
    assert codec.unpack_action(travelled(packed)) == order


def test_an_int_may_stand_for_a_float_and_becomes_one():
    packed = {**codec.pack_action(actions.RemindReplaced(2.5)), "after_s": 3}
    after_s = codec.unpack_action(packed).after_s
    assert (after_s, type(after_s)) == (3.0, float)


STARTED = codec.pack_event(events.WorkerStarted(1, 0, 77))
EXITED = codec.pack_event(events.WorkerExited(1, 0, -9))
HELD = codec.pack_action(actions.HoldRanks((0, 1), 1, "why"))
TOLD = codec.pack_action(actions.Tell((0, 1), protocol.GoOn(1), "why"))
DEADLINE = codec.pack_event(events.DeadlinePassed(events.JobState.RUNNING, 0))
PRINTS = codec.pack_event(protocol.Fingerprinted(0, 0, 1, {"a": "b"}))
DEVICES = codec.pack_action(actions.GiveUpDevices(("0",), "why"))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"kind": "Unheard"},
        {"kind": "WorkerOrder"},
        {"kind": ["WorkerStarted"]},
        {**STARTED, "rank": True},
        {**STARTED, "rank": 1.0},
        {**STARTED, "rank": "1"},
        {**STARTED, "rank": None},
        {**STARTED, "more": 1},
        {name: STARTED[name] for name in ("kind", "rank", "attempt")},
        {**EXITED, "step": "3"},
        {**EXITED, "error": None},
        {**EXITED, "is_over": 0},
        {**HELD, "ranks": "1-0"},
        {**HELD, "ranks": "0-1,2"},
        {**HELD, "ranks": "2,0"},
        {**HELD, "ranks": " 0"},
        {**HELD, "ranks": "x"},
        {**HELD, "ranks": [0, True]},
        {**HELD, "ranks": {"0": 1}},
        {**HELD, "ranks": 3},
        {**TOLD, "message": {"kind": "Hold", "dump_id": 1}},
        {**TOLD, "message": {"kind": "GoOn", "attempt": 1, "x": 1}},
        {**TOLD, "message": {"kind": "GoOn", "attempt": "1"}},
        {**TOLD, "message": None},
        {**DEADLINE, "state": "asleep"},
        {**DEADLINE, "state": []},
        {**PRINTS, "texts": {"a": 1}},
        {**PRINTS, "texts": [["a", "b"]]},
        {**DEVICES, "devices": "0"},
        {**DEVICES, "devices": [0]},
        {"kind": "RemindReplaced", "after_s": True},
        {"kind": "RemindReplaced", "after_s": float("nan")},
        {"kind": "RemindReplaced", "after_s": 10**400},
    ],
    ids=str,
)
def test_what_is_not_as_declared_is_refused(wrong):
    for unpack in (codec.unpack_event, codec.unpack_action):
        with pytest.raises(CodecError):
            unpack(wrong)


def test_an_order_is_no_event_and_an_event_no_order():
    with pytest.raises(CodecError):
        codec.unpack_event(HELD)
    with pytest.raises(CodecError):
        codec.unpack_action(STARTED)


def test_what_is_no_kind_of_the_vocabulary_is_not_packed():
    class WorkerStarted(NamedTuple):
        rank: int

    for value in (protocol.Hold(1), WorkerStarted(1), 3):
        with pytest.raises(CodecError):
            codec.pack_event(value)


def test_a_type_that_nobody_can_check_is_found_when_it_is_first_packed():
    class Loose(NamedTuple):
        ranks: set[str]

    with pytest.raises(TypeError, match="cannot travel"):
        Vocabulary([Loose]).pack(Loose({"1"}))


def test_short_texts_cannot_stand_for_more_numbers_than_there_is_memory():
    order = codec.pack_action(actions.SaveRanks(1, 2, (), (), 0, "why"))
    most = f"0-{MOST_NUMBERS - 1}"
    assert len(codec.unpack_action({**order, "writers": most}).writers) == MOST_NUMBERS
    with pytest.raises(CodecError, match="numbers"):
        codec.unpack_action({**order, "groups": [most] * 1000})
    with pytest.raises(CodecError, match="numbers"):
        codec.unpack_action({**order, "writers": most, "digesters": "0"})


def mutated(rng, data):
    """A frame with a few bytes changed, lost, doubled or cut off."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[at + rng.randrange(1, 5) :]
            case 2:
                data = data[:at] + rng.choice(FRAGMENTS) + data[at:]
            case _:
                data = data[:at] + data[rng.randrange(len(data) + 1) :]
    return data


def with_its_length(data):
    """The same frame, which has this many bytes."""
    flags = data[:1] or b"\x00"
    return (flags[0] >> 6 << 30 | max(0, len(data) - 4)).to_bytes(4, "big") + data[4:]


FRAGMENTS = [
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b'"0-9"',
    b"[",
    b"{",
    b'"kind":"Tell",',
    b"0-1048575",
    b"\xff",
]


class Pieces(NamedTuple):
    rank: int
    pieces: dict[str, bytes]


PIECES = Vocabulary([Pieces])


def pieces():
    return PIECES.pack(Pieces(3, {"128": b"one", "256": b"two"}))


def test_bytes_come_back_beside_what_names_them():
    came = travelled(pieces())
    assert came == {**pieces(), "pieces": {"128": 3, "256": 3}, OCTETS: b"onetwo"}
    assert PIECES.unpack(came) == Pieces(3, {"128": b"one", "256": b"two"})


@pytest.mark.parametrize(
    "wrong",
    [
        {OCTETS: b"onetw"},
        {OCTETS: b"onetwo!"},
        {OCTETS: "onetwo"},
        {OCTETS: None},
        {"pieces": {"128": 7}},
        {"pieces": {"128": -1}},
        {"pieces": {"128": True}},
        {"pieces": {"128": "one"}},
        {"pieces": {}},
    ],
    ids=str,
)
def test_bytes_that_are_not_as_many_as_it_says_are_refused(wrong):
    with pytest.raises(CodecError):
        PIECES.unpack({**travelled(pieces()), **wrong})


DOES = ProcessNews("S", 1.5, is_frozen=False).packed()


@pytest.mark.parametrize(
    ("told", "arguments"),
    [
        (PageSeen.of, (3, 1, b"a page")),
        (PageSeen.of, (3, 1, b"")),
        (PageNews.of, (3, 1, [(128, b"one"), (1 << 33, b""), (256, b"two")])),
        (PageNews.of, (3, 1, [])),
        (Beats.of, (1 << 60, {4: b"beat", 16_383: b"puls"}, {5: DOES, 4: DOES}, 3)),
        (Beats.of, (0, {}, {}, 0)),
        (Beats.of, (0, {}, {7: DOES}, 0)),
    ],
)
def test_what_is_bytes_alone_is_read_as_it_was_told_whoever_says_it(told, arguments):
    message = told(*arguments)
    assert message.read() == arguments
    for _ in range(2):  # its JSON is known by then
        assert FrameReader(message_in).feed(bytes_of(message)) == [message]


@pytest.mark.parametrize("kind", [PageSeen, PageNews, Beats])
@pytest.mark.parametrize("seed", range(50))
def test_other_bytes_are_refused_or_read_to_their_end(kind, seed):
    rng = random.Random(seed)
    octets = rng.choice(
        [
            PageNews.of(3, 1, [(128, b"one"), (256, b"two")]).packed,
            Beats.of(70, {4: b"beat", 5: b"beat"}, {4: DOES}, 3).packed,
            rng.randbytes(rng.randrange(40)),
        ]
    )
    octets = mutated(rng, octets)
    try:
        found = kind(octets).read()
    except CodecError:
        return
    assert kind.of(*found).packed == octets or kind is Beats  # ranks may be there twice


def test_what_only_looks_like_bytes_alone_is_read_as_it_is():
    for wrong in ({"packed": 2}, {"packed": 3, "more": 1}, {"packed": "3"}, {"kind": "Wake"}):
        body = json.dumps({"kind": "Beats", "packed": 3, **wrong}).encode()
        with pytest.raises(CodecError):
            message_in(body, b"one")


def test_bytes_that_nothing_names_are_refused():
    with pytest.raises(CodecError, match="too many"):
        codec.unpack_event({**STARTED, OCTETS: b"one"})


@pytest.mark.slow
def test_a_hundred_thousand_broken_frames_raise_nothing_else_and_take_no_memory():
    rng = random.Random(11)
    frames = [frame(codec.pack_event(instance(kind, rng))) for kind in EVENTS]
    frames += [frame(codec.pack_action(instance(kind, rng))) for kind in ACTIONS]
    frames += [frame(messages.pack(instance(kind, rng))) for kind in MESSAGES]
    unpacks = (codec.unpack_event, codec.unpack_action, messages.unpack)
    outcomes = {"frame": 0, "codec": 0, "good": 0}
    try:
        for case in range(100_000):
            if case == 95_000:
                tracemalloc.start()  # it slows everything down
            if case % 10 == 0:
                data = rng.randbytes(rng.randrange(64))
            elif case % 10 == 1:
                data = mutated(rng, rng.choice(frames))
            else:  # the length is right, so that the body is looked at
                data = with_its_length(mutated(rng, rng.choice(frames)))
            try:
                heard = FrameReader(message_of, 1 << 16).feed(data)
            except FrameError:
                outcomes["frame"] += 1
                continue
            for message in heard:
                for unpack in unpacks:
                    with contextlib.suppress(CodecError):
                        unpack(message)
                        outcomes["good"] += 1
                        break
                else:
                    outcomes["codec"] += 1
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > 500, outcomes  # all three ways were taken


def test_a_frame_holds_whatever_a_vocabulary_packs():
    rng = random.Random(3)
    for kind in EVENTS:
        packed = codec.pack_event(instance(kind, rng))
        assert FrameReader(message_of).feed(frame(packed)) == [packed]
