"""Tensors' bytes in order, piece by piece, with little memory."""

from mmap import mmap

import pytest
import torch
from support.tensors import bits, layouts, noise

from worker_hooks.storage.checksum import BLOCK
from worker_hooks.tensors import reader
from worker_hooks.tensors.reader import PIECE, Reader

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_no_piece_is_large():
    for name, tensor in layouts().items():
        sizes = [len(piece) for piece in Reader().pieces(tensor)]
        assert sum(sizes) == tensor.nbytes
        assert max(sizes) <= PIECE == BLOCK
        assert len(sizes) <= 1 + 2 * tensor.nbytes // PIECE, name


def test_a_tensor_in_order_is_not_copied():
    tensor = torch.zeros(3, 1000)
    (piece,) = Reader().pieces(tensor)
    tensor[0, 0] = 1
    assert bytes(piece) == bits(tensor)[2]


def test_buffers_for_copies_are_used_again(monkeypatch):
    made = []
    monkeypatch.setattr(reader.mmap, "mmap", lambda *args: made.append(mmap(*args)) or made[-1])
    tensor = noise((3000, 5000), torch.float32)
    read = Reader()
    wanted = bits(tensor.t())[2]
    assert b"".join(map(bytes, read.pieces(tensor.t()))) == wanted
    assert len(made) <= 2
    held = list(read.pieces(tensor.t()))  # nobody writes over what is still looked at
    assert b"".join(held) == wanted
    assert len(made) >= len(wanted) // PIECE
    made.clear()
    del held
    assert b"".join(map(bytes, read.pieces(tensor.t()))) == wanted
    assert made == []
    small = list(Reader().pieces(tensor[:2].t())) + [
        each for n in range(99) for each in read.pieces(tensor[n:, 0])
    ]
    assert len(small) == 100
    assert len(made) <= 1


class Far(torch.Tensor):
    """Of a device whose only ability is to copy memory in its order."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return torch.device("cuda", 0)

    def contiguous(self, **_):
        raise AssertionError("memory of the device is allocated")


DENSE = {
    "channels last": noise((4, 3, 5, 6), torch.float32).to(memory_format=torch.channels_last),
    "transposed": noise((7, 9), torch.float16).t(),
    "permuted": noise((2, 3, 4, 5), torch.float64).permute(2, 0, 3, 1),
    "sizes of one": noise((1, 4, 1, 3), torch.float32).permute(3, 0, 1, 2),
    "part of another": noise((8, 5), torch.float32)[2:6].t(),
    "of several pieces": noise((1500, 1200), torch.float32).t(),
    "of several pieces, permuted": noise((30, 200, 400), torch.float32).permute(2, 0, 1),
    "one channel": noise((1, 3, 700, 700), torch.float32).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_device_gives_its_memory_as_it_lies_there(name, monkeypatch):
    monkeypatch.setattr(reader, "plain", lambda tensor: tensor)  # it would make it the host's
    tensor = DENSE[name]
    memory = reader.in_memory_order(tensor)
    assert memory.data_ptr() == tensor.data_ptr()
    assert memory.is_contiguous() and memory.numel() == tensor.numel()
    assert b"".join(Reader().pieces(tensor.as_subclass(Far))) == bits(tensor)[2]


@pytest.mark.parametrize(
    "tensor",
    [
        noise((4, 4), torch.float32),  # in order
        noise((4, 4), torch.float32)[:, :2].t(),  # gaps
        torch.zeros(3).expand(4, 3),  # one memory for several elements
        noise((3, 4), torch.complex64).t().conj(),
        noise((3, 4), torch.complex64).conj().imag.t(),
        torch.zeros(2, 0, 3).permute(2, 0, 1),
    ],
)
def test_what_does_not_lie_there_as_a_whole_is_left_to_the_device(tensor):
    assert reader.in_memory_order(tensor) is None
