"""Randomness and buffers of a rank that died before its commit: its own, its peers', or unknown."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from worker_hooks.contract.status_page import LATE_BYTES, CommitRecord, Entry, LateDraws
from worker_hooks.storage.late_entries import UnknownStateError, completed

STEP = 7
ENTRIES = (
    Entry("model.mean", "F32", (1,), 4),
    Entry("rng.torch", "U8", (6,), 6),
    Entry("before:rng.torch", "U8", (LATE_BYTES,), LATE_BYTES),
)


def none(_rank, _step):
    return None


def record(before: bytes, now: bytes, *, is_commit=True, was_late=False, step=STEP):
    payload = b"mean" + now + LateDraws(zlib.crc32(before), before != now, was_late).pack()
    return CommitRecord(step, 0, 3, 0, b"{}", payload, is_commit)


def states(*records: CommitRecord) -> list[bytes]:
    """The generator of each rank, after the records were completed."""
    given = dict(enumerate(records))
    found = completed(given, none, dict.fromkeys(given, ENTRIES), STEP)
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
    assert completed(given, none, {0: ENTRIES, 1: ENTRIES[:2]}, STEP) == given


# --- buffers ------------------------------------------------------------------------------------

BUFFERS = (
    Entry("a.count", "U8", (2,), 2),
    Entry("a.mean", "U8", (2,), 2),
    Entry("late_buffers", "U8", (2,), 2),
)
EVER, NOW = b"\1\0", b"\2\0"  # of the first one


def of(count: bytes, flags: bytes = NOW, *, step=STEP, is_commit=True, meta=b"{}"):
    return CommitRecord(step, 0, 3, 0, meta, count + b"mm" + flags, is_commit)


def begun(count: bytes, flags: bytes = EVER, **more):
    """Of a rank that died before its commit."""
    return of(count, flags, is_commit=False, **more)


def counts(*ranks: Sequence[CommitRecord]) -> list[bytes]:
    """The buffer of each rank, given its records: the newest first, then those of commits before."""
    given = {rank: records[0] for rank, records in enumerate(ranks)}

    def earlier(rank: int, step: int) -> CommitRecord | None:
        return next(iter(ranks[rank][STEP - step :]), None)

    found = completed(given, earlier, dict.fromkeys(given, BUFFERS), STEP)
    assert all(found[rank].payload[2:] == given[rank].payload[2:] for rank in given)
    return [found[rank].payload[:2] for rank in given]


def test_a_buffer_that_all_had_alike_is_that_of_the_peers():
    peer = [of(b"07"), of(b"06"), of(b"05")]
    assert counts(peer, [begun(b"06"), of(b"06"), of(b"05")]) == [b"07"] * 2
    assert counts(peer, [begun(b"06"), of(b"06")], peer) == [b"07"] * 3
    # also the first time that it changes behind backward
    assert counts(peer, [begun(b"06", b"\0\0"), of(b"06")], peer) == [b"07"] * 3


def test_a_buffer_that_nobody_changed_in_this_step_is_its_own():
    peers = [of(b"07", EVER), of(b"06")], [of(b"17", EVER), of(b"16")]
    assert counts([begun(b"27"), of(b"26")], *peers) == [b"27", b"07", b"17"]


def test_who_stays_behind_its_update_knows_its_own_and_that_of_a_dead_rank():
    settled = [begun(b"07", meta=b'{"is_settled": true}'), of(b"06"), of(b"05")]
    assert counts(settled, [begun(b"06"), of(b"06"), of(b"05")]) == [b"07"] * 2
    assert counts(settled, [of(b"17"), of(b"16")]) == [b"07", b"17"]


@pytest.mark.parametrize(
    "ranks",
    [
        ([of(b"07"), of(b"06"), of(b"05")], [begun(b"16"), of(b"16"), of(b"15")]),  # its own
        ([of(b"07"), of(b"06")], [of(b"17"), of(b"06")], [begun(b"06"), of(b"06"), of(b"05")]),
        ([of(b"07"), of(b"06")], [of(b"07"), of(b"16")], [begun(b"06"), of(b"06"), of(b"05")]),
        ([of(b"07"), of(b"06"), of(b"06")], [begun(b"06"), of(b"06"), of(b"06")]),  # one alone
        ([of(b"07"), of(b"06")], [begun(b"06")]),  # what it had is overwritten
        ([of(b"06", b"\0\0"), of(b"06")], [begun(b"06", EVER), of(b"06")]),  # it alone used to
        ([begun(b"07", meta=b'{"is_settled": true}'), of(b"06")], [begun(b"16"), of(b"16")]),
    ],
)
def test_otherwise_nobody_knows_the_buffer(ranks):
    with pytest.raises(UnknownStateError, match=r"step 7, buffer a\.count changes between"):
        counts(*ranks)
