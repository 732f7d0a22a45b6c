"""Memory that several threads fill from files."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import torch

from worker_hooks.recovery import parallel_read
from worker_hooks.recovery.parallel_read import read_into
from worker_hooks.storage.tensor_parts import Run
from worker_hooks.tensors.tensor_bytes import view

SEEDS = range(30)


needs_small_parts = pytest.mark.usefixtures("small_parts", "cores")


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(parallel_read, "PART", 64)
    monkeypatch.setattr(parallel_read, "FROM", 128)


@pytest.fixture
def cores(monkeypatch):
    """Eight of them, and the threads that read."""
    readers = set()
    preadv = os.preadv

    def read(file, buffers, start):
        readers.add(threading.current_thread().name)
        # a file may give less than it was asked for
        return preadv(file, [buffers[0][: max(1, len(buffers[0]) // 2)]], start)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return readers


def some_files(folder, chance):
    content = [folder / str(number) for number in range(3)]
    for path in content:
        path.write_bytes(chance.randbytes(1000))
    return content


@needs_small_parts
@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_files_come_in_their_order(tmp_path, seed):
    chance = random.Random(seed)
    files, runs, expected = some_files(tmp_path, chance), [], b""
    for _ in range(chance.randrange(1, 20)):
        path, at = chance.choice(files), chance.randrange(900)
        nbytes = chance.randrange(1, 1000 - at)
        runs.append(Run(path, at, nbytes))
        expected += path.read_bytes()[at : at + nbytes]
    tensor = torch.zeros(len(expected) + 16, dtype=torch.uint8)
    first = chance.randrange(8)
    memory = view(tensor)[first : first + len(expected)]
    assert read_into(memory, tensor.data_ptr() + first, runs, is_new=False) == len(expected)
    assert bytes(memory) == expected
    assert not tensor[:first].any() and not tensor[first + len(expected) :].any()


def test_a_large_tensor_is_read_by_threads_that_are_gone_then(tmp_path):
    path, nbytes = tmp_path / "file", parallel_read.FROM
    with path.open("wb") as file:
        file.truncate(nbytes)
        os.pwrite(file.fileno(), b"end", nbytes - 3)
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    assert read_into(view(tensor), tensor.data_ptr(), [Run(path, 0, nbytes)], is_new=True) == nbytes
    assert bytes(view(tensor)[-3:]) == b"end" and not tensor[:-3].any()
    assert not [each for each in threading.enumerate() if each.name == "msrun-read"]


@needs_small_parts
def test_a_small_one_by_none(tmp_path, cores):
    path = tmp_path / "file"
    path.write_bytes(bytes(127))
    tensor = torch.ones(127, dtype=torch.uint8)
    read_into(view(tensor), tensor.data_ptr(), [Run(path, 0, 127)], is_new=False)
    assert cores == {threading.current_thread().name}


@needs_small_parts
def test_without_a_thread_this_one_reads_all(tmp_path, monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 500)
    tensor = torch.ones(500, dtype=torch.uint8)
    assert read_into(view(tensor), tensor.data_ptr(), [Run(path, 0, 500)], is_new=False) == 500
    assert (tensor == ord("x")).all()


@needs_small_parts
def test_what_is_missing_is_an_error_and_not_zero(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(700))
    tensor = torch.zeros(800, dtype=torch.uint8)
    with pytest.raises(ValueError, match="file ends too early"):
        read_into(view(tensor), tensor.data_ptr(), [Run(path, 0, 800)], is_new=False)
    with pytest.raises(ValueError, match="has more than fits"):
        read_into(view(tensor), tensor.data_ptr(), [Run(path, 0, 700)] * 2, is_new=False)
    with pytest.raises(FileNotFoundError):
        read_into(view(tensor), tensor.data_ptr(), [Run(Path("/none"), 0, 800)], is_new=False)
    assert read_into(view(tensor), tensor.data_ptr(), [Run(path, 0, 700)], is_new=False) == 700


@needs_small_parts
@pytest.mark.parametrize("first", [0, 1, 63])
def test_new_memory_is_taken_up_to_where_large_pages_may_begin(tmp_path, monkeypatch, first):
    taken = []
    monkeypatch.setattr(parallel_read, "take_pages", lambda *part: taken.append(part))
    path, tensor = tmp_path / "file", torch.zeros(600, dtype=torch.uint8)
    path.write_bytes(bytes(500))
    address = -(-tensor.data_ptr() // 64) * 64 + first
    memory = view(tensor)[address - tensor.data_ptr() :][:500]
    read_into(memory, address, [Run(path, 0, 300), Run(path, 300, 200)], is_new=True)
    starts, sizes = zip(*sorted(taken), strict=True)
    assert (starts[0], sum(sizes)) == (address, 500)
    assert all(start % 64 == 0 for start in starts[1:])
