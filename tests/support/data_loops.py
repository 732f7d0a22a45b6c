"""Training runs without a model: what the loader handed out, with and without the hooks."""

# ruff: noqa: NPY002  numpy's functions of old are what is tested

import ctypes
import json
import random
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from worker_hooks.data.feed import Feed
from worker_hooks.rng.randomness import Randomness

EPOCHS = 3


class Rolls(Dataset):
    """A data set with augmentations drawn from everything that is random."""

    def __init__(self, size, kinds=("torch", "numpy", "random")):
        self.size, self.kinds = size, kinds

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if isinstance(index, list):
            return [self[each] for each in index]
        return torch.tensor([float(index), *augment(self.kinds)], dtype=torch.float64)


class Owned(Dataset):
    """A data set with generators of its own."""

    def __init__(self, size):
        self.size = size
        self.torch = torch.Generator().manual_seed(5)
        self.python = random.Random(5)
        self.new = np.random.default_rng(5)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = (
            torch.rand((), generator=self.torch).item(),
            self.python.gauss(0, 1),
            self.new.random(),
        )
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Stream(IterableDataset):
    """Numbers, a share for each worker; ``rejects``: some are thrown away at random."""

    def __init__(self, size, kinds=("torch", "numpy", "random"), rejects=0.0):
        self.size, self.kinds, self.rejects = size, kinds, rejects

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.size, step):
            sample = torch.tensor([float(index), *augment(self.kinds)], dtype=torch.float64)
            if random.random() >= self.rejects:
                yield sample


class Sized(Stream):
    def __len__(self):
        return self.size


def augment(kinds):
    drawn = {
        "torch": lambda: torch.randn(()).item(),
        "numpy": lambda: float(np.random.randn()),
        "random": lambda: random.gauss(0, 1),
    }
    return [drawn[kind]() for kind in kinds]


class Point(NamedTuple):
    """What a commit leaves of the data position."""

    number: int  # batches seen over all epochs
    epoch: int
    consumed: int
    meta: str
    saved: dict[str, bytes]


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def train(seen, batch, draws=True):
    """Training draws, too: dropout and whatever a script does. One normal number leaves a spare."""
    seen.append(repr(batch.tolist() if isinstance(batch, torch.Tensor) else batch))
    if draws:
        seen.append((torch.rand(()).item(), np.random.randn(), random.gauss(0, 1)))


def plain(make, epochs=EPOCHS, leave=None, draws=True):
    """What a loop without hooks sees; ``leave`` after so many batches of each epoch."""
    seed(1)
    loader, seen = make(), []
    for epoch in range(epochs):
        for part in (getattr(loader, "sampler", None), getattr(loader, "dataset", None), loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for count, batch in enumerate(loader, 1):
            train(seen, batch, draws)
            if count == leave:
                break
        seen.append("end")
    return seen


def point(number, epoch, feed, randomness):
    entries = (*feed.entries, *randomness.entries)
    size = sum(entry.nbytes for entry in entries)
    room = ctypes.create_string_buffer(size + 1)
    at = ctypes.addressof(room)
    assert feed.fill(at) + randomness.fill(at + sum(e.nbytes for e in feed.entries)) == size
    saved, at = {}, 0
    for entry in entries:
        assert entry.dtype == "U8" and entry.shape == (entry.nbytes,)
        saved[entry.name] = room.raw[at : at + entry.nbytes]
        at += entry.nbytes
    assert len(saved) == len(entries)
    return Point(number, epoch, feed.consumed, json.dumps(feed.meta()), saved)


def hooked(make, epochs=EPOCHS, leave=None, at=None, begin=None, draws=True):
    """What a loop with hooks sees, and the point after every batch (or after those in ``at``).

    With ``begin`` another process begins there.
    """
    seed(1 if begin is None else 999)
    loader, seen, points = make(), [], []
    feed, randomness = Feed(loader), Randomness()
    for epoch in range(0 if begin is None else begin.epoch, epochs):
        feed.begin(epoch)
        if begin is None:
            batches = feed.open()
        else:
            batches = feed.open(begin.consumed, json.loads(begin.meta), begin.saved)
            assert randomness.restore(begin.saved) == ()
        begin = None
        while feed.consumed != leave:
            batch = next(batches, feed)
            if batch is feed:
                break
            train(seen, batch, draws)
            number = len(points)
            points.append(None)
            if at is None or number in at:
                points[-1] = point(len(seen), epoch, feed, randomness)
        batches.close(is_over=True)
        seen.append("end")
    return seen, points


def check(make, at=None, epochs=EPOCHS, leave=None, draws=True):
    """Hooks change nothing, and going on from any point gives what was to come; the points."""
    expected = plain(make, epochs, leave, draws)
    seen, points = hooked(make, epochs, leave, at, draws=draws)
    assert seen == expected
    taken = [each for each in points if each is not None]
    assert taken
    for each in taken:
        rest, _ = hooked(make, epochs, leave, at=(), begin=each, draws=draws)
        assert rest == expected[each.number :], f"from batch {each.consumed} of epoch {each.epoch}"
    return points
