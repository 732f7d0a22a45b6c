"""Pages that are taken before something is read into them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from worker_hooks.machine import new_memory
from worker_hooks.machine.new_memory import FROM, PART, take_pages

HUGE = 2 << 20


def resident():
    """How many bytes of this process have pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_are_there_before_they_are_used():
    tensor = torch.empty(128 << 20, dtype=torch.uint8)
    before = resident()
    take_pages(tensor.data_ptr(), tensor.nbytes)
    if new_memory._is_supported():
        assert resident() - before > tensor.nbytes // 2
    tensor.fill_(3)


@pytest.mark.parametrize("nbytes", [0, 1, FROM - 1, FROM, FROM + 5])
def test_memory_beside_it_stays_as_it_is(nbytes):
    tensor = torch.full((FROM + (1 << 20),), 7, dtype=torch.uint8)
    take_pages(tensor.data_ptr() + mmap.PAGESIZE + 3, nbytes)
    assert (tensor == 7).all()


def test_an_older_kernel_takes_them_later(monkeypatch):
    advised = []
    monkeypatch.setattr(new_memory, "_advise", lambda *told: advised.append(told) or -1)
    new_memory._is_supported.cache_clear()
    take_pages(4096, 2 * FROM)
    assert [advice for *_, advice in advised] == [new_memory._MADV_POPULATE_WRITE]
    new_memory._is_supported.cache_clear()


class Machine:
    """One whose pages cost what a test says."""

    def __init__(self, monkeypatch, cost_of):
        self.taken, self.now_s, self._cost_of = [], 0.0, cost_of
        monkeypatch.setattr(new_memory, "_costs", {True: 0.0, False: 0.0})
        monkeypatch.setattr(new_memory, "_is_supported", lambda: True)
        monkeypatch.setattr(new_memory, "_take", self._take)
        monkeypatch.setattr(new_memory.time, "thread_time", lambda: self.now_s)

    def _take(self, start, end, *, is_large):
        assert start % HUGE == end % HUGE == 0
        assert not self.taken or start == self.taken[-1][1]
        self.taken.append((start, end, is_large))
        self.now_s += self._cost_of(is_large, len(self.taken)) * (end - start)

    @property
    def sizes(self):
        return "".join("L" if is_large else "s" for *_, is_large in self.taken)


@pytest.mark.parametrize(
    ("cost_of", "sizes"),
    [
        (lambda is_large, _: 1 if is_large else 3, "LsLLLLLL"),
        (lambda is_large, _: 9 if is_large else 3, "Lsssssss"),
        # a host that takes memory back: some large pages are at hand
        (lambda is_large, number: (1 if number < 5 else 20) if is_large else 3, "LsLLLsss"),
        # small ones that have become dear
        (lambda is_large, number: 9 if is_large else number, "LssssssssLL"),
    ],
)
def test_pages_are_of_the_size_that_was_cheaper_last(monkeypatch, cost_of, sizes):
    machine = Machine(monkeypatch, cost_of)
    take_pages(HUGE, len(sizes) * PART)
    assert machine.sizes == sizes


def test_all_whole_large_pages_are_taken_once(monkeypatch):
    machine = Machine(monkeypatch, lambda *_: 1)
    take_pages(HUGE + 5, 3 * PART + 7)
    assert (machine.taken[0][0], machine.taken[-1][1]) == (2 * HUGE, HUGE + 3 * PART)


def test_what_counts_is_the_cost_of_a_byte(monkeypatch):
    machine = Machine(monkeypatch, lambda is_large, _: 3 if is_large else 2)
    take_pages(HUGE, FROM)
    take_pages(HUGE + FROM, 2 * PART)
    assert machine.sizes == "Lss"
