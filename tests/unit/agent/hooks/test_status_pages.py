"""Status pages as the agent keeps them: readable after their rank, and never trusted."""

from __future__ import annotations

import fcntl
import os
import random
import tracemalloc
from time import monotonic_ns
from types import SimpleNamespace

import pytest
from support.status_pages import ENTRIES, kept, make, write

from agent.hooks import status_pages as module
from agent.hooks.status_pages import StatusPages
from worker_hooks.contract import status_page
from worker_hooks.contract.packed_page import SparseMemory, unpacked, unpacked_file
from worker_hooks.contract.packed_page import packed as pack
from worker_hooks.contract.status_page import Page, Phase
from worker_hooks.storage.private_records import record


def test_the_descriptor_is_closed_and_the_page_stays():
    before = len(os.listdir("/proc/self/fd"))
    pages, page = kept()
    write(page, 1, 7)
    del page
    found = record(pages.all()[0], 1)
    assert (found.step, found.epoch, found.batch) == (1, 2, 10)
    assert found.payload == b"\7" * 16
    pages.clear()
    del found
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_newest_step_is_the_newest_commit():
    pages, page = kept()
    assert pages.newest_step(0) is None
    assert pages.newest_step(1) is None
    for step in (4, 5, 6):
        write(page, step, step)
        assert pages.newest_step(0) == step
    write(page, 7, 7, is_commit=False)
    assert pages.newest_step(0) == 6


def test_a_record_is_of_the_step_or_of_the_newest_commit_before():
    pages, page = kept()
    assert record(pages.all()[0], 1) is None
    assert record(None, 1) is None
    write(page, 4, 4)
    write(page, 5, 5)
    write(page, 6, 6, is_commit=False)
    mapped = pages.all()[0]
    assert record(mapped, 4).payload[0] == 4
    assert record(mapped, 6).is_commit is False
    assert record(mapped, 9).step == 5


def test_beats_tell_how_far_ranks_are():
    pages, page = kept(3)
    page.beat(8, 1, 4, Phase.BACKWARD)
    beats = pages.beats([1, 3])
    assert list(beats) == [3]
    assert (beats[3].step, beats[3].epoch, beats[3].batch) == (8, 1, 4)
    assert beats[3].phase is Phase.BACKWARD


def test_a_newer_page_of_a_rank_replaces_the_older():
    pages, old = kept()
    write(old, 1, 1)
    fd, new = make()
    pages.keep(0, 0, fd)
    write(new, 2, 2)
    assert pages.newest_step(0) == 2


def test_what_is_no_page_of_that_rank_is_refused():
    pages = StatusPages()
    before = len(os.listdir("/proc/self/fd"))

    def memory(content):
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.write(fd, content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return fd

    others = [
        memory(b""),
        memory(b"x" * 5000),
        os.open("/dev/null", os.O_RDONLY),
        os.open("/etc/passwd", os.O_RDONLY),
        os.open("/", os.O_RDONLY),
        make(1, 0)[0],
        make(0, 1)[0],
    ]
    for fd in others:
        with pytest.raises((ValueError, OSError)):
            pages.keep(0, 0, fd)
    assert pages.all() == {}
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_page_that_could_be_cut_short_under_us_is_refused():
    fd = os.memfd_create("x")
    good, page = make()
    os.write(fd, os.pread(good, os.fstat(good).st_size, 0))
    os.close(good)
    del page
    with pytest.raises(ValueError, match="sealed"):
        StatusPages().keep(0, 0, fd)


def test_a_page_cannot_be_cut_short():
    fd, page = make()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)
    del page


@pytest.mark.parametrize("seed", range(40))
def test_a_page_full_of_garbage_harms_nobody(seed):
    import random

    rng = random.Random(seed)
    pages, page = kept()
    write(page, 5, 5)
    garbled = page._map
    for _ in range(rng.choice([1, 10, 1000])):
        at = rng.randrange(0, len(garbled)) if seed % 2 else rng.randrange(0, 400)
        garbled[at] = rng.randrange(256)
    pages.newest_step(0)
    pages.beats([0])
    record(pages.all()[0], 5)
    size = os.memfd_create("again", os.MFD_ALLOW_SEALING)
    os.write(size, garbled[:])
    fcntl.fcntl(size, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    other = StatusPages()
    try:
        other.keep(0, 0, size)
    except ValueError:
        return
    other.newest_step(0)
    other.beats([0])
    record(other.all()[0], 5)


def test_peers_get_each_page_once_when_all_ranks_of_the_attempt_have_one():
    pages = StatusPages()

    def sent(rank, attempt):
        pages.keep(rank, attempt, make(rank, attempt)[0])
        found = pages.take_unshared((0, 1), attempt)
        assert all(os.readlink(f"/proc/self/fd/{fd}").count("msrun-page") for fd in found.values())
        return list(found)

    assert sent(0, 0) == []
    assert sent(1, 0) == [0, 1]
    assert pages.take_unshared((0, 1), 0) == {}
    assert sent(1, 0) == [1]  # its page had to grow
    assert sent(0, 1) == []  # rank 1 is about to be replaced
    pages.drop(1)
    assert pages.take_unshared((0, 1), 1) == {}
    assert sent(1, 1) == [0, 1]


def test_a_page_that_is_refused_is_closed():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="page of rank 3"):
        StatusPages().keep(0, 0, make(3)[0])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_copy", [False, True])
def test_what_was_replaced_is_known_until_its_successor_is_there(is_copy):
    pages, page = kept(1)
    write(page, 6, 6)
    before, content = len(os.listdir("/proc/self/fd")), page.content()
    pages.drop(1)
    pages.drop(2)
    assert {rank: each.content() for rank, each in pages.replaced().items()} == {1: content}
    assert pages.content(1) == b""
    fd, new = make(1, 1)
    if is_copy:
        pages.keep_copy(1, 1, pack(new))
        os.close(fd)
    else:
        pages.keep(1, 1, fd)
    new.close()
    assert pages.replaced() == {}
    assert len(os.listdir("/proc/self/fd")) == before - 2 * is_copy  # the old one is closed
    pages.drop(1)
    pages.clear()
    assert pages.replaced() == {}


def test_a_copy_of_a_page_is_kept_like_the_page():
    here, page = kept(3)
    write(page, 6, 6)
    there = StatusPages()
    there.keep_copy(3, 0, here.packed(3))
    assert there.newest_step(3) == 6
    write(page, 7, 7)
    assert there.newest_step(3) == 6  # it is as it was then
    there.keep_copy(3, 0, here.packed(3))
    assert there.newest_step(3) == 7
    assert here.content(4) == b""
    there.clear()


def test_what_a_rank_writes_is_followed_by_a_copy_and_told_once():
    here, page = kept(3)
    there = StatusPages()
    there.keep_copy(3, 0, here.packed(3))

    def follow():
        news = here.news(3)
        there.mirror_news(3, 0, news)
        return sum(len(octets) for _, octets in news)

    idle = follow()
    for step in range(1, 70):
        page.beat(step, 0, step, Phase.FORWARD)
        write(page, step, step)
        write(page, step + 1, 100, is_commit=False)
        if step % 7 == 0:
            assert follow() < 1000
    follow()
    assert follow() == idle < 100
    mirror = there.all()[3]
    for step in (68, 69, 70):
        assert record(mirror, step) == record(page, step)
    assert (mirror.paces(), mirror.heartbeat()) == (page.paces(), page.heartbeat())
    write(page, 70, 1)
    there.mirror_news(3, 1, here.news(3))  # of another attempt
    there.mirror_news(4, 0, [(64, b"x")])  # a rank without a page
    assert there.newest_step(3) == 69
    del mirror
    there.clear()


@pytest.mark.parametrize("at", [-8, 0, 63, 2176, 2180, 1 << 30])
def test_no_news_change_what_a_page_is(at):
    here, page = kept(3)
    before = here.content(3)
    here.mirror_news(3, 0, [(at, b"12345678")])
    here.mirror_news(3, 0, [(64, bytes(len(before)))])
    assert here.content(3) == before
    del page
    here.clear()


def test_a_copy_of_no_page_is_refused_and_closed():
    before = len(os.listdir("/proc/self/fd"))
    here, page = kept(3)
    packed = here.packed(3)
    for content in (b"", b"x" * 5000, packed[:-1], packed + bytes(16) + b"x"):
        with pytest.raises(ValueError):
            StatusPages().keep_copy(0, 0, content)
        with pytest.raises(ValueError):
            os.close(unpacked_file(content))
    with pytest.raises(ValueError, match="page of rank 3"):
        StatusPages().keep_copy(4, 0, packed)
    del page
    here.clear()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("device_bytes", [0, 16])
def test_a_page_is_packed_without_its_gaps(device_bytes):
    fd = status_page.create(3, 1, ENTRIES, device_bytes=device_bytes)
    page = Page(fd)
    page.note_keeper(17, 1 << 40)
    for step in (1, 2):
        page.beat(step, 0, step, Phase.FORWARD)
        page.write(step, 0, step, b"{}", lambda _: None, is_commit=True)
        page.write(step + 1, 0, step, b"{}", lambda _: None, is_commit=False)
        if device_bytes:
            page.write_device(step, 1, bytes(range(16)), is_commit=True)
    packed = pack(page)
    assert len(packed) < len(page.content()) / 10
    copy = unpacked(packed)
    file = unpacked_file(packed)
    shared = Page(file)
    assert copy.content() == shared.content() == page.content()
    assert copy.records() == page.records() != []
    assert (copy.rank, copy.attempt, copy.entries) == (3, 1, page.entries)
    assert copy.keeper == page.keeper == (17, 1 << 40)
    for each in (page, copy, shared):
        each.close()
    os.close(fd)
    os.close(file)


def test_beats_of_another_node_show_in_its_copies():
    here, page = kept(3)
    there = StatusPages()
    there.keep_copy(3, 0, here.packed(3))
    page.beat(8, 1, 4, Phase.BACKWARD)
    (raw,) = here.raw_beats().values()
    there.mirror_beats(monotonic_ns(), {3: raw})
    assert (there.beats([3])[3].step, there.beats([3])[3].phase) == (8, Phase.BACKWARD)
    there.mirror_beats(monotonic_ns(), {3: b"none"})  # of another version, say
    there.mirror_beats(monotonic_ns(), {4: raw})  # a rank without a page
    assert list(there.beats([3, 4])) == [3]
    assert there.beats([3])[3].step == 8
    there.clear()


def test_the_clock_of_a_node_is_that_of_all_its_ranks(monkeypatch):
    """It was found for each of thousands of ranks each second."""
    there, now, beats = StatusPages(), 10**13, {}
    clock = SimpleNamespace(ns=now)
    monkeypatch.setattr(module, "monotonic_ns", lambda: clock.ns)
    monkeypatch.setattr(status_page, "monotonic_ns", lambda: now - 4 * 10**9)  # its own
    for rank in (3, 4):
        here, page = kept(rank)
        page.beat(8, 1, 4, Phase.BACKWARD)
        there.keep_copy(rank, 0, here.packed(rank))
        beats |= here.raw_beats()
        clock.ns += 2 * 10**9  # the second one comes late, so it seems to be later
    assert [beat.at_ns - now for beat in there.beats([3, 4]).values()] == [0, 2 * 10**9]
    there.mirror_beats(now, beats)
    assert [beat.at_ns - now for beat in there.beats([3, 4]).values()] == [0, 0]
    there.clear()


@pytest.mark.parametrize("ahead_s", [-4000, 0, 7000])
def test_times_of_another_node_are_those_of_this_clock(monkeypatch, ahead_s):
    here, page = kept(3)
    there, now = StatusPages(), 10**13  # later than any difference: this machine may just be up
    clock = SimpleNamespace(ns=now)
    monkeypatch.setattr(module, "monotonic_ns", lambda: clock.ns)
    monkeypatch.setattr(status_page, "monotonic_ns", lambda: clock.ns + ahead_s * 10**9)  # its own

    def told(after_s, latency_s):
        clock.ns = now + round(after_s * 1e9)
        sent = clock.ns + ahead_s * 10**9
        clock.ns += round(latency_s * 1e9)
        there.mirror_beats(sent, here.raw_beats())
        return (there.beats([3])[3].at_ns - now) / 1e9

    page.beat(8, 1, 4, Phase.BACKWARD)
    write(page, 8, 8)
    there.keep_copy(3, 0, here.packed(3))
    assert there.newest_commits([3]) == [(8, now)]
    assert told(1, 0.4) == pytest.approx(0)  # the first copy had come at once
    page.beat(9, 1, 5, Phase.BACKWARD)  # at 1.4
    there.drop(3)
    clock.ns = now + 3 * 10**9
    there.keep_copy(3, 0, here.packed(3))
    assert there.beats([3])[3].at_ns == clock.ns  # it cannot be later
    assert told(4, 0.5) == pytest.approx(1.9)
    assert told(5, 0.49) == told(6, 2) == pytest.approx(1.9)  # what is the same stays the same
    assert told(7, 0.001) == pytest.approx(1.401)
    # that machine stands still for a while, and its clock with it
    ahead_s -= 8
    assert told(20, 0.01) == pytest.approx(1.401)
    for second in range(21, 200, 20):
        told(second, 0.01)
        there.keep_copy(3, 0, here.packed(3))  # a device writes there: all of it
        assert there.beats([3])[3].at_ns - now < 20e9
    page.beat(10, 1, 6, Phase.BACKWARD)  # at 181.01
    assert told(182, 0.01) == pytest.approx(181.02, abs=0.05)
    there.clear()


@pytest.mark.parametrize("seed", range(100))
def test_memory_that_is_written_here_and_there_holds_what_was_written(seed):
    dice, size = random.Random(seed), 200
    sparse, whole = SparseMemory(size, dice.choice([0, 20])), bytearray(size)
    for _ in range(40):
        start = dice.randrange(size)
        stop = min(size, start + dice.randrange(1, 60))
        octets = dice.randbytes(stop - start)
        sparse[start:stop] = whole[start:stop] = octets
        start = dice.randrange(size)
        stop = dice.randrange(start, size + 10)
        assert sparse[start:stop] == whole[start:stop]
    assert (sparse[:], len(sparse)) == (whole, size)
    with pytest.raises(ValueError, match="room for 3"):
        sparse[5:8] = b"four"
    assert sparse[:] == whole


def test_what_was_never_written_is_not_read_by_the_gigabyte():
    sparse = SparseMemory(1 << 40, 8)
    sparse[1 << 30 : (1 << 30) + 3] = b"abc"
    assert sparse[(1 << 30) - 1 : (1 << 30) + 4] == b"\0abc\0"
    with pytest.raises(ValueError, match="never written"):
        sparse[0 : 1 << 39]


@pytest.mark.parametrize("seed", range(100))
def test_parts_make_the_same_bytes_at_once_as_one_by_one(seed):
    dice = random.Random(seed)
    parts = []
    for _ in range(dice.randrange(8)):
        at = dice.randrange(90)
        parts.append((at, dice.randbytes(dice.randrange(101 - at))))
    if seed % 2:
        parts.sort()
    one_by_one = SparseMemory(100, 16)
    for at, octets in parts:
        one_by_one[at : at + len(octets)] = octets
    at_once = SparseMemory.of(100, 16, parts)
    assert at_once[0:100] == one_by_one[0:100]
    at_once[40:60] = one_by_one[40:60] = bytes(range(20))
    assert at_once[0:100] == one_by_one[0:100]


def test_a_copy_takes_the_room_of_what_it_holds_and_once_what_is_alike():
    here, page = kept(3)
    packed = here.packed(3)
    tracemalloc.start()
    try:
        copies = [unpacked(packed) for _ in range(100)]
        took, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took / len(copies) < len(packed) + 4000 < len(page.content()) / 4
    del page
    here.clear()
