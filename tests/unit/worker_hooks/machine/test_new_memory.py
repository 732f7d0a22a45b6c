"""Pages that are taken before something is read into them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from worker_hooks.machine import new_memory
from worker_hooks.machine.new_memory import FROM, take_pages


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
