"""Tensors of every type, lying in every way, for tests of what saves them, and of what they saved."""

import json
from typing import NamedTuple

import torch
from safetensors import safe_open

from worker_hooks.storage.safetensors_file import read_header
from worker_hooks.storage.shard_file import GLOBAL_SHAPE, OFFSETS, SHARDING
from worker_hooks.tensors.tensor_bytes import to_bytes, torch_dtype


def is_copied(dtype):
    """Whether this torch copies such tensors at all: 2.9 made float4, but copies none."""
    try:
        torch.zeros(2, dtype=torch.uint8).view(dtype).clone()
    except NotImplementedError:
        return False
    return True


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.uint32,
    torch.int32,
    torch.float32,
    torch.uint64,
    torch.int64,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    *filter(is_copied, [torch.float4_e2m1fn_x2]),
]
OURS = {torch.complex32, torch.complex128, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}


def noise(shape, dtype, seed=0):
    """Every bit pattern, NaNs and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
    return (
        raw.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    )


def bits(tensor):
    tensor = tensor.contiguous()
    return tensor.dtype, tuple(tensor.shape), bytes(to_bytes(tensor))


def everything():
    found = {}
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 0), (5,), (2, 3, 4)):
            name = f"{str(dtype).removeprefix('torch.')}.{'x'.join(map(str, shape))}"
            found[name] = noise(shape, dtype, len(found))
    return found


def layouts():
    """Tensors whose elements are not in order, larger than a piece and smaller."""
    large, small = noise((1030, 2050), torch.float32), noise((6, 8), torch.complex64)
    return {
        "transposed": large.t(),
        "columns": large[:, ::3],
        "rows": large[5:1029],
        "step": large[::2],
        "expanded": noise((3, 1, 5), torch.int16).expand(3, 400_000, 5),
        "one wide": noise((1, 1, 2_500_000), torch.int8).expand(2, 1, 2_500_000).transpose(0, 2),
        "channels last": noise((16, 3, 200, 300), torch.bfloat16).to(
            memory_format=torch.channels_last
        ),
        "conjugated": small.conj(),
        "negated": small.conj().imag,
        "conjugated, in order": small.conj().reshape(-1),
        "parameter": torch.nn.Parameter(torch.ones(3, 3).t()),
        "flipped": small.t().flip(0)[1:],
    }


class StoredTensor(NamedTuple):
    """A tensor in a file, and where it begins in the whole tensor of ``global_shape``."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


def tensors_of(path):
    """The tensors of a file, one after the other; each is mapped until somebody changes it."""
    found = read_header(path)
    sharding = json.loads(found.metadata.get(SHARDING, "{}"))
    with safe_open(path, framework="pt") as file:
        for name, dtype, shape, _ in found.entries:
            elements = torch_dtype(dtype)
            tensor = file.get_tensor(name)
            if tensor.data_ptr() % elements.itemsize:
                tensor = tensor.clone()  # torch crashes on unaligned complex numbers
            place = sharding.get(name, {})
            offsets = tuple(place.get(OFFSETS, ()))[: len(shape)] or (0,) * len(shape)
            whole = tuple(place.get(GLOBAL_SHAPE, shape))
            yield StoredTensor(name, tensor.view(elements).reshape(shape), offsets, whole)
