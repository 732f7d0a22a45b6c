"""All randomness of a process as bytes: captured at every commit, so it must cost next to nothing.

It is what torch, numpy and python draw from when nobody says otherwise: the default generators of
torch's CPU and of every CUDA device in use, numpy's global RandomState and python's ``random``.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch

from worker_hooks.contract.status_page import Entry
from worker_hooks.rng.generators import (
    NumpyStream,
    PythonStream,
    Stream,
    TorchStream,
    numpy_random,
    stream_of,
)

TORCH = "rng.torch"
NUMPY = "rng.numpy"
PYTHON = "rng.python"
CUDA = "rng.cuda."  # a device's number follows

_CUDA = struct.Struct("<Qq")  # seed and offset of a CUDA generator


class Randomness:
    """Some sources of random numbers, by default those of the whole process."""

    def __init__(self, streams: Mapping[str, Stream] | None = None) -> None:
        """Find the sources that there are now; CUDA is not initialised for it.

        Args:
            streams: sources by name, instead of the process's own.
        """
        self._is_global = streams is None
        self._streams = process_streams() if streams is None else dict(streams)
        self._numpy_bits = _numpy_bits()
        self._parts = tuple(self._streams.values())
        self.nbytes = sum(stream.nbytes for stream in self._parts)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One U8 tensor a source, in the order :meth:`fill` writes them."""
        return tuple(
            Entry(name, "U8", (stream.nbytes,), stream.nbytes)
            for name, stream in self._streams.items()
        )

    def writers(self, address: int) -> tuple[Callable[[], None], ...]:
        """What writes all states one after the other to this memory, whenever it is called."""
        starts = accumulate((stream.nbytes for stream in self._parts), initial=address)
        return tuple(stream.writer(at) for stream, at in zip(self._parts, starts, strict=False))

    def fill(self, address: int) -> int:
        """Write all states one after the other to memory; how many bytes that were."""
        for write in self.writers(address):
            write()
        return self.nbytes

    def capture(self) -> bytes:
        """All states one after the other."""
        state = ctypes.create_string_buffer(max(self.nbytes, 1))
        self.fill(ctypes.addressof(state))
        return state.raw[: self.nbytes]

    def split(self, state: bytes) -> dict[str, bytes]:
        """What :meth:`fill` wrote, by name.

        Raises:
            ValueError: the size is another.
        """
        if len(state) != self.nbytes:
            raise ValueError(f"{len(state)} bytes of randomness instead of {self.nbytes}")
        found = {}
        at = 0
        for name, stream in self._streams.items():
            found[name] = state[at : at + stream.nbytes]
            at += stream.nbytes
        return found

    def restore(self, mapping: Mapping[str, bytes]) -> tuple[str, ...]:
        """Go on from states by name; other names in ``mapping`` are not ours and left alone.

        Returns:
            names of sources that stay as they are, since their state is missing or does not fit.
        """
        missed = []
        for name, stream in self._streams.items():
            state = mapping.get(name, b"")
            try:
                stream.restore(state)
            except ValueError:
                missed.append(name)
        return tuple(missed)

    def is_complete(self) -> bool:
        """Whether these are still all sources of the process.

        Not so when numpy or CUDA came into use later, or when numpy was given another generator.
        """
        if not self._is_global:
            return True
        if _numpy_bits() is not self._numpy_bits:
            return False
        return all(f"{CUDA}{device}" in self._streams for device in _cuda_devices())


class State:
    """A state that is noted again and again in the same place."""

    def __init__(self, randomness: Randomness) -> None:
        self._room = ctypes.create_string_buffer(max(randomness.nbytes, 1))
        self._size = randomness.nbytes
        self._writers = randomness.writers(ctypes.addressof(self._room))

    def note(self) -> None:
        """Note what the sources are at now."""
        for write in self._writers:
            write()

    @property
    def content(self) -> bytes:
        """What was noted last, as of :meth:`Randomness.fill`."""
        return self._room.raw[: self._size]


def process_streams() -> dict[str, Stream]:
    """The sources that this process draws from when nobody says otherwise, by name."""
    streams: dict[str, Stream] = {TORCH: TorchStream(torch.default_generator)}
    numpy = numpy_random()
    if numpy is not None and _numpy_bits() is not None:
        streams[NUMPY] = NumpyStream(numpy.get_state.__self__)
    streams[PYTHON] = PythonStream(random.getstate.__self__)  # type: ignore[attr-defined]
    for device in _cuda_devices():
        streams[f"{CUDA}{device}"] = TorchStream(torch.cuda.default_generators[device])
    return streams


def private_streams(owners: Mapping[str, object]) -> dict[str, Stream]:
    """Sources that belong to objects: their attributes that are generators, each but once.

    Args:
        owners: objects to look at by the name their sources shall have; ``None`` has none.
    """
    streams: dict[str, Stream] = {}
    seen = {id(torch.default_generator), id(random.getstate.__self__)}  # type: ignore[attr-defined]
    for owner, thing in owners.items():
        for name, value in getattr(thing, "__dict__", {}).items():
            stream = None if id(value) in seen else stream_of(value)
            if stream is not None:
                seen.add(id(value))
                streams[f"{owner}.{name}"] = stream
    return streams


def derive(mapping: Mapping[str, bytes], rank: int) -> dict[str, bytes]:
    """Randomness for a rank that has none saved, the same whenever it is asked for.

    Args:
        mapping: another rank's states by name.
        rank: the rank that begins.

    Returns:
        states of the sources in ``mapping`` that are the process's own, all unlike the given ones.
    """
    derived = {}
    for name, state in mapping.items():
        digest = hashlib.sha256(name.encode() + b"\0" + str(rank).encode() + b"\0" + state)
        seed = int.from_bytes(digest.digest()[:8], "little") >> 1
        found = _seeded(name, seed)
        if found is not None:
            derived[name] = found
    return derived


def _seeded(name: str, seed: int) -> bytes | None:
    if name.startswith(CUDA):
        return _CUDA.pack(seed, 0)
    numpy = numpy_random()
    stream: Stream | None = None
    if name == TORCH:
        stream = TorchStream(torch.Generator().manual_seed(seed))
    elif name == PYTHON:
        stream = PythonStream(random.Random(seed))  # noqa: S311  as random as the one it replaces
    elif name == NUMPY and numpy is not None:
        stream = NumpyStream(numpy.RandomState(seed & 0xFFFFFFFF))
    return None if stream is None else Randomness({name: stream}).capture()


def _numpy_bits() -> Any | None:
    """The generator behind numpy's global functions, if it is the usual MT19937."""
    numpy = numpy_random()
    bits = None if numpy is None else numpy.get_state.__self__._bit_generator  # noqa: SLF001  see streams
    return bits if type(bits).__name__ == "MT19937" else None


def _cuda_devices() -> tuple[int, ...]:
    """CUDA devices that this process has touched; nothing random was drawn on any other."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    touched = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # noqa: SLF001  no public way
    devices = range(len(torch.cuda.default_generators))
    return tuple(device for device in devices if touched is None or touched(device))
