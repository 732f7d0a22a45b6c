"""The state of one random number generator as bytes: read in about a microsecond, restored exactly.

The public functions that read numpy's and Python's generators build tuples of 624 numbers and take
longer than the rest of a commit. Both states are plain C arrays in memory. Their address is found
by comparing memory with what the public function returns. Where that fails, on another interpreter
for example, the public function is used. States are always restored by public functions.
"""

from __future__ import annotations

import _random
import ctypes
import json
import random
import struct
import sys
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from types import ModuleType
from typing import Any, Protocol

import torch

from worker_hooks.rng import torch_engine
from worker_hooks.rng.torch_engine import memory

_MT = struct.Struct("<625I")  # the 624 words of a Mersenne twister, and the next word's index
_GAUSS = struct.Struct("<i4xd")  # whether there is a spare normal number, and the number
_NO_GAUSS = _GAUSS.pack(0, 0.0)
_JSON_BYTES = 256
_MOST_JSON_BYTES = 16 << 10
_SPARE_BYTES = 64  # for the digits of what is no array
_SPAWNED = "spawned"
_COUNT = struct.Struct("<q")
_PROBED = 64  # bytes: a twister's index, and some of the words beside it
TWISTER_BYTES = _MT.size + _GAUSS.size

# Through PyDLL the call keeps the GIL: to release it for 300 ns, and to wait for it again while
# another thread computes, would make a commit last milliseconds.
copy = ctypes.pythonapi["memmove"]
"""Copy bytes: ``copy(to_address, from_address, nbytes)``."""
copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy.restype = None


Probes = tuple[Callable[[], object], ...]


class Stream(Protocol):
    """A random number generator."""

    @property
    def nbytes(self) -> int:
        """The size of its state; never changes."""

    def writer(self, address: int) -> Callable[[], None]:
        """A function that writes the ``nbytes`` of its state to this address; for every commit."""

    def probes(self) -> Probes:
        """Functions whose results differ whenever the state has changed; empty: there are none.

        To call them costs less than to copy the state. A twister changes all its words at once,
        and else its index, so the index and some words tell whether it has changed.
        """

    def restore(self, state: bytes) -> None:
        """Continue from a state that was written.

        Raises:
            ValueError: this is no state of such a generator.
        """


class TorchStream:
    """A ``torch.Generator`` on any device."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._at = torch_engine.address_of(generator)
        whole = torch_engine.NBYTES
        self.nbytes = generator.get_state().numel() if self._at is None else whole

    def writer(self, address: int) -> Callable[[], None]:
        """See :meth:`Stream.writer`."""
        if self._at is not None:
            return torch_engine.writer(self._at, address)
        get_state, nbytes = self._generator.get_state, self.nbytes

        def write() -> None:
            state = get_state()
            copy(address, state.data_ptr(), nbytes)

        return write

    def probes(self) -> Probes:
        """See :meth:`Stream.probes`."""
        return () if self._at is None else torch_engine.probes(self._at)

    def restore(self, state: bytes) -> None:
        """See :meth:`Stream.restore`."""
        try:
            if len(state) == torch_engine.NBYTES:
                state = torch_engine.public(state)
            self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        except RuntimeError as error:
            raise ValueError(f"no state of a torch generator: {error}") from error


class PythonStream:
    """A ``random.Random``, such as the one behind the functions of the module ``random``."""

    nbytes = TWISTER_BYTES

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._at = _python_state(source)

    def writer(self, address: int) -> Callable[[], None]:
        """See :meth:`Stream.writer`."""
        source: Any = self._source
        state, rest = memory(address, _MT.size), memory(address + _MT.size, _GAUSS.size)
        found = None if self._at is None else memory(self._at, _MT.size)
        written: Any = self  # neither a number nor None

        def write() -> None:
            nonlocal written
            state[:] = self._packed() if found is None else found
            gauss = source.gauss_next
            if gauss is not written:
                rest[:] = _NO_GAUSS if gauss is None else _GAUSS.pack(1, gauss)
                written = gauss

        return write

    def probes(self) -> Probes:
        """See :meth:`Stream.probes`."""
        if self._at is None:
            return ()
        return memory(self._at, _PROBED).tobytes, partial(getattr, self._source, "gauss_next")

    def restore(self, state: bytes) -> None:
        """See :meth:`Stream.restore`."""
        place, *words = _unpacked(state)
        has_gauss, gauss = _GAUSS.unpack_from(state, _MT.size)
        version = self._source.getstate()[0]
        self._source.setstate((version, (*words, place), gauss if has_gauss else None))

    def _packed(self) -> bytes:
        *words, place = self._source.getstate()[1]
        return _MT.pack(place, *words)


class NumpyStream:
    """A ``numpy.random.RandomState``, such as the one behind numpy's legacy functions."""

    nbytes = TWISTER_BYTES

    def __init__(self, source: Any) -> None:
        self._source = source
        self._bits = _twister(source)
        self._at = _numpy_state(source)
        self._gauss_at = _numpy_gauss(source)

    def writer(self, address: int) -> Callable[[], None]:
        """See :meth:`Stream.writer`. It writes zeros if another kind of generator was set."""
        source, bits = self._source, self._bits
        if not self._at or not self._gauss_at:
            return lambda: copy(address, self._packed(), self.nbytes)
        state, found = memory(address, _MT.size), memory(self._at, _MT.size)
        rest = memory(address + _MT.size, _GAUSS.size)
        found_rest = memory(self._gauss_at, _GAUSS.size)

        def write() -> None:
            if source._bit_generator is bits:  # noqa: SLF001  public in its .pxd
                state[:] = found
                rest[:] = found_rest
            else:
                copy(address, self._packed(), self.nbytes)

        return write

    def probes(self) -> Probes:
        """See :meth:`Stream.probes`."""
        if not self._at or not self._gauss_at:
            return ()
        return (
            memory(self._at + _MT.size - _PROBED, _PROBED).tobytes,
            memory(self._gauss_at, _GAUSS.size).tobytes,
            partial(getattr, self._source, "_bit_generator"),
        )

    def restore(self, state: bytes) -> None:
        """See :meth:`Stream.restore`."""
        *words, place = _unpacked(state)
        has_gauss, gauss = _GAUSS.unpack_from(state, _MT.size)
        if not any(words):
            raise ValueError("no state of an MT19937 generator of numpy")
        self._source.set_state(("MT19937", words, place, has_gauss, gauss))

    def _packed(self) -> bytes:
        state = self._source.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            return bytes(self.nbytes)
        words = _MT.pack(*map(int, state["state"]["key"]), state["state"]["pos"])
        return words + _GAUSS.pack(state["has_gauss"], state["gauss"])


class JsonStream:
    """A ``numpy.random.Generator``, as of ``default_rng``, and how many it has spawned."""

    def __init__(self, source: Any) -> None:
        """Take a generator.

        Raises:
            TypeError: its state is of an unknown kind.
            ValueError: its state has no room on the page.
        """
        self._bits = source.bit_generator
        self._seeds = Spawned(self._bits.seed_seq)
        # a number of an array has up to 20 digits
        room = len(_numbers({**self._bits.state, _SPAWNED: 0}, lambda each: [10**20] * len(each)))
        self.nbytes = max(_JSON_BYTES, room + _SPARE_BYTES)
        if self.nbytes > _MOST_JSON_BYTES:
            raise ValueError("the state is too large")

    def writer(self, address: int) -> Callable[[], None]:
        """See :meth:`Stream.writer`."""

        def write() -> None:
            state = _numbers({**self._bits.state, _SPAWNED: self._seeds.count})
            copy(address, state.encode().ljust(self.nbytes), self.nbytes)

        return write

    def probes(self) -> Probes:
        """See :meth:`Stream.probes`."""
        return ()

    def restore(self, state: bytes) -> None:
        """See :meth:`Stream.restore`."""
        found = json.loads(state)
        spawned = found.pop(_SPAWNED, 0)
        self._bits.state = found
        self._seeds.restore(_COUNT.pack(spawned))


class Spawned:
    """A ``numpy.random.SeedSequence``: how many others it has made, each one different."""

    nbytes = 8

    def __init__(self, source: Any) -> None:
        self._source = source

    @property
    def count(self) -> int:
        """0 for a sequence that cannot spawn."""
        return int(getattr(self._source, "n_children_spawned", 0))

    def writer(self, address: int) -> Callable[[], None]:
        """See :meth:`Stream.writer`."""
        return lambda: copy(address, _COUNT.pack(self.count), self.nbytes)

    def probes(self) -> Probes:
        """See :meth:`Stream.probes`."""
        return (partial(getattr, self, "count"),)

    def restore(self, state: bytes) -> None:
        """See :meth:`Stream.restore`. A rank that lives on goes back, by what pickle uses."""
        (count,) = _COUNT.unpack(state)
        if count < self.count:
            entropy, _, *others = self._source.__reduce__()[2]
            self._source.__setstate__((entropy, 0, *others))
        if count > self.count:
            self._source.spawn(count - self.count)
        if count != self.count:
            raise ValueError(f"{self.count} seeds were spawned, and {count} at the step")


def stream_of(thing: object) -> Stream | None:
    """The stream for an object that is a random number generator; ``None`` for any other."""
    numpy = numpy_random()
    if isinstance(thing, torch.Generator):
        return TorchStream(thing)
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return PythonStream(thing)
    if numpy is not None and isinstance(thing, numpy.RandomState):
        return NumpyStream(thing) if _twister(thing) is not None else None
    if numpy is not None and isinstance(thing, numpy.SeedSequence):
        return Spawned(thing)
    if numpy is not None and isinstance(thing, numpy.Generator):
        try:
            return JsonStream(thing)
        except (TypeError, ValueError):
            return None
    return None


def _numbers(state: Any, of_array: Callable[[Any], Any] = methodcaller("tolist")) -> str:
    """A state as JSON, of which arrays are lists."""
    return json.dumps(state, default=of_array)


def numpy_random() -> ModuleType | None:
    """``numpy.random`` if numpy is loaded; numpy loads this part when it is first used."""
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "random", None)


def _unpacked(state: bytes) -> tuple[int, ...]:
    if len(state) != TWISTER_BYTES:
        raise ValueError(f"{len(state)} bytes instead of {TWISTER_BYTES}")
    return _MT.unpack_from(state)


def _python_state(source: random.Random) -> int | None:
    """The address of a Python generator's index and words."""
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < head + _MT.size:
        return None
    version, state, _gauss = source.getstate()
    place, *words = (ctypes.c_uint32 * 625).from_address(id(source) + head)
    is_there = version == 3 and (*words, place) == state  # noqa: PLR2004  the twister's format
    return id(source) + head if is_there else None


def _twister(source: Any) -> Any | None:
    """The bit generator of a RandomState if it is an MT19937."""
    bits = getattr(source, "_bit_generator", None)
    return bits if type(bits).__name__ == "MT19937" else None


def _numpy_state(source: Any) -> int | None:
    """The address of a RandomState's words and index."""
    bits = _twister(source)
    if bits is None:
        return None
    address = bits.ctypes.state_address
    state = bits.state["state"]
    found = (ctypes.c_uint32 * 625).from_address(address)
    is_there = list(found) == [*map(int, state["key"]), state["pos"]]
    return int(address) if is_there else None


def _numpy_gauss(source: Any) -> int | None:
    """The address of a RandomState's spare normal number: its offset is found in one of our own."""
    scratch = type(source)(0)
    size = type(source).__basicsize__
    if sys.implementation.name != "cpython" or type(source).__module__ != "numpy.random.mtrand":
        return None
    words, place = scratch.get_state()[1:3]
    marks = ((1, 0.123456789), (0, 0.987654321), (1, -5.5))
    offsets = set(range(0, size - _GAUSS.size + 1, 8))
    for mark in marks:
        scratch.set_state(("MT19937", words, place, *mark))
        offsets = {
            at for at in offsets if _GAUSS.unpack(ctypes.string_at(id(scratch) + at, 16)) == mark
        }
    return id(source) + offsets.pop() if len(offsets) == 1 else None
