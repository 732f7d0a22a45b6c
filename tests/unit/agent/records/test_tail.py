"""Files are shown while they grow: whole lines, none lost, none twice, and nobody is starved."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
import time

import pytest

from agent.records import tail as room
from agent.records.log_view import LogView
from agent.records.tail import MAX_LINE_BYTES, Follower, Tail


@pytest.fixture
def grown(tmp_path):
    """A follower of a file and what it showed: ``grow(bytes)`` returns all so far, by target."""

    class Grown:
        def __init__(self):
            self.path = tmp_path / "log"
            self.path.touch()
            self.shown = {}

        def follow(self, **view):
            self.follower = Follower(LogView(self.path, **{"fd": 1, "prefix": b"> ", **view}))

        def write(self, fd, data):
            self.shown[fd] = self.shown.get(fd, b"") + data

        def grow(self, data):
            with self.path.open("ab") as file:
                file.write(data)
            while self.follower.read(self.write):
                pass
            return self.shown.get(1, b"")

        def finish(self):
            self.follower.finish(self.write)
            return self.shown.get(1, b"")

    return Grown()


@pytest.mark.parametrize(
    "pieces, shown, last",
    [
        ([b""], b"", b""),
        ([b"a\n"], b"> a\n", b""),
        ([b"a", b"b", b"\n"], b"> ab\n", b""),
        ([b"a\nb"], b"> a\n", b"> b\n"),
        ([b"a\nb", b"c\nd\n"], b"> a\n> bc\n> d\n", b""),
        ([b"\n\n"], b"> \n> \n", b""),
        ([b"1%\r2%\r", b"3%\n"], b"> 1%\r2%\r3%\n", b""),
        ([b"a\r\n"], b"> a\r\n", b""),
        ([b"\xff\x00", b"\xfe\n"], b"> \xff\x00\xfe\n", b""),
        (["\u2028\x0b\x0c\x85\n".encode()], "> \u2028\x0b\x0c\x85\n".encode(), b""),
    ],
)
def test_lines_are_shown_when_they_are_whole(grown, pieces, shown, last):
    grown.follow()
    for piece in pieces:
        grown.grow(piece)
    assert grown.shown.get(1, b"") == shown
    assert grown.finish() == shown + last


def test_without_prefix_bytes_pass_at_once_and_as_they_are(grown):
    grown.follow(prefix=None)
    assert grown.grow(b"name? ") == b"name? "
    assert grown.grow(b"\r\xff") == b"name? \r\xff"
    assert grown.finish() == b"name? \r\xff"


def test_an_endless_line_is_shown_in_pieces_and_nothing_is_lost(grown):
    grown.follow()
    grown.grow(3 * MAX_LINE_BYTES * b"x" + b"y\n")
    shown = grown.finish()
    lines = shown.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(b"> ") for line in lines)
    assert b"".join(line[2:] for line in lines) == 3 * MAX_LINE_BYTES * b"x" + b"y"


def test_what_the_filters_pick_is_copied_with_its_prefix(grown, tmp_path):
    grown.follow(fd=-1, filters=(b"loss", b"acc"), filtered=tmp_path / "picked")
    grown.grow(b"loss 1\nother\nacc 2\nlo")
    grown.grow(b"ss 3")
    grown.finish()
    assert (tmp_path / "picked").read_bytes() == b"> loss 1\n> acc 2\n> loss 3\n"
    assert grown.shown == {}


# --- the thread ----------------------------------------------------------------------------------


@pytest.fixture
def tailed():
    """A tail whose console is a pipe: (tail, read end, write end, troubles)."""
    troubles = []
    tail = Tail(lambda path, error, doing: troubles.append((path.name, error.errno, doing)))
    read, write = os.pipe()
    yield tail, read, write, troubles
    tail.close(0)
    for fd in (read, write, tail._wake_read, tail._wake_write, tail._inotify.fd):
        os.close(fd)


def logs(tmp_path, count, text=b""):
    paths = [tmp_path / f"log_{number}" for number in range(count)]
    for path in paths:
        path.write_bytes(text)
    return paths


def taken(fd):
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


def test_a_new_set_of_files_comes_after_the_end_of_the_old_one(tailed, tmp_path):
    tail, read, write, _ = tailed
    path = tmp_path / "log"
    for attempt in range(3):  # the thread may be late for any of them
        path.write_bytes(b"attempt %d" % attempt)
        tail.follow([LogView(path, write, b"> ")])
        path.rename(tmp_path / f"log.{attempt}")
    assert tail.close(10)
    assert taken(read) == b"> attempt 0\n> attempt 1\n> attempt 2\n"


def test_what_was_written_before_the_close_is_shown(tailed, tmp_path):
    tail, read, write, _ = tailed
    (path,) = logs(tmp_path, 1)
    tail.follow([LogView(path, write, None)])
    path.write_bytes(b"last")
    assert tail.close(10)
    assert taken(read) == b"last"


def test_growth_is_noticed_without_anybody_asking(tailed, tmp_path):
    tail, read, write, _ = tailed
    (path,) = logs(tmp_path, 1)
    tail.follow([LogView(path, write, None)])
    for word in (b"one", b"two"):
        with path.open("ab") as file:
            file.write(word)
        assert os.read(read, 100) == word


def test_without_inotify_growth_is_noticed_all_the_same(tailed, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "POLL_S", 0.01)
    tail, read, write, _ = tailed
    tail._inotify.blind = True
    (path,) = logs(tmp_path, 1)
    tail.follow([LogView(path, write, None)])
    path.write_bytes(b"seen")
    assert os.read(read, 100) == b"seen"


def test_a_file_that_never_stops_growing_starves_no_other(tmp_path):
    """The first grows whenever it is shown; the second must be shown all the same."""
    first, second = logs(tmp_path, 2, b"x")
    tail, shown, enough = Tail(), [], threading.Event()

    def write(fd, data):
        shown.append(fd)
        if fd == 1 and not enough.is_set():
            with first.open("ab") as file:
                file.write(data)
        if fd == 2:
            enough.set()

    tail._write = write
    tail.follow([LogView(first, 1, None), LogView(second, 2, None)])
    assert enough.wait(10)
    assert tail.close(10)
    for fd in (tail._wake_read, tail._wake_write, tail._inotify.fd):
        os.close(fd)


def test_a_reader_that_left_one_stream_does_not_silence_the_other(tailed, tmp_path):
    tail, read, write, _ = tailed
    gone_read, gone_write = os.pipe()
    os.close(gone_read)
    out, err = logs(tmp_path, 2, b"words\n")
    tail.follow([LogView(out, gone_write, b""), LogView(err, write, b"")])
    assert tail.close(10)
    os.close(gone_write)
    assert taken(read) == b"words\n"


def test_a_console_that_takes_nothing_is_given_up_after_the_patience_only(tailed, tmp_path):
    tail, read, write, _ = tailed
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    (path,) = logs(tmp_path, 1, 20_000 * b"x")
    tail.follow([LogView(path, write, None)])
    assert not tail.close(0.05)
    shown = 0
    while shown < 20_000:  # somebody reads after all
        shown += len(os.read(read, 100_000))
    assert tail.close(10)


def test_the_patience_begins_at_the_end_of_the_job_not_at_its_last_line(tailed, tmp_path):
    """A quiet hour before it is no reason to give up at once."""
    tail, _, write, _ = tailed
    (path,) = logs(tmp_path, 1, b"x")
    tail.progress = time.monotonic() - 3600
    hold = threading.Event()
    tail._write = lambda *_: hold.wait(10)
    tail.follow([LogView(path, write, None)])
    threading.Timer(0.1, hold.set).start()
    assert tail.close(5)


def test_a_console_in_nonblocking_mode_loses_nothing(tailed, tmp_path):
    tail, read, write, _ = tailed
    os.set_blocking(write, False)
    (path,) = logs(tmp_path, 1, 300_000 * b"x")
    tail.follow([LogView(path, write, None)])
    shown = 0
    while shown < 300_000:
        shown += len(os.read(read, 1 << 16))
    assert tail.close(10)


def test_a_file_that_is_gone_is_no_trouble(tailed, tmp_path):
    tail, _, write, troubles = tailed
    tail.follow([LogView(tmp_path / "gone", write, None)])
    assert tail.close(10)
    assert troubles == []


def test_descriptors_are_left_for_the_rest_of_the_process(tmp_path):
    """With a low limit some files are not followed, and that is said."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (room.SPARED_FILES + 30, limits[1]))
    try:
        troubles = []
        tail = Tail(lambda path, error, doing: troubles.append((path.name, error.errno, doing)))
        paths = logs(tmp_path, 40)
        tail.follow([LogView(path, -1, None) for path in paths])
        assert ("log_39", errno.EMFILE, "show") in troubles
        free = [os.open(os.devnull, os.O_RDONLY) for _ in range(room.SPARED_FILES)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert tail.close(10)
    for fd in (*free, tail._wake_read, tail._wake_write, tail._inotify.fd):
        os.close(fd)


def test_a_copy_that_fails_is_told_and_costs_the_console_nothing(tailed, tmp_path):
    tail, read, write, troubles = tailed
    (path,) = logs(tmp_path, 1, b"loss\n")
    tail.follow([LogView(path, write, b"", (b"loss",), tmp_path / "no" / "folder")])
    assert tail.close(10)
    assert taken(read) == b"loss\n"
    assert troubles == [("folder", errno.ENOENT, "write")]


def test_without_a_thread_nothing_is_shown_and_that_is_told(tailed, tmp_path, monkeypatch):
    tail, _, write, troubles = tailed

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (path,) = logs(tmp_path, 1, b"x")
    tail.follow([LogView(path, write, None)])
    assert troubles == [("log_0", errno.EAGAIN, "show")]
    assert tail.close(10)


@pytest.mark.parametrize("prefix", [b"> ", None])
def test_a_hushed_file_is_shown_as_far_as_it_was(grown, prefix):
    grown.follow(prefix=prefix)
    grown.grow(b"a\nb")
    with grown.path.open("ab") as file:
        file.write(b"c\nd\n")
    grown.follower.hush()
    shown = grown.grow(b"what all say\n")
    assert shown.replace(b"> ", b"") == b"a\nbc\nd\n"
    assert grown.finish() == shown


def test_files_are_hushed_however_late_the_thread_is(tailed, tmp_path):
    tail, read, write, _ = tailed
    (path,) = logs(tmp_path, 1, b"before\n")
    tail.follow([LogView(path, write, b"> ")])
    tail.hush()
    with path.open("ab") as file:
        file.write(b"after\n")
    assert tail.close(5)
    assert taken(read) == b"> before\n"
