"""A small training that saves checkpoints; its end is told as a digest, to compare runs bit by bit.

BatchNorm, Dropout, AdamW, a shuffling DistributedSampler, DistributedDataParallel on gloo.
`--config JSON` is CheckpointConfig's; `--stop N` kills the rank at step N; `--fill N` makes the
state so many MB larger.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import CheckpointConfig, ModelCheckpoint, TrainState, run

parser = argparse.ArgumentParser()
parser.add_argument("--is_recover", type=int, default=0)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--directory", default="saved")
parser.add_argument("--config", type=json.loads, default={})
parser.add_argument("--stop", type=int, default=-1)
parser.add_argument("--fail", type=int, default=-1, help="raise in this step")
parser.add_argument("--failing", type=int, default=-1, help="only this rank does; -1: all")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--fill", type=int, default=0)
parser.add_argument("--say", action="store_true")
options = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
torch.set_num_threads(1)
torch.manual_seed(3)
inputs = torch.randn(192, 16)
labels = (inputs[:, :4].sum(1) > 0).long()
net = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2)
)  # fmt: skip
net.register_parameter("filling", nn.Parameter(torch.zeros(options.fill * 250_000)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
saving = ModelCheckpoint("Net", options.directory, CheckpointConfig(**options.config))
state = TrainState(
    model=net, optimizer=optimizer, callbacks=[saving], is_recover=options.is_recover
)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(100 + rank)  # Dropout differs between ranks
world = dist.get_world_size()
sampler = DistributedSampler(TensorDataset(inputs, labels), shuffle=True, seed=5)
loader = DataLoader(sampler.dataset, batch_size=24 // world, sampler=sampler)
print(f"from step {state.step}", flush=True)


def train(state):
    model = DistributedDataParallel(net)
    for _epoch in state.epochs(options.epochs):
        for x, y in state.batches(loader):
            if state.step == options.stop:
                os.kill(os.getpid(), 9)
            if options.say:
                print(f"step {state.step}", flush=True)
            loss = nn.functional.cross_entropy(model(x), y) + 0.0 * net.filling.sum()
            loss.backward()
            if state.step == options.fail and options.failing in {-1, rank}:
                raise RuntimeError("the script's own mistake")
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(options.pause)
    del model


run(train, state)
digest = hashlib.sha256()
for name, tensor in net.state_dict().items():
    if rank == 0 or "running" not in name:  # each rank has its own statistics
        digest.update(tensor.numpy().tobytes())
print(f"end {state.step} {digest.hexdigest()[:16]}", flush=True)
Path(f"end.{rank}").write_text(f"{state.step} {digest.hexdigest()}")
dist.destroy_process_group()
