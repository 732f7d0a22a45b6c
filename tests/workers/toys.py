"""Small things to train with: data, networks, and the loop that most trainings have."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3  # of four steps each, for three ranks


def samples(count=96):
    """Points of two classes."""
    make = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=make)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def split(dataset=None, batch=8, **options):
    """A loader of the rank's share, shuffled."""
    dataset = samples() if dataset is None else dataset
    sampler = DistributedSampler(dataset, shuffle=True, seed=5)
    return DataLoader(dataset, batch, sampler=sampler, **options)


def alike(make):
    """Something with random numbers in it, the same on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


def network(*between):
    return alike(lambda: nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 2)))


def average(tensors):
    for each in tensors:
        dist.all_reduce(each)
        each.div_(dist.get_world_size())


def learn(job, model, x, y):
    """Forward and backward; the loss."""
    loss = cross_entropy(model(x), y)
    job.note("loss", loss)
    loss.backward()
    return loss.detach()


def fit(job, net, update, loader=None, wrap=DistributedDataParallel):
    """Train over all epochs; ``update`` is what follows a backward."""
    loader = split() if loader is None else loader

    def train(state):
        model = wrap(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                learn(job, model, x, y)
                update()

    job.run(train)


def updates(optimizer):
    """An update function: step, then forget the gradients."""

    def update():
        optimizer.step()
        optimizer.zero_grad()

    return update
