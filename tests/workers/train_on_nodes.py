"""A small training whose end is told as a digest; in one step some ranks wait until they may go on.

Dropout, momentum, a shuffling sampler, DistributedDataParallel on gloo. ``--wait STEP:RANKS`` says
which ranks wait, at the beginning of that step, for a file called go; a rank that waits says so.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import CheckpointConfig, ModelCheckpoint, TrainState, run

parser = argparse.ArgumentParser()
parser.add_argument("--is_recover", type=int, default=0)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--wait", default="0:")
parser.add_argument("--ckpt", default="checkpoints")
parser.add_argument("--periodic", default="", help="a ModelCheckpoint saves here each two steps")
parser.add_argument("--pause", type=float, default=0.0, help="in each step")
options = parser.parse_args()
STEP, _, RANKS = options.wait.partition(":")
RANK = int(os.environ["RANK"])

torch.set_num_threads(1)
torch.manual_seed(3)
inputs = torch.randn(64, 8)
labels = (inputs[:, :4].sum(1) > 0).long()
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
if options.periodic:
    config = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=9)
    saving = [ModelCheckpoint("Net", options.periodic, config)]
    state = TrainState(
        model=net, optimizer=optimizer, callbacks=saving, is_recover=options.is_recover
    )
else:
    state = TrainState(model=net, optimizer=optimizer, ckpt_save_path=options.ckpt)
dist.init_process_group("gloo")
torch.manual_seed(100 + RANK)
data = TensorDataset(inputs, labels)
sampler = DistributedSampler(data, shuffle=True, seed=5)
loader = DataLoader(data, batch_size=4, sampler=sampler)
print(f"from step {state.step}", flush=True)


def wait():
    if state.step + 1 == int(STEP) and str(RANK) in RANKS.split(",") and not os.path.exists("go"):
        print(f"waits in step {STEP}", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)


def train(state):
    model = DistributedDataParallel(net)
    for _epoch in state.epochs(options.epochs):
        for x, y in state.batches(loader):
            print(f"begins step {state.step + 1}", flush=True)
            time.sleep(options.pause)
            wait()
            nn.functional.cross_entropy(model(x), y).backward()
            if state.step + 1 == int(STEP):
                print(f"updates step {STEP}", flush=True)
            optimizer.step()
            optimizer.zero_grad()


run(train, state)
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters()))
print(f"ended at step {state.step}, weights {digest.hexdigest()}", flush=True)
dist.destroy_process_group()
