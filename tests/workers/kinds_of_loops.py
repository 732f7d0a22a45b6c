# ruff: noqa: NPY002  numpy's functions of old draw from the randomness of the whole process
"""Trainings that differ in how they loop: what stands around the batches, and how a loop ends."""

import random
import sys

import numpy as np
import torch
from kinds_of_data import Noisy, Rolled
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, Subset
from toys import EPOCHS, average, learn, network, samples, split


class Small:
    """A network with everything that most of these need."""

    def __init__(self, job, more=lambda _: {}):
        self.job = job
        self.net = network(nn.BatchNorm1d(16), nn.Dropout(0.1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = job.state(
            model=self.net, optimizer=self.optimizer, scheduler=self.scheduler, **more(self)
        )

    def update(self, model, x, y):
        loss = learn(self.job, model, x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def logged(job, is_late=False):
    """After the update all ranks tell each other their losses."""
    small, loader = Small(job), split()

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = small.update(model, x, y)
                if not is_late:
                    small.scheduler.step()
                average([loss])
                job.note("average", loss)
                if is_late:
                    small.scheduler.step()

    job.run(train)


def logged_late(job):
    """The same, and the schedule is only behind it."""
    logged(job, is_late=True)


def seldom(job):
    """Something that only every third step does, behind what all ranks do together."""
    slow = network()
    small, loader = Small(job, lambda _: {"slow": slow}), split()

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = small.update(model, x, y)
                average([loss])
                job.note("average", loss)
                if state.batch == 3:
                    with torch.no_grad():
                        for each, other in zip(
                            slow.parameters(), small.net.parameters(), strict=False
                        ):
                            if each.shape == other.shape:
                                each.lerp_(other, 0.5)

    job.run(train)


class Meter:
    """An average of the script's own, which nobody registers."""

    def __init__(self):
        self.total, self.count, self.newest = 0.0, 0, []

    def add(self, value):
        self.total += value
        self.count += 1
        self.newest = [*self.newest[-2:], value]


def variables(job):
    """Everything that scripts keep in variables: it steers, and it is printed behind the loop."""
    small, loader = Small(job), split()
    group = small.optimizer.param_groups[0]

    def train(state):
        model = DistributedDataParallel(small.net)
        best, meter, history, unseen = np.inf, Meter(), [], {"steps": 0}
        for _ in state.epochs(EPOCHS):
            total, losses = torch.zeros(()), []
            for number, (x, y) in enumerate(state.batches(loader), start=1):
                loss = learn(job, model, x, y)
                if number % 2 == 0:
                    small.optimizer.step()
                    small.optimizer.zero_grad()
                    unseen["steps"] += 1
                total = total + loss
                losses.append(loss.item())
                meter.add(loss.item())
            job.note("last", loss)
            job.note("mean", sum(losses) / len(losses))
            job.note("meter", meter.total / meter.count + sum(meter.newest))
            job.note("number", number)
            average([total])
            best = min(best, total.item())
            history.append(best)
            group["lr"] *= 0.9 if best == total.item() else 0.5
            job.note("steps", unseen["steps"] + sum(history))
        job.note("very last", loss + group["lr"])

    job.run(train)


def by_epoch(job):
    """A schedule, a clock, data and one draw of luck of the script's own, at an epoch's two ends."""
    small, data = Small(job), samples()

    def train(state):
        model = DistributedDataParallel(small.net)
        turn = 0
        for _ in state.epochs(EPOCHS):
            loader = split(Subset(data, [(turn + each) % len(data) for each in range(len(data))]))
            small.optimizer.param_groups[0]["weight_decay"] *= 1.5
            job.note("luck", np.random.rand())
            for x, y in state.batches(loader):
                small.update(model, x, y)
            small.scheduler.step()
            job.note("luck after", random.random())
            turn = 2 * turn + 1

    job.run(train)


def validate(job):
    """A validation with augmentation, whose result a schedule looks at."""
    small = Small(
        job, lambda small: {"plateau": lr_scheduler.ReduceLROnPlateau(small.optimizer, patience=0)}
    )
    plateau, loader = job.held["plateau"], split(Rolled())
    checks = DataLoader(Rolled(40), 8)

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS):
            small.net.train()
            for x, y in state.batches(loader):
                small.update(model, x, y)
                small.scheduler.step()
            small.net.eval()
            total = torch.zeros(())
            with torch.no_grad():
                for x, y in state.batches(checks):
                    loss = cross_entropy(small.net(x), y)
                    job.note("check", loss)
                    total += loss
            average([total])
            plateau.step(total)

    job.run(train)


def own_validation(job):
    """The same with a loop that the hooks know nothing of."""
    small, loader, checks = Small(job), split(Rolled()), DataLoader(Rolled(40), 8, shuffle=True)

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS):
            small.net.train()
            for x, y in state.batches(loader):
                small.update(model, x, y)
            small.net.eval()
            for number, (x, y) in enumerate(checks):
                with torch.no_grad():
                    job.note(f"check {number}", cross_entropy(small.net(x), y))
            small.scheduler.step()

    job.run(train)


def two_loaders(job):
    """Two loops over different data in one epoch, a schedule's step between them."""
    small, first, second = Small(job), split(), split(samples(48), batch=4)

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(first):
                small.update(model, x, y)
            small.scheduler.step()
            for x, y in state.batches(second):
                small.update(model, x, y)
            small.optimizer.param_groups[0]["lr"] *= 1.1

    job.run(train)


def new_loaders(job):
    """A loader that is made anew in each epoch."""
    small = Small(job)

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS):
            loader = split(Rolled())
            for x, y in state.batches(loader):
                small.update(model, x, y)

    job.run(train)


def early(job):
    """Epochs that end after three of four batches, behind the update."""
    small, loader = Small(job), split(Rolled())

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS + 1):
            for x, y in state.batches(loader):
                small.update(model, x, y)
                if state.batch == 3:
                    break
            small.scheduler.step()

    job.run(train)


def early_before(job):
    """The same, in front of it: a batch was handed out and is not trained."""
    small, loader = Small(job), split(Rolled())

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS + 1):
            for x, y in state.batches(loader):
                if state.batch == 4:
                    break
                small.update(model, x, y)
            small.scheduler.step()

    job.run(train)


def own_epochs(job):
    """The script counts its epochs itself."""
    small, loader = Small(job), split()

    def train(state):
        model = DistributedDataParallel(small.net)
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for x, y in state.batches(loader):
                small.update(model, x, y)
                small.scheduler.step()

    job.run(train)


def weights_by_epoch(job):
    """Weights are averaged at an epoch's end, as torch's own example does."""
    net = network(nn.BatchNorm1d(16))
    swa = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    job.state(model=net, swa=swa, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DistributedDataParallel(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                learn(job, model, x, y)
                if (state.epoch, state.batch) == (0, 4):
                    job.lag("end", 2, 0.5)
                if (state.epoch, state.batch) == (1, 1):
                    job.lag_until_frozen("update", 2, 0.5)
                optimizer.step()
                if (state.epoch, state.batch) == (1, 1):
                    job.lag_until_frozen("update", 0, 1.0)
                optimizer.zero_grad()
            swa.update_parameters(net)
        update_bn(DataLoader(samples(), 8), swa)

    job.run(train)


def swapped(job):
    """The average of the weights stands in for them during validation."""
    small = Small(job, lambda small: {"ema": AveragedModel(small.net, avg_fn=halfway)})
    ema, loader, checks = job.held["ema"], split(Rolled()), DataLoader(samples(40), 8)

    def swap():
        for each, other in zip(small.net.parameters(), ema.parameters(), strict=True):
            kept = each.clone()
            each.copy_(other)
            other.copy_(kept)

    def train(state):
        model = DistributedDataParallel(small.net)
        for _ in state.epochs(EPOCHS):
            small.net.train()
            for x, y in state.batches(loader):
                small.update(model, x, y)
                ema.update_parameters(small.net)
            small.net.eval()
            with torch.no_grad():
                swap()
                total = torch.zeros(())
                for x, y in state.batches(checks):
                    total += cross_entropy(small.net(x), y)
                average([total])
                job.note("check", total)
                swap()

    job.run(train)


def halfway(old, new, _):
    return (old + new) / 2


def bare(job):
    """No `run`, no function."""
    small, loader = Small(job), split()
    model = DistributedDataParallel(small.net)
    for _ in small.state.epochs(EPOCHS):
        for x, y in small.state.batches(loader):
            small.update(model, x, y)
        small.scheduler.step()


def catches(job):
    """The script has its own answer to a failed collective."""
    small, loader = Small(job), split()
    try:
        model = DistributedDataParallel(small.net)
        for _ in small.state.epochs(EPOCHS):
            for x, y in small.state.batches(loader):
                small.update(model, x, y)
    except RuntimeError as error:
        print("caught", str(error).splitlines()[0], flush=True)
        sys.exit(3)


def curriculum(job):
    """A data set that becomes cleaner behind each epoch, and for which one epoch changes a rule."""
    small, data = Small(job), Noisy()
    loader = split(data)

    def train(state):
        model = DistributedDataParallel(small.net)
        for epoch in state.epochs(EPOCHS):
            if epoch == 1:
                data.is_mixed = False
            for x, y in state.batches(loader):
                small.update(model, x, y)
            data.share *= 0.5

    job.run(train)


def thawed(job):
    """Layers that learn from the second epoch on, as do no statistics any more; DDP is made anew."""
    small, loader = Small(job), split()
    first, norm = small.net[0], small.net[1]
    first.requires_grad_(requires_grad=False)

    def train(state):
        model = DistributedDataParallel(small.net)
        for epoch in state.epochs(EPOCHS):
            if epoch == 1:
                first.requires_grad_(requires_grad=True)
                model = DistributedDataParallel(small.net)
                norm.eval()
            for x, y in state.batches(loader):
                small.update(model, x, y)

    job.run(train)


def fetched_ahead(job):
    """The next batch is drawn before the update, as nanoGPT does it, in a loop of the script's own."""
    net, data = network(nn.Dropout(0.1)), samples()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    job.state(model=net, optimizer=optimizer)

    def train(state):
        model = DistributedDataParallel(net)
        x, y = data[torch.randint(len(data), (8,))]
        while not state.should_exit and state.step < EPOCHS * 4:
            loss = cross_entropy(model(x), y)
            job.note("loss", loss)
            x, y = data[torch.randint(len(data), (8,))]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    job.run(train)


KINDS = {
    each.__name__: each
    for each in (
        logged,
        logged_late,
        seldom,
        variables,
        by_epoch,
        validate,
        own_validation,
        two_loaders,
        new_loaders,
        early,
        early_before,
        own_epochs,
        weights_by_epoch,
        curriculum,
        thawed,
        fetched_ahead,
        swapped,
        bare,
        catches,
    )
}
