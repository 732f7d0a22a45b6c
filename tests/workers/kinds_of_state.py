"""Trainings that differ in what they hold: parameters, optimizers, buffers, types."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3


def samples(count=96):
    """Twelve steps of three ranks in three epochs."""
    make = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=make)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def split(dataset=None, batch=8, **options):
    dataset = samples() if dataset is None else dataset
    sampler = DistributedSampler(dataset, shuffle=True, seed=5)
    return DataLoader(dataset, batch, sampler=sampler, **options)


def made(make):
    """The same on all ranks, whatever was drawn before."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


def network(*between):
    return made(lambda: nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 2)))


def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def tensors(job):
    w = torch.zeros(8, 2, requires_grad=True)
    b = torch.zeros(2, requires_grad=True)
    seen = torch.zeros((), dtype=torch.int64)
    optimizer = torch.optim.SGD([w, b], lr=0.1, momentum=0.9)
    state = job.state(weights=[w, b], seen=seen, optimizer=optimizer)
    loader = split()

    def train(state):
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(x @ w + b, y)
                job.note("loss", loss)
                loss.backward()
                average([w.grad, b.grad])
                optimizer.step()
                optimizer.zero_grad()
                seen.add_(1)

    job.run(train)


def by_hand(job):
    """No optimizer at all."""
    w = torch.zeros(8, 2, requires_grad=True)
    speed = torch.zeros(8, 2)
    job.state(w=w, speed=speed)
    loader = split()

    def train(state):
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(x @ w, y)
                job.note("loss", loss)
                loss.backward()
                average([w.grad])
                with torch.no_grad():
                    speed.mul_(0.9).add_(w.grad)
                    w.sub_(0.1 * speed)
                w.grad = None

    job.run(train)


def gan(job):
    maker = made(lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    judge = made(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)))
    opt_maker = torch.optim.Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.9))
    opt_judge = torch.optim.RMSprop(judge.parameters(), lr=0.01)
    job.state(
        model={"maker": maker, "judge": judge}, optimizer={"maker": opt_maker, "judge": opt_judge}
    )
    loader = split()

    def train(state):
        outer_maker, outer_judge = DDP(maker), DDP(judge)
        for _ in state.epochs(EPOCHS):
            for x, _ in state.batches(loader):
                fake = outer_maker(torch.randn(len(x), 4))
                both = torch.cat((x, fake.detach()))
                truth = torch.cat((torch.ones(len(x), 1), torch.zeros(len(x), 1)))
                loss = mse_loss(outer_judge(both), truth)
                job.note("judge", loss)
                loss.backward()
                opt_judge.step()
                loss = mse_loss(judge(fake), torch.ones(len(x), 1))
                job.note("maker", loss)
                loss.backward()
                opt_maker.step()
                opt_maker.zero_grad()
                opt_judge.zero_grad()

    job.run(train)


def accumulate(job):
    net = network(nn.BatchNorm1d(16), nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    job.state(model=net, optimizer=optimizer)
    loader = split(batch=4)

    def train(state):
        model = DDP(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                if state.batch % 2:
                    with model.no_sync():
                        loss = cross_entropy(model(x), y)
                        job.note("loss", loss)
                        loss.backward()
                    continue
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


def scaler(job):
    """Some updates are skipped because of infinite gradients."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    job.state(model=net, optimizer=optimizer, scaler=grad_scaler)
    loader = split(batch=4)

    def train(state):
        model = DDP(net)
        for epoch in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = cross_entropy(model(x).float(), y)
                if (epoch, state.batch) in {(0, 1), (1, 3), (2, 1)}:
                    loss = loss * torch.inf
                job.note("loss", loss)
                grad_scaler.scale(loss).backward()
                grad_scaler.step(optimizer)
                grad_scaler.update()
                optimizer.zero_grad()

    job.run(train)


def clip(job):
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, amsgrad=True)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DDP(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                job.note("norm", nn.utils.clip_grad_norm_(net.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


def schedules(job):
    """One schedule a batch, one a batch in two parts, and one an epoch that looks at the loss."""
    net = network()
    first, second = (
        torch.optim.SGD(net[at].parameters(), lr=0.1, momentum=0.9) for at in (0, 2)
    )
    parts = [schedulers.LinearLR(first, total_iters=5), schedulers.CosineAnnealingLR(first, 9)]
    by_batch = [
        schedulers.SequentialLR(first, parts, [5]),
        schedulers.OneCycleLR(second, 0.2, total_steps=EPOCHS * 4),
    ]
    third = torch.optim.Adam([net[0].bias, net[2].bias], lr=0.01)
    by_epoch = schedulers.ReduceLROnPlateau(third, factor=0.5, patience=0, threshold=10)
    job.state(model=net, optimizer=[first, second, third], scheduler=[*by_batch, by_epoch])
    loader = split()

    def train(state):
        model = DDP(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                for optimizer in (first, second, third):
                    optimizer.step()
                net.zero_grad()
                for each in by_batch:
                    each.step()
            total = loss.detach()
            average([total])
            job.note("rate", third.param_groups[0]["lr"])
            by_epoch.step(total)

    job.run(train)


def compiled(job, inner=True):
    net = network(nn.BatchNorm1d(16))
    quick = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(quick.parameters(), lr=0.05)
    job.state(model=net if inner else quick, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DDP(quick)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


def compiled_outer(job):
    compiled(job, inner=False)


def private_buffers(job):
    """Each rank's batch norm has seen its own data, and nobody evens that out."""
    net = network(nn.BatchNorm1d(16, momentum=0.3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DDP(net, broadcast_buffers=False)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


def randomness(job):
    """Dropout, and what a training loop draws for itself, some of it after the update."""
    net = network(nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DDP(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                x = x * np.random.uniform(0.9, 1.1) + random.gauss(0, 0.1)
                if random.random() < 0.5:
                    x = x.flip(0)
                    y = y.flip(0)
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


class Tied(nn.Module):
    """Words in and out share a table; a part is frozen, another is never used."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.table = nn.Linear(8, 2, bias=False)
        self.out = nn.Linear(8, 2, bias=False)
        self.out.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(3), requires_grad=False)
        self.into.weight.requires_grad_(False)

    def forward(self, x):
        x = self.into(x)
        return self.out(x.relu()) + 0.5 * self.table(x)


def tied(job):
    net = made(Tied)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.02)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DDP(net)
        for epoch in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    job.run(train)


class Types(nn.Module):
    """Parameters and buffers of all kinds; some buffers change in every forward."""

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
        self.register_buffer("sparse", torch.arange(12.0)[::3])
        self.register_buffer("stripes", torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("tiny", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        if self.training:
            self.count += 1
            self.bytes += 1
            self.flags.logical_not_()
            self.turn *= 1j
            self.sparse += x.mean().detach()
            self.stripes[0] += x[0, :3]
            self.tiny.copy_((self.tiny.float() + x[0, :4]).to(torch.float8_e4m3fn))
            self.passing = self.passing + x[0, :2]
        hidden = (x.half() @ self.narrow).bfloat16().relu() @ self.brain
        found = hidden.float() * self.scale + (self.wave * (1 + 1j)).abs()
        return found + (x[:, :2] @ self.crossed).sum(1, keepdim=True)


def types(job):
    net = made(Types)
    extra = {
        "tiny": torch.zeros(3).to(torch.float8_e5m2),
        "flags": torch.tensor([[True], [False]]),
        "wave": torch.zeros(2, dtype=torch.complex64),
    }
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.numel()], lr=0.05, momentum=0.9)
    job.state(model=net, optimizer=optimizer, extra=extra)
    loader = split()

    def train(state):
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(net(x), y)
                job.note("loss", loss)
                loss.backward()
                average([p.grad for p in net.parameters() if p.numel()])
                optimizer.step()
                optimizer.zero_grad()
                extra["tiny"].copy_(torch.full((3,), float(state.batch)).to(torch.float8_e5m2))
                extra["flags"].logical_not_()
                extra["wave"].add_(1j)

    job.run(train)


def averages(job):
    """Two averages of the weights, one of which counts; both are made after the update."""
    net = network()
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    job.state(model=net, optimizer=optimizer, ema=ema, swa=swa)
    loader = split()

    def train(state):
        model = DDP(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ema.update_parameters(net)
                swa.update_parameters(net)

    job.run(train)


def kept_gradients(job):
    """Gradients are zeros and not None; with momentum and no use of a part of the network."""
    net = network()
    spare = made(lambda: nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*net.parameters(), *spare.parameters()], lr=0.1, momentum=0.9, weight_decay=0.01)
    job.state(model=[net, spare], optimizer=optimizer)
    loader = split()

    def train(state):
        model = DDP(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = cross_entropy(model(x), y)
                job.note("loss", loss)
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()

    job.run(train)


KINDS = {
    each.__name__: each
    for each in (
        tensors,
        by_hand,
        gan,
        accumulate,
        scaler,
        clip,
        schedules,
        compiled,
        compiled_outer,
        private_buffers,
        randomness,
        tied,
        types,
        averages,
        kept_gradients,
    )
}
