# ruff: noqa: NPY002  numpy's functions of old draw from the randomness of the whole process
"""Trainings that differ in where their batches come from."""

import random
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from toys import fit, network, samples, split, updates


class Rolled(Dataset):
    """Augmented by everything that is random."""

    def __init__(self, count=96):
        self.samples = samples(count)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return rolled(x), y


class Noisy(Dataset):
    """What noise there is, and whether samples are mixed, the script sets from time to time."""

    def __init__(self):
        self.samples = samples()
        self.share, self.is_mixed = 0.8, True

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        if self.is_mixed:
            x = (x + self.samples[index // 2][0]) / 2
        return x + self.share * torch.randn(x.shape), y


class Reshuffling(Sampler):
    """A rank's share of the samples, shuffled by each epoch from the order of the one before."""

    def __init__(self, job):
        self.order = list(range(job.rank, 96, 3))

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)


def rolled(x):
    return x * (0.5 + torch.rand(())) + 0.1 * np.random.randn() + random.gauss(0, 0.1)


class Stream(IterableDataset):
    """A rank's share of the samples, in an order that it draws."""

    def __init__(self, job):
        self.samples = samples()
        self.rank = job.rank

    def __iter__(self):
        mine = list(range(self.rank, len(self.samples), 3))
        random.shuffle(mine)
        for index in mine:
            x, y = self.samples[index]
            yield rolled(x), y


class Stateful:
    """A loader that knows its own place, and draws from a generator of its own."""

    def __init__(self, job):
        self.samples = samples()
        self.random = random.Random(job.rank)
        self.at, self.order = 0, []

    def __len__(self):
        return 4

    def __iter__(self):
        if not self.at:
            self.order = self.random.sample(range(96), 32)
        while self.at < 4:
            mine = self.order[8 * self.at : 8 * self.at + 8]
            self.at += 1
            yield self.samples.tensors[0][mine], self.samples.tensors[1][mine]
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "order": list(self.order), "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], list(state["order"])
        version, numbers, rest = state["random"]
        self.random.setstate((version, tuple(numbers), rest))


class Prepared:
    """A loader as accelerate prepares it.

    It passes for a DataLoader, is one batch ahead, has a state in name only, and its ranks agree on
    their order by a collective when they begin to iterate.
    """

    def __init__(self, dataset):
        self.generator = torch.Generator()  # of another seed on each rank
        self.generator.manual_seed(dist.get_rank())
        self.base = DataLoader(dataset, 8, shuffle=True, generator=self.generator)

    @property
    def __class__(self):
        return DataLoader

    def __getattr__(self, name):
        return getattr(self.__dict__["base"], name)

    def __len__(self):
        return len(self.base) // dist.get_world_size()

    def __iter__(self):
        state = self.generator.get_state()
        dist.broadcast(state, 0)
        self.generator.set_state(state)
        mine = islice(self.base, dist.get_rank(), None, dist.get_world_size())
        now = next(mine)
        for ahead in mine:
            yield now
            now = ahead
        yield now

    def state_dict(self):
        return self.own_state

    def load_state_dict(self, state):
        raise AssertionError(state)


class Together(Stateful):
    """Has a state, and its ranks communicate whenever they begin to iterate, also amid an epoch."""

    def __iter__(self):
        dist.all_reduce(torch.zeros(7))
        yield from super().__iter__()


def trained(make):
    """A training with the loader that ``make`` makes of the job."""

    def kind(job):
        net = network(nn.BatchNorm1d(16), nn.Dropout(0.1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        job.state(model=net, optimizer=optimizer)
        fit(job, net, updates(optimizer), make(job))

    return kind


def shuffled(job):
    """Shuffled without a sampler that knows of ranks: the same seed makes the same order."""
    job.reseed(0)
    return DataLoader(samples(32), 8, shuffle=True)


KINDS = {
    "shuffled": trained(shuffled),
    "augmented": trained(lambda _: split(Rolled())),
    "workers": trained(lambda _: split(Rolled(), num_workers=2)),
    "workers_stay": trained(lambda _: split(Rolled(), num_workers=2, persistent_workers=True)),
    "stream": trained(lambda job: DataLoader(Stream(job), 8)),
    "stream_worker": trained(lambda job: DataLoader(Stream(job), 8, num_workers=1)),
    "reshuffled": trained(lambda job: DataLoader(samples(), 8, sampler=Reshuffling(job))),
    "stateful": trained(Stateful),
    "together": trained(Together),
    "prepared": trained(lambda _: Prepared(samples())),
    "a_list": trained(lambda _: list(split())),
}
