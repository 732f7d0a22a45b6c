# ruff: noqa: NPY002  numpy's functions of old draw from the randomness of the whole process
"""Trainings that differ in what they hold: tensors and modules of all kinds and types."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toys import EPOCHS, alike, average, fit, learn, network, split, updates


def tensors(job):
    """No module; the script evens out gradients by itself."""
    w = torch.zeros(8, 2, requires_grad=True)
    b = torch.zeros(2, requires_grad=True)
    seen = torch.zeros((), dtype=torch.int64)
    optimizer = torch.optim.SGD([w, b], lr=0.1, momentum=0.9)
    job.state(weights=[w, b], seen=seen, optimizer=optimizer)
    loader = split()

    def train(state):
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                learn(job, lambda x: x @ w + b, x, y)
                average([w.grad, b.grad])
                optimizer.step()
                optimizer.zero_grad()
                seen.add_(1)

    job.run(train)


def by_hand(job):
    """No optimizer either."""
    w = torch.zeros(8, 2, requires_grad=True)
    speed = torch.zeros(8, 2)
    job.state(w=w, speed=speed)
    loader = split()

    def train(state):
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                learn(job, lambda x: x @ w, x, y)
                average([w.grad])
                with torch.no_grad():
                    speed.mul_(0.9).add_(w.grad)
                    w.sub_(0.1 * speed)
                w.grad = None

    job.run(train)


def compiled(job, *, is_inner=True):
    """The state is told of the module that torch.compile was given."""
    net = network(nn.BatchNorm1d(16))
    quick = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(quick.parameters(), lr=0.05)
    job.state(model=net if is_inner else quick, optimizer=optimizer)
    fit(job, quick, updates(optimizer))


def compiled_outer(job):
    """Of the one that it made."""
    compiled(job, is_inner=False)


def private_buffers(job):
    """Each rank's batch norm has seen its own data, and nobody evens that out."""
    net = network(nn.BatchNorm1d(16, momentum=0.3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    job.state(model=net, optimizer=optimizer)
    fit(
        job,
        net,
        updates(optimizer),
        wrap=lambda net: DistributedDataParallel(net, broadcast_buffers=False),
    )


def randomness(job):
    """Dropout, and what the loop draws from numpy and python."""
    net = network(nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DistributedDataParallel(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                rolled = x * np.random.uniform(0.9, 1.1) + random.gauss(0, 0.1)
                learn(job, model, rolled.roll(random.randrange(8), 1), y)
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


class Tied(nn.Module):
    """Two layers share their weight; one parameter is frozen, another is never used."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.first = nn.Linear(8, 2, bias=False)
        self.second = nn.Linear(8, 2, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3), requires_grad=False)
        self.into.weight.requires_grad_(False)

    def forward(self, x):
        x = self.into(x)
        return self.second(x.relu()) + 0.5 * self.first(x)


def tied(job):
    net = alike(Tied)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.02)
    job.state(model=net, optimizer=optimizer)
    fit(job, net, updates(optimizer))


class Types(nn.Module):
    """Parameters and buffers of all types and forms; the buffers change in every forward."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(8, 16).half())
        self.brain = nn.Parameter(torch.randn(16, 2).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.wave = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.none = nn.Parameter(torch.empty(0))
        self.crossed = nn.Parameter(torch.randn(4, 2).t())
        self.register_buffer("count", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("bytes", torch.arange(6, dtype=torch.int8))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex128))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("gaps", torch.arange(12.0)[::3])
        self.register_buffer("stripes", torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("tiny", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        self.count += 1
        self.bytes += 1
        self.flags.logical_not_()
        self.turn *= 1j
        self.gaps += x.mean()
        self.stripes[0] += x[0, :3]
        self.tiny.copy_((self.tiny.float() + x[0, :4]).to(torch.float8_e4m3fn))
        self.passing = self.passing + x[0, :2]
        hidden = (x.half() @ self.narrow).bfloat16().relu() @ self.brain
        found = hidden.float() * self.scale + (self.wave * (1 + 1j)).abs()
        return found + (x[:, :2] @ self.crossed).sum(1, keepdim=True)


def types(job):
    net = alike(Types)
    extra = {
        "tiny": torch.zeros(3).to(torch.float8_e5m2),
        "flags": torch.tensor([[True], [False]]),
        "wave": torch.zeros(2, dtype=torch.complex64),
    }
    trained = [p for p in net.parameters() if p.numel()]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    job.state(model=net, optimizer=optimizer, extra=extra)

    def update():
        average([p.grad for p in trained])
        optimizer.step()
        optimizer.zero_grad()
        extra["tiny"].copy_((extra["tiny"].float() + 1).to(torch.float8_e5m2))
        extra["flags"].logical_not_()
        extra["wave"].add_(1j)

    fit(job, net, update, wrap=lambda net: net)


def frozen_in_part(job):
    """A part is trained from the second epoch on."""
    net = network(nn.BatchNorm1d(16))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DistributedDataParallel(net)
        for epoch in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                if epoch == 0:
                    net[0].weight.grad = net[0].bias.grad = None
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


class Meter:
    """Each rank's own, from the third step on; its state is made anew each time."""

    def __init__(self):
        self.count, self.losses = 0, []

    def add(self, loss):
        self.count += 1
        if self.count > 2:
            self.losses.append(loss)

    def state_dict(self):
        return {"count": self.count, "losses": torch.tensor(self.losses, dtype=torch.float64)}

    def load_state_dict(self, state):
        self.count, self.losses = state["count"], state["losses"].tolist()


def meters(job):
    """What is registered comes to differ by rank; weights depend on it."""
    net, one, two = network(), Meter(), Meter()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    job.state(model=net, optimizer=optimizer, meters=[one, two])
    loader = split()

    def train(state):
        model = DistributedDataParallel(net)
        for epoch in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y) * (1 + sum(one.losses) / 100)
                one.add(loss.item())
                if epoch:
                    two.add(float(job.rank))
                job.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


KINDS = {
    each.__name__: each
    for each in (
        tensors,
        by_hand,
        compiled,
        compiled_outer,
        private_buffers,
        randomness,
        tied,
        types,
        frozen_in_part,
        meters,
    )
}
