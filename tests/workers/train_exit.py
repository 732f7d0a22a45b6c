"""A small training that may be asked to leave: in gradient accumulation, in validation, in a load.

BatchNorm, Dropout, momentum, a shuffling sampler, DistributedDataParallel on gloo. Says each step
that it begins, and its final weights. ``--loop`` is who makes the steps: ``batches`` of the state,
the script itself with ``should_exit``, or with ``ExitByRequest``.
"""

import argparse
import hashlib
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import ExitByRequest, OnRequestExit, TrainState, run
from worker_hooks.changes import observer

parser = argparse.ArgumentParser()
parser.add_argument("--loop", default="batches")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=1, help="backwards of an update")
parser.add_argument("--pause", type=float, default=0.0, help="in each step")
parser.add_argument("--load-s", type=float, default=0.0, help="to load a batch")
parser.add_argument("--validate-s", type=float, default=0.0, help="behind each epoch")
parser.add_argument("--workers", type=int, default=0, help="of the loader")
parser.add_argument("--ckpt", default="checkpoints")
parser.add_argument("--files", default="files")
parser.add_argument("--json")
parser.add_argument("--sig", default="SIGTERM")
parser.add_argument("--large", action="store_true", help="no state counts as small")
parser.add_argument("--program", action="store_true", help="export it, too: slow")
options = parser.parse_args()


class Slow(TensorDataset):
    def __getitem__(self, index):
        if options.load_s:
            say(f"loads for step {state.step + 1}")
        time.sleep(options.load_s / 8)
        return super().__getitem__(index)


if options.large:
    observer.COPIED_AT_FIRST = 0
torch.set_num_threads(1)
torch.manual_seed(3)
inputs = torch.randn(128, 8)
labels = (inputs[:, :4].sum(1) > 0).long()
net = nn.Sequential(
    nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
asked = OnRequestExit(
    file_name="Small",
    directory=options.files,
    config_file=options.json,
    sig=signal.Signals[options.sig],
    save_mindir=options.program,
)
state = TrainState(model=net, optimizer=optimizer, ckpt_save_path=options.ckpt, callbacks=[asked])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(100 + rank)
data = Slow(inputs, labels)
sampler = DistributedSampler(data, shuffle=True, seed=5)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=options.workers)


def say(*words):
    print(*words, flush=True)


def step(model, x, y, number):
    say(f"begins step {state.step + 1}, batch {number}")
    time.sleep(options.pause)
    loss = nn.functional.cross_entropy(model(x), y)
    (loss / options.accumulate).backward()
    if number % options.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()


def validate():
    if options.validate_s:
        say(f"validates after step {state.step}")
        net.eval()
        for _ in range(10):
            time.sleep(options.validate_s / 10)
            dist.all_reduce(torch.ones(1))
        net.train()


def by_batches(state):
    model = DistributedDataParallel(net)
    for _epoch in state.epochs(options.epochs):
        for x, y in state.batches(loader):
            step(model, x, y, state.batch)
        validate()


def alone(state):
    """A loop of the script's own, which goes on where ``state.step`` says."""
    model = DistributedDataParallel(net)
    leaves = ExitByRequest(state) if options.loop == "by" else lambda: state.should_exit
    if options.loop == "own" and leaves():
        return
    per_epoch = len(loader)
    for number in range(state.step, options.epochs * per_epoch):
        sampler.set_epoch(number // per_epoch)
        x, y = list(loader)[number % per_epoch]
        step(model, x, y, options.accumulate)
        if leaves():
            say(f"leaves after step {state.step}")
            return


run(by_batches if options.loop == "batches" else alone, state)
digest = hashlib.sha256()
for tensor in net.state_dict().values():
    digest.update(tensor.numpy().tobytes())
say(f"ended at step {state.step}, weights {digest.hexdigest()}")
dist.destroy_process_group()
