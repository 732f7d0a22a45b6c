"""The randomness of a rank that died before its commit: its own, its peers', or unknown."""

from __future__ import annotations

import zlib

import pytest

from worker_hooks.contract.status_page import LATE_BYTES, CommitRecord, Entry, LateDraws
from worker_hooks.storage.late_randomness import UnknownStateError, completed

STEP = 7
ENTRIES = (
    Entry("model.mean", "F32", (1,), 4),
    Entry("rng.torch", "U8", (6,), 6),
    Entry("before:rng.torch", "U8", (LATE_BYTES,), LATE_BYTES),
)


def record(before: bytes, now: bytes, *, is_commit=True, was_late=False, step=STEP):
    payload = b"mean" + now + LateDraws(zlib.crc32(before), before != now, was_late).pack()
    return CommitRecord(step, 0, 3, 0, b"{}", payload, is_commit)


def states(*records: CommitRecord) -> list[bytes]:
    """The generator of each rank, after the records were completed."""
    given = dict(enumerate(records))
    found = completed(given, dict.fromkeys(given, ENTRIES), STEP)
    assert all(found[rank].payload[:4] == b"mean" for rank in given)
    assert all(found[rank].payload[10:] == given[rank].payload[10:] for rank in given)
    return [found[rank].payload[4:10] for rank in given]


def dead(before: bytes, **more):
    return record(before, before, is_commit=False, **more)


def test_where_nobody_has_drawn_it_is_its_own():
    assert states(record(b"000000", b"000000"), dead(b"111111")) == [b"000000", b"111111"]


def test_where_all_were_equal_it_is_that_of_the_peers():
    peer = record(b"000000", b"222222", was_late=True)
    assert states(peer, dead(b"000000"), peer) == [b"222222"] * 3
    assert states(dead(b"000000"), peer, dead(b"000000")) == [b"222222"] * 3


@pytest.mark.parametrize(
    "records",
    [
        (record(b"000000", b"222222"), dead(b"111111")),  # seeds of their own
        (record(b"000000", b"222222"), dead(b"000000"), record(b"000000", b"333333")),
        (record(b"000000", b"222222"), dead(b"000000"), record(b"000000", b"000000")),
        (record(b"000000", b"000000"), dead(b"000000", was_late=True)),  # it alone used to draw
    ],
)
def test_otherwise_nobody_knows_it(records):
    with pytest.raises(UnknownStateError, match="did not reach the commit of step 7"):
        states(*records)


def test_one_that_used_to_draw_as_all_did_has_drawn_nothing_where_none_did():
    peer = record(b"000000", b"000000", was_late=True)
    assert states(peer, dead(b"111111", was_late=True)) == [b"000000", b"111111"]


def test_other_steps_and_steps_that_nobody_committed_stay_as_they_are():
    late = record(b"000000", b"222222")
    assert states(late, dead(b"111111", step=STEP - 1)) == [b"222222", b"111111"]
    assert states(dead(b"000000"), dead(b"111111")) == [b"000000", b"111111"]


def test_a_page_that_knows_nothing_of_it_is_taken_as_it_is():
    given = {0: record(b"000000", b"222222"), 1: dead(b"000000")}
    assert completed(given, {0: ENTRIES, 1: ENTRIES[:2]}, STEP) == given
