"""A training as people write it for accelerators, that a check kills: DDP, BatchNorm, AdamW, AMP.

    train.py --device cuda --steps 60 [--ema] [--no-state]

Prints the median of a step in milliseconds at the end.
"""

import argparse
import copy
import os
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run

WARM_UP = 10  # steps
parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu", help="cpu, or a kind of accelerator: cuda, xpu, npu")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--pause", type=float, default=0.02, help="seconds a step, to be struck in")
parser.add_argument(
    "--ema", action="store_true", help="an average of the weights behind the update"
)
parser.add_argument("--item", action="store_true", help="reads the loss in each step")
parser.add_argument("--no-state", action="store_true", help="without TrainState, to compare speeds")
options = parser.parse_args()

local = int(os.environ["LOCAL_RANK"])
device = torch.device(options.device, local) if options.device != "cpu" else torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(local)
torch.use_deterministic_algorithms(mode=True, warn_only=True)
torch.manual_seed(3)
inputs = torch.randn(4096, 64)
labels = (inputs[:, :8].sum(1) > 0).long()
net = nn.Sequential(
    *(nn.Linear(64, options.width), nn.BatchNorm1d(options.width), nn.ReLU(), nn.Dropout(0.1)),
    *(nn.Linear(options.width, options.width), nn.ReLU(), nn.Linear(options.width, 2)),
).to(device)
average = copy.deepcopy(net).requires_grad_(requires_grad=False) if options.ema else None
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
more = {"average": average} if average is not None else {}
state = (
    None if options.no_state else TrainState(model=net, optimizer=opt, ckpt_save_path="ck", **more)
)
dist.init_process_group(dist.get_default_backend_for_device(device))
torch.manual_seed(100 + dist.get_rank())  # Dropout differs between ranks
times: list[float] = []
if state is not None:
    state.ignore("times")  # a rank's own, and no part of the training


def batches_of(loader: DataLoader):
    return loader if state is None else state.batches(loader)


def train(_state=None):
    model = DistributedDataParallel(net, device_ids=None if device.type == "cpu" else [local])
    data = TensorDataset(inputs, labels)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, seed=5))
    done = 0
    for _ in range(options.steps) if state is None else state.epochs(options.steps):
        began = time.monotonic()
        for x, y in batches_of(loader):
            if (done := done + 1 if state is None else state.step) >= options.steps:
                return
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if average is not None:
                with torch.no_grad():
                    for mean, now in zip(average.parameters(), net.parameters(), strict=True):
                        mean.lerp_(now, 0.1)
            if options.item:
                loss.item()
            time.sleep(options.pause)
            began, took = time.monotonic(), time.monotonic() - began
            times.append(took)


if state is None:
    train()
else:
    run(train, state)
if device.type != "cpu":
    torch.accelerator.synchronize(device)
if dist.get_rank() == 0 and times[WARM_UP:]:
    print(f"median step {median(times[WARM_UP:]) * 1e3:.3f} ms", flush=True)
dist.destroy_process_group()
