"""What a copy shares becomes its own; what nobody knows is refused."""

import ctypes
import mmap
import multiprocessing
import os

import pytest

from worker_hooks.shadows import shared_memory
from worker_hooks.shadows.shared_memory import Mapping


@pytest.fixture
def memory():
    """The same memory, mapped twice."""
    fd = os.memfd_create("shared")
    os.ftruncate(fd, mmap.PAGESIZE)
    both = mmap.mmap(fd, mmap.PAGESIZE), mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    yield both
    for each in both:
        each.close()


def address(of):
    return ctypes.addressof(ctypes.c_char.from_buffer(of))


def test_memory_of_its_own_does_not_change_with_others(memory):
    mine, others = memory
    others[:5] = b"first"
    known = shared_memory.contents([Mapping(address(mine), mmap.PAGESIZE, "")])
    others[:5] = b"later"
    shared_memory.own(known)
    assert mine[:5] == b"first"
    mine[:5] = b"again"
    assert others[:5] == b"later"


def test_unknown_memory_is_named_and_known_is_not(memory):
    one, other = memory
    assert any("shared" in path for path in shared_memory.unknown())
    known = [address(one) + 7, address(other)]
    assert not any("shared" in path for path in shared_memory.unknown(known=known))


def test_batches_are_known_by_who_made_them(monkeypatch):
    paths = [f"/dev/shm/torch_{pid}_44_2 (deleted)" for pid in (7, 8)]
    paths += ["/dev/shm/torch_7_44_2", "/dev/shm/torch_7x_44_2 (deleted)"]
    found = [Mapping(place, 1, path) for place, path in enumerate(paths)]
    monkeypatch.setattr(shared_memory, "mappings", lambda: found)
    assert shared_memory.batches([7]) == found[:1]
    assert shared_memory.batches([]) == []
    assert shared_memory.unknown([7]) == tuple(paths[1:])


def test_a_lock_that_is_held_is_seen():
    context = multiprocessing.get_context("fork")
    free, other = context.Lock(), context.Lock()
    handles = [each._semlock.handle for each in (free, other)]

    def is_taken(*others):
        mine = [each for each in shared_memory.locks() if each[0] in handles]
        return shared_memory.taken(mine, others)

    assert not is_taken()
    with other:
        assert is_taken()
        assert not is_taken(handles[1])
        noted = shared_memory.locks()
    shared_memory.put_back([each for each in noted if each[0] == handles[1]])
    assert not other.acquire(block=False)
