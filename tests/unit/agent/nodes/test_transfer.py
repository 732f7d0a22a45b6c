"""Files in memory travel whole to who has the key, and to nobody else."""

import os
import socket
import threading
from contextlib import ExitStack, suppress
from queue import SimpleQueue

import pytest
from support.jobs import poll

from agent.nodes import transfer
from agent.nodes.transfer import (
    KEY_BYTES,
    MemoryInbox,
    MemoryServer,
    Span,
    close_all,
    fetch,
    give,
    memory_files,
    seal,
)

DEADLINE_S = 60


def file_of(content):
    file = os.memfd_create("sent")
    os.write(file, content)
    return file


@pytest.fixture
def sent():
    contents = [os.urandom(3 << 20), b"", b"x", os.urandom(5 << 20)]
    files = [file_of(each) for each in contents]
    yield contents, files
    for file in files:
        os.close(file)


def fetched(port, key, sizes):
    """New files of these sizes, fetched whole."""
    files = memory_files(len(sizes), "taken")
    try:
        fetch("127.0.0.1", port, key, map(Span, files, [0] * len(files), sizes))
    except OSError:
        close_all(files)
        raise
    return files


def content_of(file):
    return os.pread(file, os.fstat(file).st_size, 0)


def files_open(inode):
    """How many descriptors of this process are of a file."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.stat(f"/proc/self/fd/{number}").st_ino == inode
    return found


def test_files_arrive_whole_and_sealed(sent):
    contents, files = sent
    progressed = threading.Event()
    server = MemoryServer(lambda _: progressed.set())
    key = server.offer(map(Span, files))
    try:
        for _ in range(2):  # for several nodes
            sizes = list(map(len, contents))
            taken = fetched(server.port, key, sizes)
            seal(taken)
            assert [content_of(file) for file in taken] == contents
            assert progressed.wait(DEADLINE_S)
            with pytest.raises(OSError, match="not permitted"):
                os.write(taken[0], b"x")
            for file in taken:
                os.close(file)
    finally:
        server.close()


def test_a_wrong_key_gets_nothing(sent):
    _, files = sent
    server = MemoryServer(lambda _: None)
    server.offer(map(Span, files))
    try:
        with pytest.raises(OSError, match="before all had come"):
            fetched(server.port, bytes(32), [3 << 20])
    finally:
        server.close()


def test_a_file_that_is_shorter_than_said_is_an_error(sent):
    _, files = sent
    server = MemoryServer(lambda _: None)
    key = server.offer([Span(files[0])])
    try:
        with pytest.raises(OSError, match="before all had come"):
            fetched(server.port, key, [3 << 20, 10])
    finally:
        server.close()


@pytest.mark.parametrize(
    ("only", "expected"),
    [((), b""), ((1,), b"b"), ((0, 2), b"ac"), (None, b"abc")],
)
def test_of_what_a_key_is_to_only_some_comes(only, expected):
    (one,) = memory_files(1, "offered")
    os.pwrite(one, b"abc", 0)
    (copy,) = memory_files(1, "taken")
    server = MemoryServer(lambda _: None)
    key = server.offer([Span(one, at, 1) for at in range(3)])
    try:
        spans = [Span(copy, at, 1) for at in range(len(expected))]
        fetch("127.0.0.1", server.port, key, spans, only=only)
        assert content_of(copy) == expected
        for wrong in ((3,), (0, 1, 2, 0), (1 << 31,)):
            with pytest.raises(OSError, match=r"before all had come|reset by peer"):
                fetch("127.0.0.1", server.port, key, [Span(copy, 0, 1)], only=wrong)
    finally:
        close_all((one, copy))
        server.close()


def test_parts_come_where_they_belong(sent):
    contents, files = sent
    server = MemoryServer(lambda _: None)
    key = server.offer([Span(files[3], 7, 70), Span(files[0], 0, 9)])
    one, other = memory_files(2, "taken")
    try:
        fetch("127.0.0.1", server.port, key, [Span(one, 10, 70), Span(other, 11, 9)])
        assert content_of(one) == bytes(10) + contents[3][7:77]
        assert content_of(other) == bytes(11) + contents[0][:9]
    finally:
        close_all((one, other))
        server.close()


def test_a_closed_server_lets_nobody_in(sent):
    _, files = sent
    server = MemoryServer(lambda _: None)
    key = server.offer(map(Span, files))
    port = server.port
    server.close()
    with pytest.raises(OSError, match=r"refused|reset"):
        fetched(port, key, [1])


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(sent):
    contents, files = sent
    server = MemoryServer(lambda _: None)
    key = server.offer(map(Span, files))
    try:
        with socket.create_connection(("127.0.0.1", server.port)):
            sizes = list(map(len, contents))
            for file in fetched(server.port, key, sizes):
                os.close(file)
    finally:
        server.close()


def serving():
    return sum(thread.name == "msrun-memory" for thread in threading.enumerate())


def test_a_stranger_costs_a_thread_for_a_moment_only(sent, monkeypatch):
    """The server of a checkpoint that is resumed lives as long as the job."""
    monkeypatch.setattr(transfer, "PROOF_S", 0.5)
    before, most = serving(), transfer.MOST_UNKNOWN
    server = MemoryServer(lambda _: None)
    key = server.offer([Span(sent[1][2])])
    try:
        with ExitStack() as stack:
            for _ in range(4 * most):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            (file,) = fetched(server.port, key, [1])
            os.close(file)
            # besides those that wait for strangers, on a busy machine as many are about to end
            assert serving() <= before + 2 * most + 2
        poll(lambda: serving() <= before + 2)
        (file,) = fetched(server.port, key, [1])
        os.close(file)
    finally:
        server.close()
    poll(lambda: serving() <= before)


def test_who_sends_a_key_byte_by_byte_has_no_more_time(sent, monkeypatch):
    monkeypatch.setattr(transfer, "PROOF_S", 0.3)
    server = MemoryServer(lambda _: None)
    server.offer([Span(sent[1][2])])
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.settimeout(0.05)
            for _ in range(KEY_BYTES):
                slow.sendall(b"k")
                with suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    break
            else:
                pytest.fail("it was let alone")
    except ConnectionError:  # that is as good
        pass
    finally:
        server.close()


def test_each_key_is_to_files_of_its_own(sent):
    server = MemoryServer(lambda _: None)
    try:
        for content, key in [
            (each, server.offer([Span(file)])) for each, file in zip(*sent, strict=True)
        ]:
            (taken,) = fetched(server.port, key, [len(content)])
            assert content_of(taken) == content
            os.close(taken)
    finally:
        server.close()


def test_a_file_whose_number_is_another_ones_by_now_is_sent_until_the_server_is_closed():
    file = file_of(b"old")
    server = MemoryServer(lambda _: None)
    keys = [server.offer([Span(file)]) for _ in range(2)]
    os.close(file)
    other = file_of(b"new")
    try:
        assert other == file
        keys.append(server.offer([Span(other)]))
        for key, content in zip(keys, (b"old", b"old", b"new"), strict=True):
            (taken,) = fetched(server.port, key, [3])
            assert content_of(taken) == content
            os.close(taken)
    finally:
        os.close(other)
        server.close()


def test_a_server_that_is_closed_frees_its_files():
    server, file = MemoryServer(lambda _: None), file_of(b"old")
    inode = os.fstat(file).st_ino
    server.offer([Span(file), Span(file)])
    os.close(file)
    assert files_open(inode) == 1
    server.close()
    assert files_open(inode) == 0


# --- brought to the controller's node -------------------------------------------------------------


@pytest.fixture
def inbox():
    taken, progress = SimpleQueue(), []
    one = MemoryInbox("brought", taken.put, progress.append)
    one.taken, one.progress = taken, progress
    yield one
    one.close()


def bring(inbox, content, key=None):
    with open(file_of(content), "rb") as file:
        give("127.0.0.1", inbox.port, key or inbox.key, file, lambda _: None)


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(9 << 20)], ids=len)
def test_a_file_is_there_before_its_sender_hears_of_it(inbox, content):
    bring(inbox, content)
    file = inbox.taken.get_nowait()
    assert content_of(file) == content
    os.close(file)


def test_signs_of_progress_are_given_as_bytes_come(inbox):
    bring(inbox, bytes(5 << 20))
    assert sum(inbox.progress) == 5 << 20
    os.close(inbox.taken.get_nowait())


def test_who_has_another_key_or_dies_amid_it_does_not_stop_the_right_one(inbox):
    with pytest.raises(OSError, match=r"has not taken all|reset|Broken pipe"):
        bring(inbox, b"wrong" * 100, bytes(32))
    with socket.create_connection(("127.0.0.1", inbox.port)) as half:
        half.sendall(inbox.key + (1000).to_bytes(8, "big") + b"some")
    bring(inbox, b"right")
    file = inbox.taken.get_nowait()
    assert content_of(file) == b"right"
    os.close(file)
    assert inbox.taken.empty()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n"], ids=["nothing", "half a key"])
def test_strangers_keep_no_rank_waiting(inbox, said):
    with ExitStack() as stack:
        for _ in range(3):
            other = stack.enter_context(socket.create_connection(("127.0.0.1", inbox.port)))
            other.sendall(said)
        bring(inbox, b"right")  # they stay longer than it waits for a byte
    file = inbox.taken.get_nowait()
    assert content_of(file) == b"right"
    os.close(file)


def test_as_many_strangers_as_there_is_room_for_keep_it_waiting_for_a_moment(inbox, monkeypatch):
    monkeypatch.setattr(transfer, "PROOF_S", 0.2)
    with ExitStack() as stack:
        for _ in range(2 * transfer.MOST_UNKNOWN):
            stack.enter_context(socket.create_connection(("127.0.0.1", inbox.port)))
        bring(inbox, b"right")
    os.close(inbox.taken.get_nowait())


def test_who_brings_it_once_more_is_taken_once(inbox):
    """A sender that has not heard that it was taken comes again."""
    with socket.create_connection(("127.0.0.1", inbox.port)) as half:
        half.sendall(inbox.key + (4).to_bytes(8, "big") + b"so")
        bring(inbox, b"right")
        with suppress(OSError):
            half.sendall(b"me")
            assert half.recv(1) == b""
    file = inbox.taken.get(timeout=DEADLINE_S)
    assert content_of(file) == b"right"
    os.close(file)
    assert inbox.taken.empty()


def test_nothing_comes_to_what_is_closed(inbox):
    inbox.close()
    with pytest.raises(OSError, match="refused"):
        bring(inbox, b"late")
    assert inbox.taken.empty()


def test_as_many_threads_serve_as_nodes_come_at_once(sent):
    contents, files = sent
    server = MemoryServer(lambda _: None)
    key = server.offer([Span(files[0])])

    def taken():
        (file,) = fetched(server.port, key, [len(contents[0])])
        assert content_of(file) == contents[0]
        os.close(file)

    before = serving()
    try:
        for _ in range(20):  # one after the other
            taken()
        assert serving() <= before + 2  # the one before may not have come to its end
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
        taken()
        assert serving() >= before + 5
        for each in silent:
            each.close()
    finally:
        server.close()


def test_the_kernel_turns_nobody_away_of_many_who_come_at_once():
    with transfer._listening() as listener, ExitStack() as stack:
        here = "127.0.0.1", listener.getsockname()[1]
        for _ in range(200):  # before anybody is let in
            stack.enter_context(socket.create_connection(here, 20.0))


def test_a_part_of_a_file_is_sent_alone(sent):
    contents, files = sent
    server = MemoryServer(lambda _: None)
    key = server.offer([Span(files[3], 1000, 70), Span(files[0], 5, 0), Span(files[0], 9, 3)])
    try:
        taken = fetched(server.port, key, [70, 0, 3])
        wanted = [contents[3][1000:1070], b"", contents[0][9:12]]
        assert [content_of(file) for file in taken] == wanted
        for file in taken:
            os.close(file)
    finally:
        server.close()
