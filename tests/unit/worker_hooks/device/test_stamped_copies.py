"""A device writes buffers to the page as it comes to them; the main thread waits for none of it."""

from __future__ import annotations

import os

import pytest
import torch
from support.copy_queue import DoubleQueue
from support.device_double import Clock, Device
from torch import nn

from worker_hooks.contract.status_page import Page, create
from worker_hooks.device import devices, page_lock, stamped_copies
from worker_hooks.state.buffers import Buffers
from worker_hooks.state.registry import pieces_of
from worker_hooks.tensors.tensor_bytes import from_bytes

LARGE = 3000


class Writer:
    """The buffers of a module, and a page for them."""

    def __init__(self, module: nn.Module, *held: str) -> None:
        self.buffers = Buffers(pieces_of({"model": module}))
        entries = self.buffers.entries
        fd = create(0, 0, entries, 64, device_bytes=self.buffers.device_nbytes, runs_ahead=True)
        self.page, self.reader = Page(fd), Page(fd)
        os.close(fd)
        self.copies = self.buffers.device_copies(
            self.page, [torch.device(each) for each in held or ("cpu",)]
        )

    def write(self, step: int, *, is_commit: bool = True) -> None:
        if is_commit:
            self.buffers.compare_device((step % 2, (step - 1) % 2), self._read(step))
        self.page.write(
            step, 0, step, b"{}", lambda at: self.buffers.fill(at, 0), is_commit=is_commit
        )
        area = self.page.device_area(step, is_commit=is_commit)
        self.buffers.copy_device(self.copies, area, step)

    def _read(self, step: int):
        def read(slot: int, start: int, stop: int) -> bytes | None:
            of = step - 1 if slot == (step - 1) % 2 else step - 2
            return self.page.device_part(of, is_commit=True, start=start, stop=stop)

        return read

    def read(self, step: int) -> dict[str, torch.Tensor]:
        record = self.reader.record(step)
        found, at = {}, 0
        for entry in self.reader.entries if record is not None else ():
            found[entry.name[6:]] = from_bytes(entry, record.payload[at : at + entry.nbytes])
            at += entry.nbytes
        return found


def holder(**held: torch.Tensor | None) -> nn.Module:
    module = nn.Module()
    for name, tensor in held.items():
        module.register_buffer(name, tensor)
    return module


def check(module: nn.Module, found: dict[str, torch.Tensor]) -> None:
    there = dict(module.named_buffers())
    assert found.keys() == there.keys()
    for name, each in there.items():
        assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape)
        raw = each.detach().resolve_conj().resolve_neg().contiguous()
        assert torch.equal(
            raw.view(-1).view(torch.uint8), found[name].view(-1).view(torch.uint8)
        ), name


class Queues:
    """The queue of the device, and what was locked."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.device = Device(self.clock)
        self.queue = DoubleQueue(self.device)
        self.locked: list[int] = []
        self.has_lock = True

    def lock(self, address: int, _nbytes: int) -> bool:
        self.locked += [address] * self.has_lock
        return self.has_lock


@pytest.fixture
def queues(monkeypatch) -> Queues:
    found = Queues()
    monkeypatch.setattr(devices, "is_on_host", lambda tensor: tensor.numel() == 1)
    monkeypatch.setattr(page_lock, "lock", found.lock)
    monkeypatch.setattr(page_lock, "unlock", found.locked.remove)
    monkeypatch.setattr(stamped_copies, "StreamQueue", lambda _: found.queue)
    monkeypatch.setattr(stamped_copies.time, "sleep", found.clock.advance)
    return found


ODD = {
    "on_host": torch.tensor(7),
    "bool": torch.tensor([True, False, True]),
    "f8": torch.randn(5).to(torch.float8_e5m2),
    "c128": torch.randn(3, dtype=torch.complex128),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "empty": torch.empty(0, 3),
    "odd": torch.arange(5, dtype=torch.uint8),  # what follows is not aligned
    "bf16": torch.randn(3).bfloat16(),
    "expanded": torch.randn(1, 4).expand(3, 4),
    "strided": torch.randn(6, 6)[::2, ::3],
    "large": torch.randn(LARGE),
    "large_strided": torch.randn(100, 100).t(),
}


def test_all_kinds_of_buffers_are_written_as_the_device_comes_to_them(queues):
    module = nn.Sequential(holder(**ODD), nn.BatchNorm1d(2000))
    writer = Writer(module)
    for step in range(8):
        module[1](torch.randn(4, 2000))
        writer.write(step, is_commit=False)
        assert writer.read(step) == {}
        queues.clock.advance(1)
        check(module, writer.read(step))
        writer.write(step)
        queues.clock.advance(1)
        check(module, writer.read(step))
        assert not writer.reader.record(step).has_early_buffers


def test_bytes_of_a_backward_stand_in_for_a_commit_that_the_device_has_not_reached(queues):
    module = nn.BatchNorm1d(3)
    writer = Writer(module)
    writer.write(1, is_commit=False)
    queues.clock.advance(1)
    writer.write(1)
    record = writer.reader.record(1)
    assert (record.is_commit, record.has_early_buffers) == (True, True)
    check(module, writer.read(1))
    writer.write(2, is_commit=False)  # the main thread has gone on
    assert writer.reader.record(2) is None
    assert writer.reader.position(2) == (0, 2)
    assert writer.reader.record(1).has_early_buffers


def test_a_constant_is_copied_to_each_area_and_then_only_when_it_changes(queues):
    module = holder(mask=torch.ones(LARGE), small=torch.ones(2))
    writer = Writer(module)

    def sizes(steps: range) -> list[int]:
        queues.queue.copied.clear()
        for step in steps:
            for is_commit in (False, True):
                writer.write(step, is_commit=is_commit)
                queues.clock.advance(1)
                check(module, writer.read(step))
        return [size for size in queues.queue.copied if size == 4 * LARGE]

    assert sizes(range(20, 30))
    assert sizes(range(30, 40)) == []
    module.mask[3] = 2  # torch counts this
    assert len(sizes(range(40, 50))) == 4


def test_changes_that_torch_does_not_count_are_found(queues):
    module = holder(codebook=torch.zeros(LARGE))
    writer = Writer(module)
    for step in range(30):
        module.codebook.data.add_(1)
        for is_commit in (False, True):
            writer.write(step, is_commit=is_commit)
            queues.clock.advance(1)
            check(module, writer.read(step))


def test_a_buffer_that_is_replaced_is_followed_and_one_that_grows_is_not(queues):
    module = holder(position=torch.zeros(10), other=torch.ones(LARGE), cache=torch.zeros(4))
    writer = Writer(module)
    for step in range(20):
        module.position = torch.full((10,), float(step))
        module.other = torch.full((LARGE,), float(step // 3))
        if step > 5:
            module.cache = torch.zeros(step)
        writer.write(step)
        queues.clock.advance(1)
        found = writer.read(step)
        assert found["position"].tolist() == [step] * 10
        assert set(found["other"].tolist()) == {step // 3}
    assert writer.buffers.unsaved == {"model.cache"}


def test_without_page_locking_a_copy_waits_and_is_there_at_once(queues):
    queues.has_lock = False
    module = nn.Sequential(holder(**ODD), nn.BatchNorm1d(5))
    writer = Writer(module)
    for step in range(6):
        module[1](torch.randn(4, 5))
        writer.write(step)
        check(module, writer.read(step))
    assert queues.queue.copied == []


@pytest.mark.parametrize("held", [("cpu", "cuda:1"), ("cuda:1",)])
def test_gradients_of_another_device_prove_nothing_so_a_copy_waits(queues, held):
    module = nn.BatchNorm1d(3)
    writer = Writer(module, *held)
    writer.write(1)
    assert not queues.locked
    check(module, writer.read(1))


def test_what_has_left_the_device_is_copied_at_once_behind_what_is_queued(queues):
    module = holder(here=torch.ones(3), there=torch.ones(2))
    writer = Writer(module)
    writer.write(1)
    vars(writer.buffers)["_devices"] = ()  # as if both had been on another one
    module.here = torch.zeros(3)
    writer.write(2)
    assert not queues.device.queue
    check(module, writer.read(2))
    assert writer.read(1)["here"].tolist() == [1, 1, 1]


def test_nothing_is_captured_in_a_graph(queues):
    module = nn.BatchNorm1d(3)
    writer = Writer(module)
    writer.write(1)
    queues.queue.is_open = False
    queues.queue.copied.clear()
    writer.write(2, is_commit=False)
    assert queues.queue.copied == []
    queues.clock.advance(1)
    assert writer.reader.record(2) is None
    check(module, writer.read(1))


def test_memory_is_given_back_when_the_device_is_done_with_it(queues, monkeypatch):
    writer = Writer(nn.BatchNorm1d(3))
    address = writer.page.memory[0]
    assert queues.locked == [address]
    writer.write(1)
    with monkeypatch.context() as child:
        child.setattr(stamped_copies.os, "getpid", lambda: 0)
        writer.copies.close()
    assert queues.device.queue
    assert queues.locked == [address]
    writer.copies.close()
    assert not queues.device.queue
    assert queues.locked == []
    writer.copies.close()


class Cudart:
    def __init__(self, result: int) -> None:
        self.result, self.calls = result, []

    def cudaHostRegister(self, *args: int) -> int:  # noqa: N802
        self.calls.append(args)
        return self.result

    def cudaHostUnregister(self, *args: int) -> None:  # noqa: N802
        self.calls.append(args)


def test_memory_is_locked_through_cuda_alone(monkeypatch):
    assert not page_lock.lock(4096, 64)
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    assert page_lock.lock(4096, 64)
    page_lock.unlock(4096)
    assert cudart.calls == [(4096, 64, 0), (4096,)]


def test_a_refused_lock_is_not_raised_by_what_runs_next(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(1))
    cleared = []

    def zeros(*_args: int, **_more: str) -> None:
        cleared.append(1)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    assert not page_lock.lock(4096, 64)
    assert cleared == [1]


class Stream:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def wait_event(self, event: object) -> None:
        self.calls.append(event)


class Event:
    def __init__(self, _device: object) -> None:
        self.stream: object = None

    def record(self, stream: object) -> None:
        self.stream = stream


def test_copies_stay_in_order_when_the_script_changes_its_stream(monkeypatch):
    one, two = Stream(), Stream()
    present, is_capturing = one, False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: present)
    monkeypatch.setattr(torch, "Event", Event)
    queue = stamped_copies.StreamQueue(torch.device("cpu"))
    target = torch.zeros(2)
    for _ in range(2):
        assert queue.begin()
        queue.run(lambda: target.fill_(1))
        queue.copy(target, lambda: torch.full((2,), 7.0))
        last = queue.end()
        assert last.stream is one
    assert target.tolist() == [7, 7]
    assert one.calls == []
    present = two
    assert queue.begin()
    assert two.calls == [last]
    assert queue.end().stream is two
    is_capturing = True
    assert not queue.begin()
