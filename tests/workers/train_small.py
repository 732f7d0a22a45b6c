"""A small training that exercises whatever must come back after a death, bit for bit.

BatchNorm, Dropout, AdamW, a scheduler, a shuffling DistributedSampler, two backwards an update,
DistributedDataParallel on gloo. `--steps N` stops after N updates, `--epochs N` counts loops over
the data; `--pause S` makes a step slower, `--late S` some ranks' updates; with `--meet`, a rank in a forward
proves that every rank committed the step before. `--stay PLACE` holds a newcomer there. The digest at the end is of all
that a rank holds. At SIGUSR1 a rank keeps the interpreter to itself, for ever. Like most scripts', its parser refuses arguments that it does not know.
"""

import argparse
import atexit
import ctypes
import hashlib
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import TrainState, run
from worker_hooks.changes import observer

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--late", type=float, default=0.0, help="all ranks but 0, before an update")
parser.add_argument("--meet", action="store_true", help="all ranks, before each forward")
parser.add_argument("--inside", action="store_true", help="train() makes the process group")
parser.add_argument("--ckpt", default="checkpoints")
parser.add_argument("--say", action="store_true", help="each step")
parser.add_argument(
    "--stay", choices=["start", "state", "group", "model", "batch"], help="a newcomer, for ever"
)
parser.add_argument("--evaluate", type=int, help="this rank, after training, in its first life")
parser.add_argument("--linger", type=int, help="this rank, on its way out, for ever")
parser.add_argument("--fill", type=int, default=0, help="MB of weights more")
parser.add_argument("--large", action="store_true", help="no state counts as small")
parser.add_argument("--digest", action="store_true", help="at the end, of all that the rank holds")
options = parser.parse_args()
signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).pause())
is_newcomer = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"


def linger():
    if int(os.environ["RANK"]) == options.linger:
        print("on its way out", flush=True)
        signal.pause()


atexit.register(linger)  # first: it runs last


def arrive(place):
    if is_newcomer and options.stay == place:
        print(f"stays at {place}", flush=True)
        signal.pause()


arrive("start")
ACCUMULATED = 2
if options.large:
    observer.COPIED_AT_FIRST = 0
torch.set_num_threads(1)
torch.manual_seed(3)
inputs = torch.randn(256, 16)
labels = (inputs[:, :4].sum(1) > 0).long()
net = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
)  # fmt: skip
if options.fill:
    net.register_parameter("filling", nn.Parameter(torch.zeros(options.fill * 250_000)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
state = TrainState(model=net, optimizer=optimizer, scheduler=scheduler, ckpt_save_path=options.ckpt)
arrive("state")
if not options.inside:
    dist.init_process_group("gloo")
arrive("group")
torch.manual_seed(100 + int(os.environ["RANK"]))  # Dropout differs between ranks
world = int(os.environ["WORLD_SIZE"])
sampler = DistributedSampler(
    TensorDataset(inputs, labels), world, int(os.environ["RANK"]), shuffle=True, seed=5
)
loader = DataLoader(sampler.dataset, batch_size=max(2, 256 // world // 16), sampler=sampler)


def train(state):
    if options.inside:
        dist.init_process_group("gloo")
    arrive("model")
    model = DistributedDataParallel(net)
    for _epoch in state.epochs(options.epochs):
        for x, y in state.batches(loader):
            arrive("batch")
            if state.step >= options.steps:
                break
            time.sleep(options.pause)
            if options.meet:
                dist.barrier()
            loss = nn.functional.cross_entropy(model(x), y)
            if options.fill:
                loss = loss + 0.0 * net.filling.sum()
            (loss / ACCUMULATED).backward()
            if state.batch % ACCUMULATED == 0:
                time.sleep(options.late if dist.get_rank() else 0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if options.say:
                    print(f"step {state.step + 1}", flush=True)
    del model


run(train, state)
print(f"trained to step {state.step}", flush=True)
if options.digest:
    held = [*net.state_dict().values(), torch.get_rng_state(), torch.rand(3)]
    told = hashlib.sha256(b"".join(each.numpy().tobytes() for each in held))
    print(f"digest {told.hexdigest()}", flush=True)
dist.destroy_process_group()
if int(os.environ["RANK"]) == options.evaluate and not is_newcomer:
    print("evaluates", flush=True)
    signal.pause()
