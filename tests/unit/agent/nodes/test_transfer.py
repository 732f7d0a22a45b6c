"""Files in memory travel whole to who has the key, and to nobody else."""

import os
import socket
import threading

import pytest

from agent.nodes.transfer import MemoryServer, fetch

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


def content_of(file):
    return os.pread(file, os.fstat(file).st_size, 0)


def test_files_arrive_whole_and_sealed(sent):
    contents, files = sent
    progressed = threading.Event()
    server = MemoryServer(files, progressed.set)
    try:
        for _ in range(2):  # for several nodes
            sizes = list(map(len, contents))
            taken = fetch("127.0.0.1", server.port, server.key, sizes, "taken")
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
    server = MemoryServer(files, lambda: None)
    try:
        with pytest.raises(OSError, match="before all had come"):
            fetch("127.0.0.1", server.port, bytes(32), [3 << 20], "taken")
    finally:
        server.close()


def test_a_file_that_is_shorter_than_said_leaves_nothing_open(sent):
    _, files = sent
    server = MemoryServer(files[:1], lambda: None)
    before = set(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(OSError, match="before all had come"):
            fetch("127.0.0.1", server.port, server.key, [3 << 20, 10], "taken")
        assert not any(
            "taken" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in set(os.listdir("/proc/self/fd")) - before
            if os.path.lexists(f"/proc/self/fd/{fd}")
        )
    finally:
        server.close()


def test_a_closed_server_lets_nobody_in(sent):
    _, files = sent
    server = MemoryServer(files, lambda: None)
    port = server.port
    server.close()
    with pytest.raises(OSError, match=r"refused|reset"):
        fetch("127.0.0.1", port, server.key, [1], "taken")


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(sent):
    contents, files = sent
    server = MemoryServer(files, lambda: None)
    try:
        with socket.create_connection(("127.0.0.1", server.port)):
            sizes = list(map(len, contents))
            for file in fetch("127.0.0.1", server.port, server.key, sizes, "taken"):
                os.close(file)
    finally:
        server.close()
