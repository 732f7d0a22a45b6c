"""Nested state as JSON and tensors, and back without loss: no pickle, no code from a file.

Plain JSON stands for itself. Everything else is an object ``{"$": kind, ...}`` from a closed table,
so a file cannot name a type that is not in the table. Tensors are taken out, and named by their
path.
"""

from __future__ import annotations

import binascii
import ctypes
import json
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from worker_hooks.tensors.placements import (
    Box,
    SavedPart,
    SavedPlacements,
    is_distributed,
    part_of,
    save_placements,
)
from worker_hooks.tensors.tensor_bytes import entry_of

Json = Any
"""What :func:`json.dumps` takes: None, bool, int, float, str, list, dict."""

_KIND = "$"
_DEEP = 100  # levels; a structure that contains itself fails here
_PLAIN_INT = 1 << 63  # hexadecimal beyond it: Python limits the decimal digits that it parses
_INLINE_BYTES = 4096  # of a numpy array; a larger one becomes a tensor of bytes
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, int, float, dict, set, str, tuple, bool)
}
_MAPPINGS: dict[str, Any] = {"ordered": OrderedDict, "counter": Counter, "default": defaultdict}
_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "size": torch.Size,
    "range": range,
    "slice": slice,
}
_KINDS = {kind: name for name, kind in (_MAPPINGS | _SEQUENCES).items()}
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_NUMERIC = re.compile(r"[<>|=]?[biufc]\d{1,2}")  # numpy's names for numeric dtypes


def dumps(value: Json) -> str:
    """An encoded value as text; equal on all ranks for equal state."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def encode(value: Any, path: str, *, takes_parts: bool = False) -> tuple[Json, dict[str, Tensor]]:
    """Take a value apart.

    Args:
        value: nested containers of the types in this module's table.
        path: the value's name, and the prefix of its tensors' names.
        takes_parts: of a distributed tensor, this rank's part stands for it; otherwise there may be
            none.

    Returns:
        What JSON can express, and the tensors by name; they are not copied.

    Raises:
        TypeError: something in it cannot be encoded; the message names its path.
    """
    encoder = _Encoder(takes_parts=takes_parts)
    return encoder.encode(value, path), encoder.tensors


class _Encoder:
    def __init__(self, *, takes_parts: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._takes_parts = takes_parts
        self._depth = 0
        self._is_unordered = False  # inside a set or a key: tensors are not allowed there

    def encode(self, value: Any, path: str) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < _PLAIN_INT else {_KIND: "int", "v": hex(value)}
        if kind is float:
            return _float(value)
        if self._depth >= _DEEP:
            raise TypeError(f"{path:.200}... is nested too deep, or contains itself")
        self._depth += 1
        try:
            return self._nested(value, kind, path)
        finally:
            self._depth -= 1

    def _nested(self, value: Any, kind: type, path: str) -> Json:
        if kind is list:
            return self._items(value, path)
        if kind is dict and _KIND not in value and all(type(key) is str for key in value):
            return {key: self.encode(each, f"{path}.{key}") for key, each in value.items()}
        if kind is dict:
            return {_KIND: "dict", "v": self._pairs(value, path)}
        if kind in _MAPPINGS.values():
            factory = {"of": _factory(value, path)} if kind is defaultdict else {}
            return {_KIND: _KINDS[kind], "v": self._pairs(value, path), **factory}
        if kind in {set, frozenset}:
            encoded = [self._unordered(each, f"{path}.{{}}") for each in value]
            return {_KIND: _KINDS[kind], "v": sorted(encoded, key=dumps)}
        if kind is deque:
            return {_KIND: "deque", "v": self._items(value, path), "maxlen": value.maxlen}
        if kind in {range, slice}:
            parts = (value.start, value.stop, value.step)
            return {_KIND: _KINDS[kind], "v": self._items(parts, path)}
        if kind in _KINDS:
            return {_KIND: _KINDS[kind], "v": self._items(value, path)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        return self._leaf(value, kind, path)

    def _leaf(self, value: Any, kind: type, path: str) -> Json:
        if kind is complex:
            return {_KIND: "complex", "v": [_float(value.real), _float(value.imag)]}
        if kind in {bytes, bytearray}:
            return {_KIND: kind.__name__, "v": _text(value)}
        if kind is torch.dtype:
            return {_KIND: "dtype", "v": str(value)}
        if kind is torch.device:
            return {_KIND: "device", "v": str(value)}
        numpy = sys.modules.get("numpy")  # without numpy there is no value of numpy
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return self._numpy(numpy, value, path)
        name = kind.__qualname__
        raise TypeError(f"{path} is {_article(name)} {name}: that cannot be saved without pickle")

    def _items(self, values: Iterable[Any], path: str) -> list[Json]:
        return [self.encode(each, f"{path}.{index}") for index, each in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Json]:
        return [
            [self._unordered(key, path), self.encode(each, f"{path}.{key}")]
            for key, each in value.items()
        ]

    def _unordered(self, value: Any, path: str) -> Json:
        before, self._is_unordered = self._is_unordered, True
        try:
            return self.encode(value, path)
        finally:
            self._is_unordered = before

    def _tensor(self, tensor: Tensor, path: str) -> Json:
        if self._takes_parts and is_distributed(tensor):
            part = self._tensor(part_of(tensor), path)
            return {_KIND: "part", "v": part, "of": list(save_placements(path, tensor))}
        entry_of(path, tensor)  # raises if the tensor has no plain bytes
        if self._is_unordered:
            raise TypeError(f"{path} has a tensor in a set or as a key: that cannot be saved")
        name, number = path, 1
        while name in self.tensors:  # keys 1 and "1", or "a.b" beside "a" with "b" in it
            number += 1
            name = f"{path}#{number}"
        if tensor.requires_grad:  # else the same object: who changes its data changes it here
            tensor = tensor.detach()
        self.tensors[name] = tensor = tensor.resolve_conj().resolve_neg()
        encoded: dict[str, Json] = {_KIND: "tensor", "v": name}
        if tensor.device.type != "cpu":
            encoded["device"] = tensor.device.type  # not its index, which differs between ranks
        if not tensor.is_contiguous() and _is_dense(tensor):
            encoded["strides"] = list(tensor.stride())
        return encoded

    def _numpy(self, numpy: Any, value: Any, path: str) -> Json:
        if not _NUMERIC.fullmatch(value.dtype.str):
            raise TypeError(f"{path} is a numpy {value.dtype}: only numbers can be saved")
        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            raise TypeError(f"{path} is a numpy {type(value).__qualname__}: that cannot be saved")
        is_array = isinstance(value, numpy.ndarray)
        encoded = {_KIND: "ndarray" if is_array else "number", "dtype": value.dtype.str}
        if is_array:
            encoded["shape"] = list(value.shape)
        raw = value.tobytes()
        if len(raw) <= _INLINE_BYTES:
            return encoded | {"v": _text(raw)}
        array = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return encoded | {"v": self._tensor(array, path)}


def decode(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Put together what :func:`encode` took apart.

    Tensors come from ``tensors``, with the strides that they had, and on the kind of device that
    they were on, if this host has one. A part of a distributed tensor becomes a
    :class:`~worker_hooks.tensors.placements.SavedPart`.

    Raises:
        ValueError: this is no encoded value, or a tensor is missing.
    """
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(each, tensors) for key, each in value.items()}
    try:
        if kind == "tensor":
            return _placed(tensors[value["v"]], value)
        if kind in {"ndarray", "number"}:
            return _numpy_value(value, tensors)
        if kind in _LEAVES:
            return _LEAVES[kind](value["v"])
        return _container(kind, decode(value["v"], tensors), value)
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise ValueError(f"{dumps(value):.80} cannot be decoded: {error!r}") from error


def _container(kind: str, inner: Any, encoded: Mapping[str, Json]) -> Any:
    match kind:
        case "complex":
            return complex(*inner)
        case "dict":
            return dict(inner)
        case "part":
            return SavedPart(inner, SavedPlacements(*encoded["of"]))
        case "deque":
            return deque(inner, encoded["maxlen"])
        case "default":
            factory = encoded["of"]
            return defaultdict(None if factory is None else _FACTORIES[factory], inner)
        case "ordered" | "counter":
            return _MAPPINGS[kind](dict(inner))
        case "range" | "slice":
            return _SEQUENCES[kind](*inner)
    return _SEQUENCES[kind](inner)


def pack(tensor: Tensor) -> tuple[str, list[int], str]:
    """A small tensor as JSON: type, shape, bytes."""
    raw = tensor.detach().cpu().contiguous()
    octets = ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.nbytes else b""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _text(octets)


def unpack(dtype: str, shape: list[int], text: str) -> Tensor:
    """The tensor that :func:`pack` took."""
    octets, kind = bytearray(_bytes(text)), getattr(torch, dtype)
    return (
        torch.frombuffer(octets, dtype=kind).reshape(shape)
        if octets
        else torch.empty(shape, dtype=kind)
    )


def names_in(value: Json) -> set[str]:
    """The names of all tensors in an encoded value."""
    if isinstance(value, list):
        return set().union(*(names_in(each) for each in value))
    if not isinstance(value, dict):
        return set()
    if value.get(_KIND) == "tensor":
        return {value["v"]}
    return set().union(*(names_in(each) for each in value.values()))


def boxes_in(value: Json) -> dict[str, Box]:
    """Which parts of distributed tensors an encoded value names, by their names."""
    if isinstance(value, list):
        nested: Iterable[Json] = value
    elif not isinstance(value, dict):
        return {}
    elif value.get(_KIND) == "part":
        whole, offset, size = map(tuple, value["of"][:3])
        return {value["v"]["v"]: Box(whole, offset, size)}
    else:
        nested = value.values()
    return {name: box for each in nested for name, box in boxes_in(each).items()}


def with_places(
    value: Json, place_of: Callable[[str, SavedPlacements | None], SavedPlacements | None]
) -> Json:
    """The same with other parts of distributed tensors.

    Args:
        place_of: given a tensor's name and which part of it is named (``None``: it is whole),
            returns which one is to be.
    """
    if isinstance(value, list):
        return [with_places(each, place_of) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind not in {"part", "tensor"}:
        return {key: with_places(each, place_of) for key, each in value.items()}
    tensor = value["v"] if kind == "part" else value
    was = SavedPlacements(*value["of"]) if kind == "part" else None
    place = place_of(tensor["v"], was)
    return tensor if place is None else {_KIND: "part", "v": tensor, "of": list(place)}


def without_places(value: Json) -> Json:
    """The same without what differs between ranks that hold parts of one distributed tensor."""
    if isinstance(value, list):
        return [without_places(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get(_KIND) == "part":
        return value["v"]
    return {key: without_places(each) for key, each in value.items()}


def _float(value: float) -> Json:
    if value - value == 0:  # neither infinite nor NaN: its repr is exact
        return value
    return {_KIND: "float", "v": struct.pack(">d", value).hex()}


def _text(raw: bytes | bytearray) -> str:
    return binascii.b2a_base64(raw, newline=False).decode()


def _bytes(text: str) -> bytes:
    return binascii.a2b_base64(text, strict_mode=True)


_LEAVES: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "bytes": _bytes,
    "bytearray": lambda text: bytearray(_bytes(text)),
    "dtype": lambda text: _DTYPES[text],
    "device": torch.device,
}


def _factory(value: defaultdict[Any, Any], path: str) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", repr(factory))
    if _FACTORIES.get(name) is not factory:
        raise TypeError(f"{path} is a defaultdict of {name}: that cannot be saved without pickle")
    return str(name)


def _article(name: str) -> str:
    return "an" if name[:1].lower() in "aeiou" else "a"


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


def _placed(tensor: Tensor, encoded: Mapping[str, Any]) -> Tensor:
    accelerator = torch.accelerator.current_accelerator() if "device" in encoded else None
    if accelerator is not None and accelerator.type == encoded["device"]:
        tensor = tensor.to(accelerator.type)
    if "strides" in encoded:
        laid_out = torch.empty_strided(
            tensor.shape, encoded["strides"], dtype=tensor.dtype, device=tensor.device
        )
        tensor = laid_out.copy_(tensor)
    return tensor


def _numpy_value(encoded: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    import numpy  # noqa: ICN001  slow, and rarely needed

    name = encoded["dtype"]
    if not _NUMERIC.fullmatch(name):
        raise ValueError(f"{name!r} is no numeric dtype")
    held = encoded["v"]
    raw = _bytes(held) if isinstance(held, str) else decode(held, tensors).numpy().tobytes()
    array = numpy.frombuffer(bytearray(raw), dtype=numpy.dtype(name))
    return array.reshape(encoded["shape"]) if encoded[_KIND] == "ndarray" else array[0]
