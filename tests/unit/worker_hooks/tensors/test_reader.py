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
