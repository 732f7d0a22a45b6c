"""Small values of a script: compared in microseconds, packed without pickle, put back in place."""

from __future__ import annotations

import ctypes
import json
import marshal
import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from worker_hooks.contract import script_record
from worker_hooks.contract.script_record import ScriptRecord
from worker_hooks.contract.status_page import Entry
from worker_hooks.rng.generators import stream_of
from worker_hooks.script import growing
from worker_hooks.script.growing import MAPPINGS, PLAIN
from worker_hooks.tensors import state_json
from worker_hooks.tensors.placements import is_distributed
from worker_hooks.tensors.tensor_bytes import entry_of, from_bytes, to_bytes

FIXED = growing.FIXED | {torch.dtype, torch.device}
"""Types whose values never change in place."""

LARGE_BYTES = 64 << 10  # a value is not looked into beyond this size
_LARGE_ITEMS = 8192
_TENSOR = 64  # as so many items: to look at one takes as long
LARGE_TENSORS = _LARGE_ITEMS // _TENSOR
_KIND = "$"  # beside state_json's kinds: values that are only bytes


class LargeValueError(ValueError):
    """The value is too large to be saved at each commit."""


class DistributedValueError(LargeValueError):
    """There is a DTensor in the value: its elements are with other ranks, which nobody asks."""


class Packed(NamedTuple):
    """A value as JSON and bytes."""

    text: str
    entries: tuple[Entry, ...]
    content: bytes

    @property
    def checksum(self) -> int:
        """A number that differs for different values."""
        return crc32(self.content, crc32(self.text.encode()))

    def tensors(self) -> dict[str, Tensor]:
        """The bytes by the entries' names."""
        return _tensors(self.entries, self.content)


def is_fixed(value: Any) -> bool:
    """Whether neither the value nor anything in it can change in place."""
    if type(value) is tuple and len(value) <= _LARGE_ITEMS:
        return all(map(is_fixed, value))
    return type(value) in FIXED


def is_of_graph(value: Any, depth: int = 3) -> bool:
    """Whether this is a container that holds parts of a step's graph, and nothing else.

    A hook collects activations in such a one, and the next step collects its own.

    Args:
        value: of any kind.
        depth: of containers in each other; a list may be in itself.
    """
    kind = type(value)
    if not depth or kind not in {list, tuple, deque, *MAPPINGS}:
        return False
    if not 0 < len(value) <= _LARGE_ITEMS:
        return False
    items = value.values() if kind in MAPPINGS else value
    return all(has_graph(e) if isinstance(e, Tensor) else is_of_graph(e, depth - 1) for e in items)


def has_graph(tensor: Tensor) -> bool:
    """Whether it was computed in a step, and is to be differentiated there."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view whose base was changed in place, as FSDP's parameters are
        return True


def mark(value: Any) -> Any:
    """What differs after the value was changed, in place or not; cheap.

    Raises:
        TypeError: the value is of no kind that can be saved.
        LargeValueError: it is too large to be compared.
    """
    kind = type(value)
    if kind in FIXED:
        return kind, value if kind is not float else value.hex()
    if isinstance(value, Tensor):
        count = 0 if value.is_inference() else value._version  # noqa: SLF001  the latter has none
        return id(value), count, _tensor_bytes(value)
    if kind in {list, tuple, set, frozenset, deque, bytearray, *MAPPINGS}:
        if len(value) > _LARGE_ITEMS:
            raise LargeValueError(f"{len(value)} items")
        plain = dict(value) if kind in MAPPINGS else list(value) if kind is deque else value
        try:
            content = marshal.dumps(plain, PLAIN)
        except ValueError:  # something in it is no plain value, a tensor for example
            return _mark_of_items(value)
        if len(content) > LARGE_BYTES:
            raise LargeValueError(f"{len(content)} bytes")
        return kind, content
    if is_array(value) and value.dtype != object:
        if value.nbytes > LARGE_BYTES:
            raise LargeValueError(f"{value.nbytes} bytes")
        return kind, value.dtype.str, value.shape, value.tobytes()
    return kind, _packed_whole(value)


def _packed_whole(value: Any) -> Packed:
    packed = pack(value, "value")
    if len(packed.text) > 2 * LARGE_BYTES:
        raise LargeValueError(f"{len(packed.text)} characters")
    return packed


def _mark_of_items(value: Any) -> Any:
    """As :func:`mark`, of a container that holds more than plain values."""
    size, count, found, waiting = 0, 0, list[Any](), [value]
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind in {list, tuple, set, frozenset, deque}:
            found += kind, len(each)
            waiting += each
        elif kind in MAPPINGS:
            if not FIXED.issuperset(map(type, each)):
                return type(value), _packed_whole(value)
            found += kind, *each
            waiting += each.values()
        else:
            found.append(mark(each))
            if isinstance(each, Tensor):
                size, count = size + each.nbytes, count + _TENSOR
                if size > LARGE_BYTES:
                    raise LargeValueError(f"{size} bytes and more")
                if count > _LARGE_ITEMS:
                    raise LargeValueError(f"more than {LARGE_TENSORS} tensors")
    return found


def check(value: Any, excluded: Collection[int] = ()) -> None:
    """Look into a value before it is compared for the first time.

    Raises:
        TypeError: it refers to parameters, or to what is saved otherwise.
        LargeValueError: it has very many items.
    """
    waiting, count = [value], 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            if id(each) in excluded or (each.requires_grad and each.is_leaf):
                raise TypeError("it refers to parameters")
            count += _TENSOR
        elif isinstance(each, list | tuple | dict | set | frozenset | deque):
            count += len(each)
            waiting += each.values() if isinstance(each, dict) else each
        if count > _LARGE_ITEMS:
            raise LargeValueError(f"more than {_LARGE_ITEMS} items, or {LARGE_TENSORS} tensors")


def check_own(value: Any, name: str) -> None:
    """Refuse what cannot be saved as a script's own value.

    Raises:
        TypeError: it is of another kind.
        ValueError: it is too large.
    """
    if is_generator(value):
        return
    try:
        check(value)
        pack(value, name)
        mark(value)
    except LargeValueError as error:
        raise ValueError(f"{name} has {error}: at most {LARGE_BYTES >> 10} KiB are saved") from None


def is_plain_object(value: Any) -> bool:
    """Whether this has attributes, and is neither code nor torch's."""
    code = (type, ModuleType, FunctionType, torch.nn.Module, torch.optim.Optimizer, Tensor)
    return hasattr(value, "__dict__") and not isinstance(value, code)


def is_generator(value: Any) -> bool:
    """Whether this is a random number generator, which is saved with the loader's."""
    return stream_of(value) is not None


def is_floats(value: Any) -> bool:
    """Whether this is a list of floats, or a deque."""
    return type(value) in {list, deque} and set(map(type, value)) == {float}


def pack(value: Any, name: str) -> Packed:
    """A value as JSON and bytes.

    Raises:
        TypeError: it cannot be saved; the message names it.
        LargeValueError: it is too large.
    """
    kind = type(value)
    if kind in FIXED and kind is not bytes:
        return Packed(state_json.dumps(state_json.encode(value, name)[0]), (), b"")
    if is_floats(value):
        return _packed_floats(value, name)
    if isinstance(value, Tensor):
        entry_of(name, value)  # raises if it cannot be saved, or, next, if it is large
        _tensor_bytes(value)
    found, tensors = state_json.encode(value, name)
    if sum(tensor.nbytes for tensor in tensors.values()) > LARGE_BYTES:
        raise LargeValueError(f"{name} has large tensors")
    entries = tuple(entry_of(each, tensor) for each, tensor in tensors.items())
    return Packed(
        state_json.dumps(found), entries, b"".join(bytes(to_bytes(t)) for t in tensors.values())
    )


def is_array(value: object) -> bool:
    """Whether it is an array of numpy, which is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def unpack(text: Any, tensors: Mapping[str, Tensor], now: Any) -> Any:
    """The value that :func:`pack` took apart, in the present object where it can be changed.

    ``tensors``: the bytes, by the entries' names.

    Raises:
        ValueError: this is no packed value.
    """
    if isinstance(text, dict) and text.get(_KIND) == "floats":
        floats = tensors[text["v"]].tolist()
        return _in_place(deque(floats, text["maxlen"]) if text["of"] == "deque" else floats, now)
    return _in_place(state_json.decode(text, tensors), now)


def _in_place(new: Any, now: Any) -> Any:
    """Other names may refer to the present object, so it is changed rather than replaced."""
    kind = type(new)
    if kind is not type(now):
        return new
    if isinstance(now, Tensor):
        if (now.shape, now.dtype) != (new.shape, new.dtype) or now.is_inference():
            return new
        if now.requires_grad and not now.is_leaf:
            return new
        with torch.no_grad():
            now.copy_(new)
        return now
    if kind is list or kind is bytearray:
        now[:] = new
        return now
    if kind is deque and now.maxlen == new.maxlen:
        now.clear()
        now.extend(new)
        return now
    if hasattr(kind, "clear") and hasattr(kind, "update"):  # dicts and sets
        now.clear()
        now.update(new)
        return now
    if is_array(now) and now.flags.writeable and (now.shape, now.dtype) == (new.shape, new.dtype):
        now[...] = new
        return now
    return new


def _packed_floats(value: list[float] | deque[float], name: str) -> Packed:
    content = array("d", value).tobytes()
    found = {
        _KIND: "floats",
        "v": name,
        "of": type(value).__name__,
        "maxlen": value.maxlen if isinstance(value, deque) else None,
    }
    return Packed(json.dumps(found), (Entry(name, "F64", (len(value),), len(content)),), content)


def _tensors(entries: Iterable[Entry], content: bytes) -> dict[str, Tensor]:
    found, at = {}, 0
    for entry in entries:
        found[entry.name] = from_bytes(entry, content[at : at + entry.nbytes])
        at += entry.nbytes
    return found


def _tensor_bytes(tensor: Tensor) -> bytes:
    """What version counters do not see is seen in a small tensor of host memory."""
    if is_distributed(tensor):
        raise DistributedValueError("a DTensor")
    if tensor.nbytes > LARGE_BYTES:
        raise LargeValueError(f"{tensor.nbytes} bytes")
    if not tensor.is_cpu:
        return b""
    if type(tensor) is Tensor and tensor.is_contiguous() and not tensor.is_neg():  # faster
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    entry_of("value", tensor)  # raises if it has no memory of its own
    return bytes(to_bytes(tensor))


class Script(NamedTuple):
    """A script's values as they were saved, and their tensors by the entries' names."""

    record: ScriptRecord
    tensors: dict[str, Tensor]

    @staticmethod
    def split(octets: bytes) -> Script:
        """What :func:`join` joined.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        record = script_record.split(octets)
        return Script(record, _tensors(record.entries, record.content))


def join(
    packed: Mapping[str, Packed],
    was: Mapping[str, int],
    late: Collection[str] = (),
    *,
    printed: Collection[str] = (),
    is_settled: bool = False,
) -> bytes:
    """Values as one piece of bytes; the arguments are as in :class:`ScriptRecord`."""
    return script_record.join(
        {name: each.text for name, each in packed.items()},
        [entry for each in packed.values() for entry in each.entries],
        b"".join([each.content for each in packed.values()]),
        was=was,
        now={name: packed[name].checksum for name in late if name in packed},
        late=late,
        printed=printed,
        is_settled=is_settled,
    )
