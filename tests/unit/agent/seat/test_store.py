"""The seat in a store over its JSON gateway: of many who ask one gets each term."""

import socket
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_etcd import fake_etcd

from agent.seat.etcd import Etcd
from agent.seat.records import (
    HeldSeat,
    Seat,
    SeatRecord,
    StoreError,
    Will,
    next_term,
    packed,
    seat_of,
    will_of,
)
from agent.seat.store import TTL_S, SeatStore

OWN = Seat("run", "mn0", "10.0.0.1", 29500, 7)
OTHER = Seat("later", "mn1", "10.0.0.2", 41000, 8)
WILL = Will("run", 2)


@pytest.fixture
def etcd():
    with fake_etcd() as (made, port):
        made.members = [("127.0.0.1", port)]
        yield made


def store(etcd, **more):
    return SeatStore(Etcd(etcd.members, **more), "job")


def test_a_seat_is_taken_renewed_and_left(etcd):
    mine, look = store(etcd), store(etcd).look
    assert look() == SeatRecord()
    held = mine.take(OWN, WILL)
    assert look() == SeatRecord(held.term, OWN, WILL)
    assert mine.renew(held)
    mine.note(held, WILL._replace(saved="/ckpt/step_3"))
    mine.leave(held, is_over=False)
    assert look() == SeatRecord(held.term, None, WILL._replace(saved="/ckpt/step_3"))
    assert not mine.renew(held)
    later = mine.take(OWN, WILL)
    mine.leave(later, is_over=True)
    assert look() == SeatRecord()


def test_its_keys_are_named_by_the_job(etcd):
    store(etcd).take(OWN, WILL)
    names = sorted(b64decode(key).decode() for key in etcd.held)
    assert names == ["/msrun/job/seat", "/msrun/job/term", "/msrun/job/will"]
    assert sum(len(b64decode(value)) for value, _ in etcd.held.values()) < 300


def test_who_knows_the_term_takes_it_though_the_seat_is_held(etcd):
    held = store(etcd).take(OWN, WILL)
    assert store(etcd).take(OTHER, WILL) == SeatRecord(held.term, OWN, WILL)
    assert store(etcd).take(OTHER, WILL, held.term, if_free=True).seat == OWN
    later = store(etcd).take(OTHER, WILL, held.term)
    assert store(etcd).look() == SeatRecord(later.term, OTHER, WILL)
    # the one before has lost it, and neither notes nor leaves anything
    mine = store(etcd)
    assert not mine.renew(held)
    mine.note(held, WILL._replace(saved="/late"))
    mine.leave(held, is_over=True)
    assert store(etcd).look() == SeatRecord(later.term, OTHER, WILL)
    assert mine.take(OWN, WILL, held.term) == SeatRecord(later.term, OTHER, WILL)


def test_it_is_free_once_its_holder_says_nothing(etcd):
    mine = store(etcd)
    held = mine.take(OWN, WILL)
    etcd.late_s += TTL_S / 2
    assert mine.renew(held)
    etcd.late_s += TTL_S - 1
    assert store(etcd).look().seat == OWN
    etcd.late_s += 2
    assert store(etcd).look() == SeatRecord(held.term, None, WILL)
    assert not mine.renew(held)
    assert isinstance(store(etcd).take(OTHER, WILL, held.term, if_free=True), HeldSeat)


def test_of_many_that_ask_after_one_term_one_gets_it(etcd):
    term = store(etcd).take(OWN, WILL).term
    for _ in range(10):
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(store(etcd).take, OWN, WILL, term) for _ in range(8)]
        got = [each.result() for each in asked if isinstance(each.result(), HeldSeat)]
        assert len(got) == 1
        term = got[0].term


def test_what_was_done_though_the_answer_was_lost_is_found_out(etcd):
    held = store(etcd).take(OWN, WILL)
    mine = store(etcd)
    ask, calls = mine._etcd._ask, []

    def deaf(*about):
        calls.append(about[2])  # it looks, gets a lease, and then the swap is not answered
        etcd.lost = int(len(calls) == 3)
        return ask(*about)

    mine._etcd._ask = deaf
    with pytest.raises(StoreError):
        mine.take(OTHER, WILL, held.term)
    assert calls == ["kv/txn", "lease/grant", "kv/txn"]
    later = store(etcd).look().term
    assert later != held.term
    assert mine.take(OTHER, WILL, held.term).term == later
    assert store(etcd).take(OTHER, WILL, held.term) == SeatRecord(later, OTHER, WILL)


def test_a_swap_that_another_server_had_done_already_is_no_refusal(etcd):
    """The first one had it, and its answer was late: asked again, the next one compares in vain."""
    held = store(etcd).take(OWN, WILL)
    mine = store(etcd)
    swap = mine._etcd.swap
    mine._etcd.swap = lambda *about: (swap(*about), swap(*about))[1]
    won = mine.take(OTHER, WILL, held.term)
    assert isinstance(won, HeldSeat)
    assert won.term == store(etcd).look().term != held.term


def test_a_term_is_never_the_same_again():
    assert next_term("", "a") == "1-a"
    assert next_term("1-a", "b") == "2-b"
    assert next_term("nonsense", "c") == "1-c"
    assert next_term("9" * 4000, "d") == "1-d"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", '{"job": 1}', '{"nodes": "x"}', "\x00" * 9),
        packed(OWN._replace(port=0)),
        packed(OWN._replace(host="\x1b[31m")),
        packed(OWN._replace(address="")),
    ],
)
def test_what_anybody_wrote_there_is_no_seat(text):
    assert seat_of(text) is None
    assert will_of(text) is None


def test_what_was_written_is_read():
    assert seat_of(packed(OWN)) == OWN
    assert will_of(packed(WILL)) == WILL


# --- a store that is none -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "body", "why"),
    [
        (404, b"404 page not found", "is no etcd from 3.4 on: it says 404"),
        (200, b"[]", "says what no etcd would say"),
        (200, b"{}", "says what no etcd would say"),
        (200, b'{"responses": [{"response_range": {"kvs": [{"value": "!"}]}}]}', "says what no"),
        (401, b'{"message": "etcdserver: user name is empty"}', "refuses: etcdserver: user name"),
    ],
)
def test_a_strange_answer_is_one_sentence(etcd, code, body, why):
    etcd.odd = code, body
    with pytest.raises(StoreError, match=why):
        store(etcd).look()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(StoreError, match=r"does not answer \(Connection refused\)"):
        SeatStore(Etcd([("127.0.0.1", port)]), "job").look()


def test_who_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        members = [mute.getsockname()[:2]]
        with pytest.raises(StoreError, match=r"has not answered within 0\.1 s"):
            SeatStore(Etcd(members, 0.1), "job").look()


def test_another_member_is_asked_and_first_from_then_on(etcd):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = gone.getsockname()[:2]
    etcd.members.insert(0, dead)
    made = store(etcd)
    assert made.look() == SeatRecord()
    assert made._etcd._members[-1] == dead
