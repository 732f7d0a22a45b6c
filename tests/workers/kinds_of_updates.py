"""Trainings that differ in how a step updates: optimizers, schedules, scalers, averages."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import EPOCHS, alike, average, fit, learn, network, split, updates


def gan(job):
    """Two networks, two optimizers, two backwards a step."""
    maker = alike(lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    judge = alike(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    opt_maker = torch.optim.Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.9))
    opt_judge = torch.optim.RMSprop(judge.parameters(), lr=0.01)
    job.state(
        model={"maker": maker, "judge": judge}, optimizer={"maker": opt_maker, "judge": opt_judge}
    )
    loader = split()

    def train(state):
        all_maker, all_judge = DistributedDataParallel(maker), DistributedDataParallel(judge)
        for _ in state.epochs(EPOCHS):
            for x, _ in state.batches(loader):
                yes, no = torch.ones(len(x), 1), torch.zeros(len(x), 1)
                fake = all_maker(torch.randn(len(x), 4))
                loss = mse_loss(all_judge(torch.cat((x, fake.detach()))), torch.cat((yes, no)))
                job.note("judge", loss)
                loss.backward()
                opt_judge.step()
                loss = mse_loss(judge(fake), yes)
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
        model = DistributedDataParallel(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                if state.batch % 2:
                    with model.no_sync():
                        learn(job, model, x, y)
                else:
                    learn(job, model, x, y)
                    optimizer.step()
                    optimizer.zero_grad()

    job.run(train)


def scaler(job):
    """Some updates are skipped because of infinite gradients, by the number of a batch."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    job.state(model=net, optimizer=optimizer, scaler=grad_scaler)
    loader = split(batch=4)

    def train(state):
        model = DistributedDataParallel(net)
        for epoch in state.epochs(EPOCHS):
            for number, (x, y) in enumerate(state.batches(loader), 1):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = cross_entropy(model(x).float(), y)
                if (epoch, number) in {(0, 1), (1, 3), (2, 1)}:
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

    def update():
        job.note("norm", nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()

    fit(job, net, update)


class Meter:
    """Adds up over an epoch, so it must be registered to survive one that is interrupted."""

    def __init__(self):
        self.total = 0.0

    def add(self, value):
        self.total += value

    def take(self):
        total, self.total = self.total, 0.0
        return total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def schedules(job):
    """One schedule a batch, one a batch in two parts, and one an epoch that looks at the loss."""
    net = network()
    first, second = (torch.optim.SGD(net[at].parameters(), lr=0.1, momentum=0.9) for at in (0, 2))
    parts = [lr_scheduler.LinearLR(first, total_iters=5), lr_scheduler.CosineAnnealingLR(first, 9)]
    by_batch = [
        lr_scheduler.SequentialLR(first, parts, [5]),
        lr_scheduler.OneCycleLR(second, 0.2, total_steps=EPOCHS * 4),
    ]
    third = torch.optim.Adam([net[0].bias, net[2].bias], lr=0.01)
    by_epoch = lr_scheduler.ReduceLROnPlateau(third, factor=0.5, patience=0, threshold=10)
    meter = Meter()
    job.state(
        model=net,
        optimizer=[first, second, third],
        scheduler=[*by_batch, by_epoch],
        meter=meter,
    )
    loader = split()

    def train(state):
        model = DistributedDataParallel(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                loss = learn(job, model, x, y)
                average([loss])
                for each in (first, second, third, *by_batch):
                    each.step()
                net.zero_grad()
                meter.add(loss.item())
            by_epoch.step(meter.take())
            job.note("rate", third.param_groups[0]["lr"])

    job.run(train)


def averages(job):
    """Two averages of the weights, one of which counts; both are made after the update."""
    net = network()
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    job.state(model=net, optimizer=optimizer, ema=ema, swa=swa)

    def update():
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(net)
        swa.update_parameters(net)

    fit(job, net, update)


def kept_gradients(job):
    """Gradients stay tensors of zeros; a part of what is registered has none at all."""
    net, spare = network(), alike(lambda: nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [*net.parameters(), *spare.parameters()], lr=0.1, momentum=0.9, weight_decay=0.01
    )
    job.state(model=[net, spare], optimizer=optimizer)

    def update():
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    fit(job, net, update)


def closure(job):
    """An optimizer that calls for gradients itself, several times a step."""
    net = network()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, history_size=4)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):

                def again(x=x, y=y):
                    optimizer.zero_grad()
                    loss = learn(job, net, x, y)
                    average([loss, *(p.grad for p in net.parameters())])
                    return loss

                optimizer.step(again)

    job.run(train)


def asked(job):
    """Forward and backward inside the optimizer's step, as Lightning does it."""
    net = network(nn.BatchNorm1d(16), nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    job.state(model=net, optimizer=optimizer)
    loader = split()

    def train(state):
        model = DistributedDataParallel(net)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):

                def closure(x=x, y=y):
                    optimizer.zero_grad()
                    return learn(job, model, x, y)

                optimizer.step(closure=closure)

    job.run(train)


def foreach_group(job):
    """Groups with their own rates, one added when training has begun."""
    net = network()
    optimizer = torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.02}, {"params": [net[2].weight]}],
        lr=0.05,
        foreach=True,
    )
    optimizer.add_param_group({"params": [net[2].bias], "weight_decay": 0.0})
    job.state(model=net, optimizer=optimizer)
    fit(job, net, updates(optimizer))


KINDS = {
    each.__name__: each
    for each in (
        gan,
        accumulate,
        scaler,
        clip,
        schedules,
        averages,
        kept_gradients,
        closure,
        asked,
        foreach_group,
    )
}
