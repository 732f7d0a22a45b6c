"""Buffers go to a record of the page, those that never change only as often as needed, and back."""

import ctypes

import pytest
import torch
from torch import nn

from worker_hooks.state import buffers as buffers_module
from worker_hooks.state.buffers import Buffers
from worker_hooks.state.registry import pieces_of
from worker_hooks.tensors.tensor_bytes import from_bytes


class Page:
    """Three records' payloads."""

    def __init__(self, module):
        self.buffers = Buffers(pieces_of({"model": module}))
        self.nbytes = sum(entry.nbytes for entry in self.buffers.entries)
        self._memory = [ctypes.create_string_buffer(b"\xee" * (self.nbytes + 3)) for _ in range(3)]

    def fill(self, slot):
        assert self.buffers.fill(ctypes.addressof(self._memory[slot]), slot) == self.nbytes
        assert self._memory[slot].raw[self.nbytes :] == b"\xee\xee\xee\x00"
        return self.read(slot)

    def read(self, slot):
        found, at = {}, 0
        for entry in self.buffers.entries:
            found[entry.name] = from_bytes(entry, self._memory[slot].raw[at : at + entry.nbytes])
            at += entry.nbytes
        return found


def holder(**held):
    module = nn.Module()
    for name, tensor in held.items():
        module.register_buffer(name, tensor, persistent=not name.startswith("_"))
    return module


def check(module, found):
    there = {f"model.{name}": each for name, each in module.named_buffers(remove_duplicate=False)}
    assert found.keys() == there.keys()
    for name, each in there.items():
        assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape)
        raw = found[name].resolve_conj().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(
            raw, each.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
        ), name


ODD = {
    "bool": torch.tensor([True, False, True]),
    "f8": torch.randn(5).to(torch.float8_e5m2),
    "c128": torch.randn(3, dtype=torch.complex128),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "d0": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "odd": torch.arange(5, dtype=torch.uint8),  # what follows is not aligned
    "bf16": torch.randn(3).bfloat16(),
    "expanded": torch.randn(1, 4).expand(3, 4),
    "strided": torch.randn(6, 6)[::2, ::3],
    "_hidden": torch.randn(2),
    "large": torch.randn(3000),
    "large_strided": torch.randn(100, 100).t(),
}


def test_all_kinds_of_buffers_are_written():
    module = nn.Sequential(holder(**ODD), nn.BatchNorm1d(2000), nn.BatchNorm2d(3))
    page = Page(module)
    for slot in (0, 1, 2, 0, 1, 2):
        module[1](torch.randn(4, 2000))
        check(module, page.fill(slot))


def test_a_model_without_buffers_writes_nothing():
    page = Page(nn.Linear(1, 1))
    assert page.nbytes == 0
    assert page.fill(0) == page.fill(0) == {}


def test_batch_norms_statistics_are_always_written():
    module = nn.BatchNorm1d(4096).eval()
    page = Page(module)
    for n in range(20):
        page.fill(n % 3)
    module.train()
    module(torch.randn(4, 4096))  # torch does not count this change of running_mean
    check(module, page.fill(0))


def copies(monkeypatch):
    """Sizes of what is copied one by one."""
    done = []
    monkeypatch.setattr(
        buffers_module.ctypes, "memmove", lambda to, at, n: (done.append(n), move(to, at, n))[1]
    )
    return done


move = ctypes.memmove


def test_a_constant_is_copied_once_for_each_record(monkeypatch):
    module = holder(mask=torch.ones(100, 100))
    page = Page(module)
    done = copies(monkeypatch)
    for n in range(60):
        check(module, page.fill((0, 2, 1, 2)[n % 4]))
    assert len(done) == 3
    module.mask[3, 4] = 2  # torch counts this
    for n in range(12):
        check(module, page.fill(n % 3))
    assert len(done) == 6


def test_changes_that_torch_does_not_count_are_found():
    module = holder(codebook=torch.zeros(50, 50))
    page = Page(module)
    for n in range(30):
        module.codebook.data.add_(1)  # as moving averages of codebooks are often written
        check(module, page.fill(n % 3))


@pytest.mark.parametrize("size", [10, 5000])
def test_a_buffer_that_is_replaced_is_followed(size):
    module = holder(position=torch.zeros(size), other=torch.ones(size))
    page = Page(module)
    for n in range(20):
        if n % 5 == 0:
            module.position = torch.full((size,), float(n))
        if n % 5 == 2:
            module.other.data = torch.full((size,), float(n))
        check(module, page.fill(n % 3))


def test_a_new_page_gets_everything():
    module = holder(mask=torch.ones(100, 100))
    page = Page(module)
    for n in range(30):
        page.fill(n % 3)
    for memory in page._memory:
        ctypes.memset(memory, 0xEE, page.nbytes)
    page.buffers.forget()
    check(module, page.fill(0))


def test_a_buffer_that_grows_or_is_added_is_known_before_a_record_is_written():
    module = holder(cache=torch.zeros(4), later=None, fixed=torch.ones(2))
    page = Page(module)
    page.fill(0)
    assert not page.buffers.look(is_commit=True)
    assert page.buffers.unsaved == frozenset()
    module.cache = torch.zeros(8)
    module.later = torch.zeros(1)
    module.fixed.add_(1)
    assert page.buffers.look(is_commit=False)
    assert page.buffers.unsaved == {"model.cache", "model.later"}
    module.cache = torch.zeros(16)
    module.register_buffer("added", torch.zeros(20_000))
    assert page.buffers.look(is_commit=True)
    assert page.buffers.unsaved == {"model.cache", "model.later", "model.added"}
    assert page.buffers.unsaved_up_to(1 << 10) == ["model.cache", "model.later"]
    assert page.fill(0)["model.fixed"].tolist() == [2, 2]
    assert not page.buffers.look(is_commit=True)
    page.buffers.renew()  # for another page
    assert page.buffers.look(is_commit=True)
    assert page.buffers.unsaved == frozenset()


def test_buffers_of_another_size_come_back_before_the_rest_and_those_that_were_added_too():
    module = holder(cache=torch.ones(4), same=torch.ones(2), _mask=torch.ones(1))
    found = {"model.cache": torch.zeros(3), "model.same": torch.zeros(2)}
    found |= {
        "model.added": torch.zeros(5),
        "rng.torch": torch.zeros(1),
        "model.none.x": torch.zeros(1),
    }
    buffers = Buffers(pieces_of({"model": module}))
    buffers.restore(found, are_all=False)
    assert [*module.cache, *module.added, *module.same] == [0] * 8 + [1] * 2
    assert buffers.needed(["model.cache", "model._mask", "model.gone"]) == [
        "model.cache",
        "model.gone",
    ]


def test_buffers_come_back():
    torch.manual_seed(0)
    module = nn.Sequential(holder(**ODD), nn.BatchNorm1d(4))
    module[1](torch.randn(8, 4))
    found = Page(module).fill(0)
    fresh = nn.Sequential(
        holder(**{name: torch.zeros_like(each) for name, each in ODD.items()}), nn.BatchNorm1d(4)
    )
    fresh[0].expanded = torch.zeros(1, 4).expand(3, 4)  # elements share memory
    fresh[0].odd = torch.zeros(9, dtype=torch.uint8)  # another size
    fresh[0].d0 = None
    kept = fresh[1].running_mean
    found.pop("model.0.bf16")
    Buffers(pieces_of({"model": fresh})).restore(found)
    assert fresh[1].running_mean is kept
    assert not fresh[0].bf16.any()
    fresh[0].bf16 = module[0].bf16
    check(module, {f"model.{name}": each for name, each in fresh.named_buffers()})


def test_a_default_device_does_not_disturb():
    module = nn.BatchNorm1d(3)
    page = Page(module)
    with torch.device("meta"):  # as scripts have torch.set_default_device("cuda")
        page.buffers.fill(ctypes.addressof(page._memory[0]), 0)
    check(module, page.read(0))
