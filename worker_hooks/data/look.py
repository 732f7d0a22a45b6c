"""Looks at objects of the script to see later whether they have changed, and what a batch holds.

A look is bounded: of large containers some items are looked at, of large tensors and arrays the
ends; what is no container, no number and no text counts by its identity. So it finds what changes
as a rule, and not everything; what it misses shows in the batches that are compared.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import types
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch

from worker_hooks.rng.generators import stream_of
from worker_hooks.rng.randomness import Randomness

MOST = 4000  # objects
_ITEMS = 64  # of a container, of a larger one spread over it
_END_BYTES = 32 << 10  # at either end of a tensor
_PLAIN = (str, bytes, int, float, complex, bool, type(None), range, torch.dtype, torch.device)

# what they hold is no part of what refers to them
_ALONE = (type, types.ModuleType, torch.Tensor, logging.Logger, logging.Handler, types.MethodType)
_CACHING = PurePath  # its slots remember what it was asked
_PLAIN_DIMENSIONS, _FEW = 3, 4  # items of a corner of more dimensions

_COLLECTS, _DRAWS = "collects", "draws"  # in tokens

Look = Mapping[str, object]  # what was found, by where


def look(roots: Mapping[str, object], ignored: Collection[int] = ()) -> Look:
    """What objects are now. ``ignored``: identities of objects that may change."""
    found: dict[str, object] = {}
    seen = set(ignored)
    waiting = deque(roots.items())
    while waiting and len(found) < MOST:
        name, thing = waiting.popleft()
        if isinstance(thing, _PLAIN):
            found[name] = thing if type(thing) in _PLAIN else (type(thing), id(thing))
            continue
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        try:
            found[name] = _token(thing)
            waiting.extend((name + place, each) for place, each in _parts(thing))
        except Exception:  # noqa: BLE001  an object may be anything
            found[name] = type(thing), id(thing)
    return found


def first_change(before: Look, now: Look) -> str:
    """Where something is not as it was; empty: nowhere."""
    if before == now:
        return ""
    names = [name for name in (*before, *now) if before.get(name, before) != now.get(name, now)]
    return min(names, key=len)


def with_opened(before: Look, now: Look) -> Look:
    """What was there before, and with it what has been opened since: it may not change any more.

    Many data sets open their file at the first use, in each worker. So an attribute that was not
    there, or ``None``, may have become an object, a tensor or an array; no number, which may count,
    no container, which may collect, and no generator, which draws.
    """
    new = [name for name in now if before.get(name) is None and _is_opened(now[name])]
    parts = tuple(f"{name}." for name in new)
    opened = {
        name: token
        for name, token in now.items()
        if name in new or (name not in before and name.startswith(parts))
    }
    return {**before, **opened}


def _is_opened(token: object) -> bool:
    return isinstance(token, tuple) and token[1] not in (_COLLECTS, _DRAWS)


def digest(batch: object) -> int:
    """Of what a batch holds; what cannot be read counts by its kind."""
    found = 0
    waiting: deque[object] = deque([batch])
    left = MOST
    while waiting and left:
        left -= 1
        thing = waiting.popleft()
        try:
            if isinstance(thing, str | bytes):
                text = f"{len(thing)} {thing[: 2 * _END_BYTES]!r}"
            elif isinstance(thing, _PLAIN):
                text = repr(thing)
            elif isinstance(thing, dict | list | tuple):
                text = f"{type(thing).__name__} {len(thing)}"
                waiting.extend(each for _, each in _items(thing))
            elif isinstance(thing, torch.Tensor) or _is_array(thing):
                text = repr(_content(thing))
            else:
                text = type(thing).__name__
                waiting.extend(vars(thing).values() if hasattr(thing, "__dict__") else ())
        except Exception:  # noqa: BLE001  an object may be anything
            text = type(thing).__name__
        found = zlib.crc32(text.encode(errors="replace"), found)
    return found


def generators(owners: Mapping[str, object]) -> frozenset[int]:
    """The identities of random number generators that are attributes of these."""
    found = set()
    for owner in owners.values():
        for each in getattr(owner, "__dict__", {}).values():
            if stream_of(each) is not None:
                found.add(id(each))
    return frozenset(found)


def _token(thing: Any) -> object:
    kind = type(thing)
    if isinstance(thing, bytearray):
        return kind, _COLLECTS, _content(thing)
    if isinstance(thing, dict | list | tuple | set | frozenset | deque):
        return kind, _COLLECTS, len(thing)
    if isinstance(thing, torch.Tensor):
        return kind, _content(thing), None if thing.is_inference() else thing._version  # noqa: SLF001
    if _is_array(thing):
        return kind, _content(thing)
    if (stream := stream_of(thing)) is not None:
        return kind, _DRAWS, zlib.crc32(Randomness({"": stream}).capture())
    return kind, id(thing)


def _parts(thing: Any) -> Iterator[tuple[str, object]]:
    if isinstance(thing, (*_ALONE, _CACHING)) or stream_of(thing) is not None:
        return
    if isinstance(thing, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            yield f".{name}", cell.cell_contents
        return
    if isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    if isinstance(thing, dict | list | tuple | deque):
        yield from _items(thing)
    attributes = getattr(thing, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", each) for name, each in list(attributes.items()))
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"}:
                yield f".{name}", getattr(thing, name, None)


def _items(thing: Any) -> Iterator[tuple[str, object]]:
    count = len(thing)
    step = max(1, count // _ITEMS)
    if isinstance(thing, dict):
        keys = list(thing)
        for key in (*keys[::step], *keys[-1:]):
            yield f"[{key!r:.40}]", thing[key]
        return
    for place in (*range(0, count, step), *range(max(count - 1, 0), count)):
        yield f"[{place}]", thing[place]


def _is_array(thing: object) -> bool:
    numpy = sys.modules.get("numpy")
    kind = getattr(numpy, "ndarray", None)
    return kind is not None and isinstance(thing, kind)


def _corner(dimensions: int) -> tuple[slice, ...]:
    return (slice(0, _ITEMS if dimensions <= _PLAIN_DIMENSIONS else _FEW),) * dimensions


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether all its elements are there: FSDP frees what views of gathered parameters lie in."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return False  # a tensor of others has none, or not all
    storage, ends = tensor.untyped_storage(), zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((count - 1) * stride for count, stride in ends) if tensor.numel() else 0
    needed = (tensor.storage_offset() + span) * tensor.itemsize
    return needed <= storage.nbytes() and (not span or storage.data_ptr() != 0)


def _content(thing: Any) -> tuple[object, ...]:
    """The shape, and a sum of both ends."""
    if isinstance(thing, bytearray):
        return len(thing), zlib.crc32(thing[:_END_BYTES]), zlib.crc32(thing[-_END_BYTES:])
    if isinstance(thing, torch.Tensor):
        shape = tuple(thing.shape), str(thing.dtype)
        if (
            thing.layout is not torch.strided
            or thing.device.type != "cpu"
            or not _has_memory(thing)
        ):
            return shape
        if thing.nbytes > 2 * _END_BYTES and not thing.is_contiguous():
            thing = thing[_corner(thing.ndim)]  # a copy of all could be too large
        flat = thing.detach().resolve_conj().resolve_neg().contiguous()
        address, nbytes = flat.data_ptr(), flat.nbytes
    else:
        shape = tuple(thing.shape), str(thing.dtype)
        if thing.dtype.hasobject:
            return (*shape, repr(thing.ravel()[:_ITEMS]))
        if thing.nbytes > 2 * _END_BYTES and not thing.flags.c_contiguous:
            thing = thing[_corner(thing.ndim)]
        flat = thing if thing.flags.c_contiguous else thing.copy()
        address, nbytes = flat.ctypes.data, flat.nbytes
    first = ctypes.string_at(address, min(nbytes, 2 * _END_BYTES))
    rest = min(max(nbytes - len(first), 0), _END_BYTES)
    last = ctypes.string_at(address + nbytes - rest, rest)
    return (*shape, zlib.crc32(first), zlib.crc32(last))
