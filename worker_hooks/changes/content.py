"""The content of tensors: compared bit by bit, or as a number that differs if it was changed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from worker_hooks.tensors.fast_digest import FastDigest
from worker_hooks.tensors.reader import Reader
from worker_hooks.tensors.tensor_bytes import plain, to_bytes, view

WINDOW = 64 << 10  # bytes of one tensor that a sample looks at

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> int | str:
    """Of all of it. A tensor on an accelerator is summed up there, and its sum is waited for."""
    bare = plain(tensor)
    if bare.device.type != "cpu":
        words = _dense(bare).view(_BITS.get(bare.itemsize, torch.uint8))
        return int(words.sum(dtype=torch.int64).item())
    found = FastDigest([bare.nbytes])
    for piece in Reader().pieces(bare):
        found.add(piece)
    return found.digest("")


def sample(tensor: Tensor, place: float) -> int:
    """Of at most 64 KiB of it.

    Args:
        tensor: is read where it lies; the part on an accelerator is waited for.
        place: where the part is in the tensor, from 0 to below 1.
    """
    bare = plain(tensor)
    if bare.nbytes <= WINDOW:
        part = bare
    else:
        flat, count = _dense(bare), WINDOW // bare.itemsize
        start = int(place * (flat.numel() - count))
        part = flat[start : start + count]
    is_ready = part.device.type == "cpu" and part.is_contiguous()
    resolved = is_ready and not (part.is_conj() or part.is_neg())
    return zlib.crc32(view(part) if resolved else to_bytes(part))


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one kind have the same bits."""
    one, other = plain(one), plain(other)
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    bits = _BITS.get(one.itemsize)
    if bits is None or one.is_conj() or one.is_neg():
        return bytes(to_bytes(one)) == bytes(to_bytes(other))
    return torch.equal(one.view(bits), other.view(bits))


def nbytes(tensors: Iterable[Tensor]) -> int:
    """How large they are in all."""
    return sum(each.nbytes for each in tensors)


def _dense(tensor: Tensor) -> Tensor:
    """All elements in one dimension, in the order of memory; a copy if something lies between."""
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).reshape(-1)
