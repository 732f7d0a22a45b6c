"""What a script may do to its memory while it trains, without changing what it trains.

Each act leaves the weights as they were, whatever it did to the memory that they lie in. What an
act has allocated has a pattern that is compared when it is freed: nobody else may have written
there. Not a test itself.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import resource
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
MOST = 4 << 20  # bytes of a block
BLOCKS = 24  # at once
CHILDREN = 4  # at once
MADV_COLD, MADV_PAGEOUT = 20, 21  # linux/mman.h

COLD = (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE, MADV_COLD, MADV_PAGEOUT)


class ForeignBytesError(Exception):
    """Somebody else has written to memory of this process's own."""


class Blocks:
    """Memory that is allocated, written, compared and freed, of all sizes and kinds."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._held: list[tuple[Any, int]] = []  # with the byte that it is full of

    def allocate(self) -> None:
        """One more block; all of it is written."""
        if len(self._held) >= BLOCKS:
            self.free()
        size, byte = int(2 ** self._rng.uniform(4, 22)), self._rng.randrange(1, 256)
        kind = self._rng.randrange(4)
        if kind == 0:
            block: Any = bytearray([byte]) * size
        elif kind == 1:
            block = torch.full((size,), byte, dtype=torch.uint8)
        elif kind == 2:  # calloc hands out pages that are to be zero
            block = torch.zeros(size, dtype=torch.uint8)
            if block.any():
                raise ForeignBytesError("new memory is not zero")
            block.fill_(byte)
        else:
            block = mmap.mmap(-1, size)
            if block[:] != bytes(size):
                raise ForeignBytesError("a new map is not zero")
            block[:] = bytes([byte]) * size
        self._held.append((block, byte))

    def free(self) -> None:
        """Any one of them, once it is compared."""
        if self._held:
            block, byte = self._held.pop(self._rng.randrange(len(self._held)))
            octets = block.numpy().tobytes() if isinstance(block, torch.Tensor) else block[:]
            if octets != bytes([byte]) * len(octets):
                raise ForeignBytesError(f"a block of {len(octets)} bytes has others")


class Churn(threading.Thread):
    """Allocates and frees beside the training, and gives memory back to the kernel."""

    def __init__(self, seed: int, failed: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self._rng, self._failed = Random(seed), failed
        self._pause = threading.Event()

    def run(self) -> None:
        """For ever."""
        blocks = Blocks(self._rng)
        try:
            while not self._pause.wait(0.002):
                (blocks.allocate if self._rng.random() < 0.55 else blocks.free)()
                if self._rng.random() < 0.1:
                    LIBC.malloc_trim(0)
        except ForeignBytesError as error:
            self._failed(str(error))


class Acts:
    """Done by the main thread of a rank, in any place of a step."""

    def __init__(self, rng: Random, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.counts: Counter[str] = Counter()
        self._rng, self._net, self._optimizer = rng, net, optimizer
        self._blocks = Blocks(rng)
        self._children: list[int] = []

    def anywhere(self) -> None:
        """One that is allowed at any time."""
        self._do(
            (8, self._allocate),
            (8, self._free),
            (3, self._trim),
            (2, self._fork),
            (3, self._advise),
            (1, self._lock),
            (1, self._collect),
            (0.3, self._spawn),
            (0.2, self._limit),
            (0.1, self._load),
        )

    def within_update(self) -> None:
        """One that moves the state, between an update and its commit."""
        self._do((1, self._move_weight), (1, self._move_moment), (1, self._grow), (2, self._trim))

    def _do(self, *choices: tuple[float, Callable[[], None]]) -> None:
        weights, acts = zip(*choices, strict=True)
        (act,) = self._rng.choices(acts, weights)
        self.counts[act.__name__.lstrip("_")] += 1
        act()

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self._net.parameters()]

    def _allocate(self) -> None:
        for _ in range(self._rng.randrange(1, 8)):
            self._blocks.allocate()

    def _free(self) -> None:
        for _ in range(self._rng.randrange(1, 8)):
            self._blocks.free()

    def _trim(self) -> None:
        LIBC.malloc_trim(0)

    def _collect(self) -> None:
        gc.collect()

    def _advise(self) -> None:
        """Huge pages, none, cold ones, and out to the swap space."""
        start, nbytes = self._pages()
        if nbytes:
            advice = self._rng.choice(COLD)
            LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)

    def _lock(self) -> None:
        start, nbytes = self._pages()
        call = self._rng.choice((LIBC.mlock, LIBC.munlock))
        call(ctypes.c_void_p(start), ctypes.c_size_t(nbytes))

    def _pages(self) -> tuple[int, int]:
        """The whole pages of some weight."""
        each = self._rng.choice(self._weights())
        first = -(-each.data_ptr() // PAGE) * PAGE
        return first, max(0, (each.data_ptr() + each.nbytes) // PAGE * PAGE - first)

    def _limit(self) -> None:
        """A limit of the address space, a little above what is used, and none again."""
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * PAGE
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), limits[1]))
        try:
            bytearray(64 << 20)
        except MemoryError:
            pass
        else:
            raise AssertionError("a limit of the address space was not obeyed")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    def _spawn(self) -> None:
        subprocess.run(["true"], check=True)

    def _load(self) -> None:
        """Processes of a loader."""
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=16, num_workers=2)
        if sum(float(each.sum()) for (each,) in loader) != sum(range(64)):
            raise ForeignBytesError("a loader's processes have other data")

    def _fork(self) -> None:
        """A child that writes over all that it has, frees it, and ends in one of three ways."""
        for child in list(self._children):
            if os.waitpid(child, os.WNOHANG)[0]:
                self._children.remove(child)
        if len(self._children) >= CHILDREN:
            self._end(self._children.pop(0))
        ending = self._rng.randrange(3)
        pid = os.fork()
        if pid:
            self._children.append(pid)
            return
        code = 1
        try:
            self._in_child()
            if ending == 0:
                atexit._run_exitfuncs()
            elif ending == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            code = 0
        finally:
            os._exit(code)

    def _in_child(self) -> None:
        for each in self._weights():
            each.fill_(float("nan"))
        for state in self._optimizer.state.values():
            for value in state.values():
                value.fill_(float("nan"))
        self._optimizer.state.clear()
        for parameter in self._net.parameters():
            parameter.data = torch.zeros(1)
        gc.collect()
        LIBC.malloc_trim(0)

    def _end(self, child: int) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _move_weight(self) -> None:
        """``p.data = ...``: the same numbers in other memory."""
        parameter = self._rng.choice(list(self._net.parameters()))
        parameter.data = parameter.data.clone()

    def _move_moment(self) -> None:
        states = [state for state in self._optimizer.state.values() if "exp_avg" in state]
        if states:
            state = self._rng.choice(states)
            state["exp_avg"] = state["exp_avg"].clone()

    def _grow(self) -> None:
        """A storage that grows and shrinks again, and has moved after that."""
        parameter = self._rng.choice(list(self._net.parameters()))
        storage = parameter.untyped_storage()
        size = storage.nbytes()
        storage.resize_(2 * size + MOST)
        storage.resize_(size)
