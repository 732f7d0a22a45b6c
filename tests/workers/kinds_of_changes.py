"""Trainings that change their state elsewhere than in an optimizer's update, seen by torch or not."""

from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from toys import EPOCHS, alike, average, learn, network, split


def deep():
    """Sixteen parameters."""
    layers = (each for _ in range(7) for each in (nn.Linear(8, 8), nn.Tanh()))
    return alike(lambda: nn.Sequential(*layers, nn.Linear(8, 2)))


def steps(job, net, before=None, after=None, **objects):
    """Train; ``before`` is called at the top of a step, ``after`` behind its update."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    job.state(model=net, optimizer=optimizer, **objects)
    loader = split()

    def train(state):
        model = DistributedDataParallel(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                if before is not None:
                    before(x)
                noted = learn(job, model, x, y)
                optimizer.step()
                optimizer.zero_grad()
                if after is not None:
                    after(noted)

    job.run(train)


def decay(job):
    """The first four parameters shrink at the top of a step."""
    net = deep()

    def shrink(_):
        with torch.no_grad():
            for each in list(net.parameters())[:4]:
                each.mul_(0.95)

    steps(job, net, shrink)


class Momentum(nn.Module):
    """A network and its slow copy, which follows in every forward."""

    def __init__(self, follow):
        super().__init__()
        self.quick, self.slow = alike(deep), alike(deep)
        self.slow.requires_grad_(False)
        self.follow = follow

    def forward(self, x):
        with torch.no_grad():
            for slow, quick in zip(self.slow.parameters(), self.quick.parameters(), strict=True):
                self.follow(slow, quick)
            target = self.slow(x)
        return self.quick(x) + 0.5 * target


def follow_data(slow, quick):
    slow.data = slow.data * 0.9 + quick.data * 0.1


def follow(slow, quick):
    slow.mul_(0.9).add_(quick, alpha=0.1)


def encoder_data(job):
    """As MoCo does it."""
    steps(job, Momentum(follow_data))


def encoder(job):
    steps(job, Momentum(follow))


def average_logged(job):
    """An average of the weights, written through .data, and only behind what all ranks log."""
    net, slow = deep(), deep()

    def after(loss):
        average([loss])
        job.note("average", loss)
        for each, other in zip(slow.parameters(), net.parameters(), strict=True):
            each.data.mul_(0.9).add_(other.data, alpha=0.1)

    steps(job, net, after=after, slow=slow)


class Queue:
    """More than what is copied at each commit anyway."""

    def __init__(self):
        self.rows = torch.zeros(2048, 9)
        self.at = torch.zeros(1, dtype=torch.int64)

    def push(self, x):
        at = int(self.at)
        self.rows[at : at + 8, :8] = self.rows[at : at + 8, :8] + x.mean()
        self.rows[:, 8] += 1
        self.at.add_(8).remainder_(2048)

    def state_dict(self):
        return {"rows": self.rows, "at": self.at}

    def load_state_dict(self, state):
        self.rows.copy_(state["rows"])
        self.at.copy_(state["at"])


def queue(job):
    """Pushed to at the top of a step; the same on all ranks."""
    rows = Queue()

    def push(x):
        mean = x.mean()
        average([mean])
        rows.push(mean)

    steps(job, deep(), push, queue=rows)


def noise(job):
    """Weights get noise behind their update, from a seed that all ranks share."""
    net = deep()
    job.reseed(0)

    def shake(_):
        with torch.no_grad():
            for each in net.parameters():
                each.add_(torch.randn_like(each), alpha=0.01)

    steps(job, net, after=shake)


def late_luck(job):
    """Dropout, and each rank draws from a seed of its own behind the update, too."""
    steps(job, network(nn.Dropout(0.3)), after=lambda _: torch.randn(3))


def late_stats(job):
    """A slow copy with the statistics of each rank's own batches, averaged behind the update."""
    net, slow = network(nn.BatchNorm1d(16)), network(nn.BatchNorm1d(16))

    def after(_):
        with torch.no_grad():
            for each, other in zip(slow.buffers(), net.buffers(), strict=True):
                each.copy_(each * 0.9 + other * 0.1)

    steps(job, net, after=after, slow=slow)


def late_table(job):
    """A large buffer that all ranks change in the same way behind the update."""
    net, table = network(nn.BatchNorm1d(16)), nn.Module()
    table.register_buffer("rows", torch.ones(300, 100))

    def after(_):
        table.rows.mul_(0.9).add_(torch.arange(100.0))

    steps(job, net, after=after, table=table)


def clip_vector(job):
    """All weights are cut to a length at the top of a step, by way of a vector."""
    net = deep()

    def cut(_):
        vector = parameters_to_vector(net.parameters()).detach()
        vector_to_parameters(vector / (vector.norm() / 3 + 0.1), net.parameters())

    steps(job, net, cut)


def captured(job):
    """The first two updates are captured in a graph, as far as one can tell without a GPU.

    All later ones are replays: no hook of the optimizer and no version of a tensor tells of them.
    """
    net = deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.state(model=net, optimizer=optimizer)
    loader = split()
    is_captured = mock.patch.multiple(
        torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True
    )

    def train(state):
        model = DistributedDataParallel(net)
        for epoch in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                learn(job, model, x, y)
                if (epoch, state.batch) == (1, 2):
                    job.die()
                if epoch == 0 and state.batch <= 2:
                    with is_captured:
                        optimizer.step()
                else:
                    for each in net.parameters():
                        each.data.add_(each.grad, alpha=-0.1)
                optimizer.zero_grad()

    job.run(train)


KINDS = {
    each.__name__: each
    for each in (
        decay,
        encoder_data,
        encoder,
        average_logged,
        queue,
        noise,
        late_luck,
        late_stats,
        late_table,
        clip_vector,
        captured,
    )
}
