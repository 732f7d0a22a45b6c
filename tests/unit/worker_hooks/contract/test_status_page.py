import ctypes
import hashlib
import mmap
import os

import pytest

from worker_hooks.contract.status_page import Entry, Page, Phase, create, stamp

ENTRIES = (Entry("bn.mean", "F32", (2,), 8), Entry("rng", "U8", (3,), 3))


@pytest.fixture
def page():
    fd = create(3, 1, ENTRIES)
    page = Page(fd)
    os.close(fd)
    yield page
    page.close()


def write(page, step, content, *, is_commit=True, meta=b"{}"):
    page.write(
        step,
        step // 10,
        step,
        meta,
        lambda at: ctypes.memmove(at, content, len(content)),
        is_commit=is_commit,
    )


def test_a_page_tells_whose_it_is_and_what_is_in_it(page):
    assert (page.rank, page.attempt, page.entries) == (3, 1, ENTRIES)


def test_a_record_comes_back_as_it_was_written(page):
    write(page, 7, b"01234567abc", meta=b'{"loop": 1}')
    record = page.record(7)
    assert (record.step, record.epoch, record.batch) == (7, 0, 7)
    assert (record.meta, record.payload, record.is_commit) == (b'{"loop": 1}', b"01234567abc", True)


def test_the_last_two_commits_are_kept(page):
    for step in range(5):
        write(page, step, b"%011d" % step)
    assert [page.record(step) is not None for step in range(5)] == [False, False, False, True, True]
    assert page.newest().step == 4


def test_the_step_under_way_stands_in_for_a_commit_that_never_came(page):
    write(page, 4, b"4" * 11)
    write(page, 5, b"5" * 11, is_commit=False)
    assert (page.record(5).payload, page.record(5).is_commit) == (b"5" * 11, False)
    assert page.newest().step == 4
    write(page, 5, b"c" * 11)
    assert (page.record(5).payload, page.record(5).is_commit) == (b"c" * 11, True)


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_writer_that_is_killed_in_the_middle_leaves_no_record(page, is_commit):
    """The kill is an exception at the one moment that matters: some bytes are new, some old."""
    write(page, 4, b"4" * 11)
    write(page, 5, b"5" * 11, is_commit=is_commit)

    def killed(at):
        ctypes.memmove(at, b"77777", 5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        page.write(7, 0, 7, b"{}", killed, is_commit=is_commit)
    assert page.record(7) is None
    assert page.record(5) is None
    assert page.record(4).payload == b"4" * 11


def test_a_record_counts_once_somebody_has_seen_it_whatever_that_raises(page):
    def seen(at):
        assert ctypes.string_at(at, 11) == b"new content"
        assert page.record(4) is None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        page.write(
            4, 0, 4, b"{}", lambda at: ctypes.memmove(at, b"new content", 11), seen, is_commit=True
        )
    assert page.record(4).payload == b"new content"


def test_a_record_that_was_written_before_a_death_is_completed_and_no_other_one(page):
    write(page, 3, b"3" * 11)
    write(page, 4, b"4" * 11)
    before = []
    page.write(
        5, 0, 5, b"{}", lambda at: ctypes.memmove(at, b"5" * 11, 11),
        lambda _: before.append(page.content()), is_commit=True,
    )  # fmt: skip
    memory = mmap.mmap(-1, len(before[0]))
    memory[:] = before[0]
    killed = Page(memory)
    assert killed.newest().step == 4
    for step in (3, 4, 6, 7):
        killed.complete(step)
    assert killed.newest().step == 4
    assert killed.record(3) is None
    killed.complete(5)
    assert killed.record(5).payload == b"5" * 11
    assert killed.record(4).payload == b"4" * 11


def test_another_process_sees_what_was_written(page):
    page.beat(12, 1, 2, Phase.BACKWARD)
    beat = page.heartbeat()
    assert (beat.step, beat.epoch, beat.batch, beat.phase) == (12, 1, 2, Phase.BACKWARD)
    assert beat.at_ns > 0


def test_a_large_meta_is_refused_and_the_old_record_stays(page):
    write(page, 1, b"1" * 11)
    with pytest.raises(ValueError, match="room for"):
        write(page, 3, b"3" * 11, meta=b"x" * (1 << 20))
    assert page.record(1).payload == b"1" * 11


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 4096])
def test_what_is_no_page_is_refused(content):
    fd = os.memfd_create("no page")
    try:
        os.write(fd, content)
        with pytest.raises(ValueError, match="not a status page"):
            Page(fd)
    finally:
        os.close(fd)


def test_a_page_without_entries_is_a_page():
    fd = create(0, 0, ())
    page = Page(fd)
    page.write(1, 0, 0, b"{}", lambda _: None, is_commit=True)
    assert page.record(1).payload == b""
    assert os.fstat(fd).st_size < 100 * mmap.PAGESIZE
    os.close(fd)
    page.close()


def steps(page, first, last):
    """The heartbeats of a loop's steps."""
    for step in range(first, last + 1):
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.UPDATED):
            page.enter(phase)
        page.beat(step, 0, step, Phase.UPDATED)
        page.beat(step, 0, step, Phase.FORWARD)


def test_the_first_commit_that_is_seen_has_no_pace_and_each_later_one_has(page):
    assert page.paces() == []
    page.beat(6, 0, 6, Phase.FORWARD)  # as resumed
    steps(page, 7, 7)
    assert page.paces() == []
    steps(page, 8, 10)
    assert [pace.step for pace in page.paces()] == [8, 9, 10]


def test_the_last_64_paces_are_kept_oldest_first(page):
    page.beat(0, 0, 0, Phase.FORWARD)
    steps(page, 1, 100)
    assert [pace.step for pace in page.paces()] == list(range(37, 101))


def test_a_pace_tells_what_was_waiting_and_what_was_aside(page, monkeypatch):
    now = iter((7, 7, 7, 17, 107, 137, 1137, 1140, 1240, 2240, 2243, 3243, 5243))
    monkeypatch.setattr("worker_hooks.contract.status_page.monotonic_ns", lambda: next(now))
    page.beat(4, 0, 4, Phase.FORWARD)
    page.enter(Phase.UPDATED)
    page.beat(5, 0, 5, Phase.UPDATED)
    page.enter(Phase.DATA)  # 10 aside
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):  # the first of two optimizers
        page.enter(phase)
    page.enter(Phase.FORWARD)  # 1000 waiting before
    for phase in (Phase.BACKWARD, Phase.UPDATE, Phase.UPDATED):  # 1000 waiting
        page.enter(phase)
    page.enter(Phase.UPDATED)  # 1000 aside
    page.beat(6, 0, 6, Phase.UPDATED)  # 2000 more
    (pace,) = page.paces()
    assert pace == (6, 5236, 2000, 3010)
    assert pace.own_ns == 3236


def test_a_pace_that_is_half_written_is_left_out(page):
    page.beat(0, 0, 0, Phase.FORWARD)
    steps(page, 1, 70)
    page._paces[70 % 64 * 4] = 0  # stopped behind the first store
    assert [pace.step for pace in page.paces()] == list(range(7, 70))
    page._paces[69 % 64 * 4] = 5  # what no writer of ours does
    assert page.paces()[-1].step == 68


def test_a_page_that_takes_anothers_place_goes_on_with_its_paces(page):
    page.beat(0, 0, 0, Phase.FORWARD)
    steps(page, 1, 5)
    fd = create(3, 2, ())
    new = Page(fd)
    os.close(fd)
    new.continue_from(page)
    assert new.heartbeat() == page.heartbeat()
    steps(new, 6, 7)
    assert [pace.step for pace in new.paces()] == [2, 3, 4, 5, 7]
    new.close()


def test_a_page_without_device_buffers_has_the_bytes_that_it_always_had(monkeypatch):
    monkeypatch.setattr("worker_hooks.contract.status_page.monotonic_ns", lambda: 12345)
    fd = create(3, 1, ENTRIES, 1000)
    page = Page(fd)
    for step in range(4):
        page.enter(Phase.BACKWARD)
        for is_commit in (False, True):
            write(page, step, bytes([step + 1]) * 11, is_commit=is_commit)
        page.beat(step, 0, step, Phase.UPDATED)
    content = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    page.close()
    assert len(content) == 5528
    assert (
        hashlib.sha256(content).hexdigest()
        == "69ca09d39b2b4e368593d45ea157d66fae9bbe360de0e6859c08524743acc09d"
    )


@pytest.fixture
def ahead():
    """A page whose last three bytes a device writes."""
    fd = create(3, 1, ENTRIES, device_bytes=3, runs_ahead=True)
    page, reader = Page(fd), Page(fd)
    os.close(fd)
    yield page, reader
    page.close()
    reader.close()


def test_a_rank_that_runs_ahead_keeps_three_commits(ahead):
    page, reader = ahead
    for step in range(5):
        write(page, step, b"%08d" % step)
        page.write_device(step, 1, b"%03d" % step, is_commit=True)
        write(page, step + 1, b"underway", is_commit=False)
        page.write_device(step + 1, 1, b"dev", is_commit=False)
    assert [reader.position(step) for step in range(7)] == [
        *(None, None, (0, 2), (0, 3), (0, 4), (0, 5), None),
    ]
    assert reader.record(2) is None  # what the device wrote of it is overwritten
    assert [reader.record(step).payload for step in (3, 4, 5)] == [
        *(b"00000003003", b"00000004004", b"underwaydev"),
    ]
    assert (reader.newest().step, reader.newest_step()) == (4, 4)
    assert [record.step for record in reader.records()] == [3, 4, 5]


def test_bytes_of_a_device_are_those_of_their_stamp(ahead):
    page, reader = ahead
    write(page, 7, b"seven___")
    assert reader.record(7) is None  # the device has yet to come to it
    assert reader.newest() is None
    assert reader.newest_step() == 7
    page.write_device(7, 1, b"bwd", is_commit=False)
    record = reader.record(7)
    assert (record.payload, record.is_commit, record.has_early_buffers) == (
        b"seven___bwd",
        True,
        True,
    )
    page.write_device(7, 2, b"end", is_commit=True)
    record = reader.record(7)
    assert (record.payload, record.is_commit, record.has_early_buffers) == (
        b"seven___end",
        True,
        False,
    )
    assert reader.device_part(7, is_commit=True, start=1, stop=2) == b"n"


@pytest.mark.parametrize("which", ["begin", "end"])
def test_a_device_that_is_stopped_in_the_middle_leaves_no_bytes(ahead, which):
    page, reader = ahead
    write(page, 5, b"five____")
    page.write_device(5, 1, b"abc", is_commit=True)
    area = page.device_area(5, is_commit=True)
    ctypes.c_int64.from_address(getattr(area, which)).value = stamp(5, 2)
    assert reader.record(5) is None


def test_no_two_copies_in_a_row_have_one_stamp():
    assert stamp(0, 0) != 0
    assert stamp(3, 1) != stamp(3, 2) != stamp(4, 1)
    assert stamp(3, (1 << 20) * 5) // (1 << 20) == 3


def test_a_heartbeat_travels_as_it_is(page):
    page.beat(8, 1, 4, Phase.BACKWARD)
    fd = create(3, 1, ENTRIES)
    copy = Page(fd)
    os.close(fd)
    copy.put_beat(page.raw_beat())
    assert copy.heartbeat() == page.heartbeat()
    assert copy.heartbeat()[:3] == (8, 1, 4)
    copy.close()


@pytest.mark.parametrize("raw", [b"", b"x", b"x" * 1000])
def test_what_is_no_heartbeat_changes_nothing(page, raw):
    page.beat(8, 1, 4, Phase.BACKWARD)
    before = page.raw_beat()
    with pytest.raises(ValueError):
        page.put_beat(raw)
    assert page.raw_beat() == before


def test_the_content_of_a_page_is_all_of_it(page):
    write(page, 7, b"01234567abc")
    content = page.content()
    assert b"01234567abc" in content
    fd = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    copy = Page(fd)
    os.close(fd)
    assert copy.record(7).payload == b"01234567abc"
    copy.close()
