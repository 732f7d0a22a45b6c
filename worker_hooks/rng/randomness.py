"""All randomness of a process as bytes: captured at every commit, so it must cost next to nothing.

It consists of the generators that torch, numpy and Python use by default: torch's for the CPU and
for every accelerator in use, numpy's global RandomState, and that of the module ``random``.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import re
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import call
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

_ACCELERATORS = re.compile(r"rng\.\w+\.\d+")  # the kind of device and its number, as in rng.cuda.0
_PHILOX = struct.Struct("<Qq")  # seed and offset of an accelerator's generator


class Randomness:
    """Some random number generators, by default those of the whole process."""

    def __init__(self, streams: Mapping[str, Stream] | None = None) -> None:
        """Find the present generators, without initialising a device.

        ``streams``: generators by name, instead of the process's own.
        """
        self._is_global = streams is None
        self._streams = process_streams() if streams is None else dict(streams)
        self._numpy_bits = _numpy_bits()
        self._parts = tuple(self._streams.values())
        self.nbytes = sum(stream.nbytes for stream in self._parts)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One U8 tensor for each generator, in the order in which :meth:`fill` writes them."""
        return tuple(
            Entry(name, "U8", (stream.nbytes,), stream.nbytes)
            for name, stream in self._streams.items()
        )

    def recorder(self, address: int) -> Recorder:
        """What writes all states, one after the other, to this address again and again."""
        return Recorder(self._parts, address)

    def fill(self, address: int) -> int:
        """Write all states, one after the other, to memory; the count of bytes."""
        self.recorder(address).write()
        return self.nbytes

    def capture(self) -> bytes:
        """All states, one after the other."""
        state = ctypes.create_string_buffer(max(self.nbytes, 1))
        self.fill(ctypes.addressof(state))
        return state.raw[: self.nbytes]

    def split(self, state: bytes) -> dict[str, bytes]:
        """What :meth:`fill` wrote, by name.

        Raises:
            ValueError: the size does not fit.
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
        """Continue from states by name; other names in ``mapping`` are ignored.

        Returns:
            The generators that stay as they are, as their state is missing or does not fit.
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
        """Whether these are still all generators of the process.

        They are not if numpy or a device came into use later, or numpy was given another generator.
        """
        if not self._is_global:
            return True
        if _numpy_bits() is not self._numpy_bits:
            return False
        return self._streams.keys() >= _of_devices().keys()


class Recorder:
    """Writes states to one place again and again: each only if it has changed."""

    def __init__(self, streams: Sequence[Stream], address: int) -> None:
        """Write nothing yet."""
        self._streams = streams  # alive, as their memory is read
        probes = [stream.probes() for stream in streams]
        starts = accumulate((stream.nbytes for stream in streams), initial=address)
        ends = list(accumulate(map(len, probes), initial=0))
        self._probes = tuple(chain.from_iterable(probes))
        # what writes each state, and the places of its probes
        self._states = [
            (stream.writer(at), slice(*place))
            for stream, at, place in zip(streams, starts, pairwise(ends), strict=False)
        ]
        self.sees_all = all(probes)
        """Whether :attr:`seen` is another one whenever a state has changed."""
        self.seen: list[object] = []  # what the probes said when the states were written last

    def write(self) -> None:
        """Write the present states."""
        now, seen = list(map(call, self._probes)), self.seen
        if now == seen and self.sees_all:
            return
        self.seen = []  # what is interrupted here is written again
        for write, place in self._states:
            found = now[place]
            if not found or found != seen[place]:
                write()
        self.seen = now


class State:
    """A state that is captured again and again into the same memory."""

    def __init__(self, randomness: Randomness) -> None:
        self._memory = ctypes.create_string_buffer(max(randomness.nbytes, 1))
        self._size = randomness.nbytes
        self.capture = randomness.recorder(ctypes.addressof(self._memory)).write
        """Captures the present state."""

    @property
    def content(self) -> bytes:
        """What was captured last, as :meth:`Randomness.fill` writes it."""
        return self._memory.raw[: self._size]


def process_streams() -> dict[str, Stream]:
    """The generators that this process uses by default, by name."""
    streams: dict[str, Stream] = {TORCH: TorchStream(torch.default_generator)}
    numpy = numpy_random()
    if numpy is not None and _numpy_bits() is not None:
        streams[NUMPY] = NumpyStream(numpy.get_state.__self__)
    streams[PYTHON] = PythonStream(random.getstate.__self__)  # type: ignore[attr-defined]
    for name, generator in _of_devices().items():
        streams[name] = TorchStream(generator)
    return streams


def private_streams(owners: Mapping[str, object]) -> dict[str, Stream]:
    """The generators among the attributes of some objects, each once.

    ``owners``: the objects, by the prefix of their generators' names; may be ``None``.
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
    """Randomness for a rank that has none saved; equal arguments give equal states.

    ``mapping``: another rank's states by name.

    Returns:
        New states of those generators in ``mapping`` that are the process's own.
    """
    derived = {}
    for name, state in mapping.items():
        digest = hashlib.sha256(name.encode() + b"\0" + str(rank).encode() + b"\0" + state)
        seed = int.from_bytes(digest.digest()[:8], "little") >> 1
        found = _seeded(name, seed, len(state))
        if found is not None:
            derived[name] = found
    return derived


def _seeded(name: str, seed: int, nbytes: int) -> bytes | None:
    if _ACCELERATORS.fullmatch(name):  # of another kind than this, it has a seed of its own
        return _PHILOX.pack(seed, 0) if nbytes == _PHILOX.size else None
    numpy = numpy_random()
    stream: Stream | None = None
    if name == TORCH:
        stream = TorchStream(torch.Generator().manual_seed(seed))
    elif name == PYTHON:
        stream = PythonStream(random.Random(seed))  # noqa: S311  not for cryptography
    elif name == NUMPY and numpy is not None:
        stream = NumpyStream(numpy.RandomState(seed & 0xFFFFFFFF))
    return None if stream is None else Randomness({name: stream}).capture()


def _numpy_bits() -> Any | None:
    """The generator behind numpy's global functions, if it is an MT19937."""
    numpy = numpy_random()
    bits = None if numpy is None else numpy.get_state.__self__._bit_generator  # noqa: SLF001  see generators
    return bits if type(bits).__name__ == "MT19937" else None


def _of_devices() -> dict[str, torch.Generator]:
    """Those of the accelerators that this process uses; it has drawn nothing on any other."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    kind = accelerator.type
    module = getattr(torch, kind, None)
    is_used = getattr(module, "is_initialized", None)
    if is_used is None or not is_used():
        return {}
    touched = None  # other kinds do not tell
    if kind == "cuda":
        touched = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # noqa: SLF001  no public way
    generators = enumerate(getattr(module, "default_generators", ()))
    return {
        f"rng.{kind}.{number}": generator
        for number, generator in generators
        if touched is None or touched(number)
    }
