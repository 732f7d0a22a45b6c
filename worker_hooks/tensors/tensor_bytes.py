"""A tensor's bytes: the name of their type, their address, and a tensor made of them.

Bytes are in the order of the elements, the last dimension fastest.
"""

from __future__ import annotations

import ctypes
import math

import torch

from worker_hooks.contract.status_page import Entry
from worker_hooks.storage.safetensors_file import BITS

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C32": torch.complex32,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4_E2M1X2": torch.float4_e2m1fn_x2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type in :data:`worker_hooks.storage.safetensors_file.BITS`.

    Raises:
        TypeError: elements of this type cannot be saved.
    """
    if dtype not in _NAMES:
        raise TypeError(f"elements of type {dtype} cannot be saved")
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The element type of this name.

    Raises:
        TypeError: torch has none.
    """
    if name not in _DTYPES:
        raise TypeError(f"torch has no type for elements of type {name}")
    return _DTYPES[name]


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """Name, type, shape and size of a tensor.

    Raises:
        TypeError: the tensor has no plain bytes (sparse, quantized, nested, DTensor, meta, not
            initialized), or elements that cannot be saved; the message names it.
    """
    kind = why_not_plain(tensor)
    if kind:
        raise TypeError(f"tensor {name!r} cannot be saved: it is {kind}")
    try:
        dtype = dtype_name(tensor.dtype)
    except TypeError as error:
        raise TypeError(f"tensor {name!r} cannot be saved: {error}") from None
    shape = tuple(tensor.shape)
    return Entry(name, dtype, shape, math.prod(shape) * BITS[dtype] // 8)


def why_not_plain(tensor: torch.Tensor) -> str | None:
    """Why a tensor is no plain array of elements in memory; ``None``: it is one."""
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialized yet"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, which keeps its elements elsewhere"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return f"not strided but {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type == "meta":
        return "on the meta device, without elements"
    return None


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """All bytes of a small tensor: its own memory if it is contiguous there, else a copy."""
    return view(plain(tensor).cpu().resolve_conj().resolve_neg().contiguous())


def from_bytes(entry: Entry, content: bytes | bytearray | memoryview) -> torch.Tensor:
    """A new tensor of these bytes.

    Raises:
        TypeError: torch has no such element type.
        ValueError: the bytes are too few or too many.
    """
    tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
    if len(content) != tensor.nbytes:
        raise ValueError(f"{entry} cannot be made of {len(content)} bytes")
    if tensor.nbytes:
        view(tensor)[:] = content
    return tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, without autograd history and without a subclass's behaviour."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  torch has no public one
        return tensor.detach().as_subclass(torch.Tensor)


def view(tensor: torch.Tensor, owner: object = None) -> memoryview:
    """The memory of a contiguous tensor in host memory; it keeps ``owner`` or the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor if owner is None else owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
