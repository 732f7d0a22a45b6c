"""The address of the state in torch's CPU generators, to read it without a call into torch.

``Generator.get_state()`` makes a tensor of 5 kB for a state of half the size: 20 us in a training
step, whose data have emptied the processor's caches. The state is a C++ object in memory
(ATen/core/MT19937RNGEngine.h, ATen/CPUGeneratorImpl.h). Its offset is found once in a process, with
a generator of our own, by comparing memory with what ``get_state`` returns in several states. If
that fails, with another version of torch, ``get_state`` is used.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch

_WORDS = 624
_ENGINE = struct.Struct(f"<QiB3xI{_WORDS}I4x")  # seed, words left, is seeded, next word, words
_SPARES = struct.Struct("<fB3xdB7x")  # spare normal numbers, and whether there are any
_SEED_BYTES = 13  # three bytes of padding follow
_NEXT_AT, _NEXT_BYTES = 16, 4 * (1 + _WORDS)
_HAS_SINGLE, _HAS_DOUBLE = 4, 16  # offsets in _SPARES
_NORMALS = struct.Struct("<fBdB")
_PACKED = struct.Struct(f"<QiBI{_WORDS}IfBdB")  # the same without padding
_SPARES_AT = _SEED_BYTES + _NEXT_BYTES  # offset in _PACKED
_PUBLIC = struct.Struct(f"<QiiQ{_WORDS}QdddixxxxfB3x")  # get_state of CPUGeneratorImpl.cpp
_POINTER = object.__basicsize__  # offset in the Python object of the pointer to the C++ object
_FAR = 160  # the engine's offset in its generator is smaller
_PROBED = 64  # bytes: seed, place and some words
NBYTES = _PACKED.size


def address_of(generator: torch.Generator) -> int | None:
    """The address of a generator's state; ``None``: use ``get_state``."""
    offset = _offset() if generator.device.type == "cpu" else None
    return None if offset is None else _impl(generator) + offset


def writer(found: int, address: int) -> Callable[[], None]:
    """A function that writes the ``NBYTES`` of the state at ``found`` to ``address``."""
    seed, following = memory(address, _SEED_BYTES), memory(address + _SEED_BYTES, _NEXT_BYTES)
    seed_now, following_now = memory(found, _SEED_BYTES), memory(found + _NEXT_AT, _NEXT_BYTES)
    spares = memory(address + _SPARES_AT, _NORMALS.size)
    spares_now = memory(found + _ENGINE.size, _SPARES.size)
    is_clear = False

    def write() -> None:
        nonlocal is_clear
        seed[:] = seed_now
        following[:] = following_now
        if is_clear and not spares_now[_HAS_SINGLE] and not spares_now[_HAS_DOUBLE]:
            return
        single, has_single, double, has_double = _SPARES.unpack(spares_now)
        is_clear = not has_single and not has_double
        single, double = has_single and single, has_double and double
        spares[:] = _NORMALS.pack(single, has_single, double, has_double)

    return write


def probes(found: int) -> tuple[Callable[[], object], ...]:
    """Functions whose results differ whenever the state at ``found`` has changed.

    All words change at once, and other draws change the place or the spare numbers.
    """
    return memory(found, _PROBED).tobytes, memory(found + _ENGINE.size, _SPARES.size).tobytes


def public(state: bytes | memoryview) -> bytes:
    """What ``get_state`` returns for the state in these ``NBYTES``.

    Raises:
        ValueError: the count of bytes is another.
    """
    if len(state) != NBYTES:
        raise ValueError(f"{len(state)} bytes instead of {NBYTES}")
    seed, left, is_seeded, *words, single, has_single, double, has_double = _PACKED.unpack(state)
    spares = (0.0, double, 0.0, has_double, single, has_single)
    return _PUBLIC.pack(seed, left, is_seeded, *words, *spares)


def memory(address: int, nbytes: int) -> memoryview:
    """The bytes at an address; nothing checks that the address stays valid."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _impl(generator: torch.Generator) -> int:
    return ctypes.c_size_t.from_address(id(generator) + _POINTER).value


@cache
def _offset() -> int | None:
    if torch.Generator.__basicsize__ < _POINTER + ctypes.sizeof(ctypes.c_size_t):
        return None
    scratch = torch.Generator()
    offsets = set(range(0, _FAR, 8))
    for seed, singles, doubles in ((2, 0, 0), (1 << 40, 5, 0), (3, 700, 3), (4, 0, 1), (5, 1, 2)):
        scratch.manual_seed(seed)
        torch.randn(singles, generator=scratch)
        torch.randn(doubles, generator=scratch, dtype=torch.float64)
        said = bytes(scratch.get_state().tolist())
        if len(said) != _PUBLIC.size:
            return None
        wanted = _PUBLIC.unpack(said)  # without the padding
        offsets = {at for at in offsets if _read(_impl(scratch) + at) == wanted}
    return offsets.pop() if len(offsets) == 1 else None


def _read(found: int) -> tuple[float, ...]:
    state = ctypes.create_string_buffer(NBYTES)
    writer(found, ctypes.addressof(state))()
    return _PUBLIC.unpack(public(state.raw))
