"""A small training whose end is told as a digest; in some steps ranks wait until they may go on.

Dropout, momentum, a shuffling sampler, DistributedDataParallel on gloo. ``--wait STEP:RANKS`` says
which ranks wait, at the beginning of that step, for a file called go; a rank that waits says so.
Given again it is for a later step and a file of its own, go_STEP. A job that loses a node may lose
what its ranks alone had if another one is so busy that an update does not wait for it any longer;
with ``--patient`` it waits.
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
from worker_hooks.guard import update_clearance

parser = argparse.ArgumentParser()
parser.add_argument("--is_recover", type=int, default=0)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--wait", action="append", default=[])
parser.add_argument("--ckpt", default="checkpoints")
parser.add_argument("--periodic", default="", help="a ModelCheckpoint saves here each two steps")
parser.add_argument("--dumps", help="a folder for what msrun saves beside that")
parser.add_argument("--pause", type=float, default=0.0, help="in each step")
parser.add_argument("--table", type=int, default=0, help="MiB of numbers that no step changes")
parser.add_argument("--again", action="store_true", help="train() changes them before its loop")
parser.add_argument("--object", action="store_true", help="they are an object's with a state_dict")
parser.add_argument("--patient", action="store_true", help="updates wait for busy nodes as well")
options = parser.parse_args()
if options.patient:
    update_clearance.PATIENCE_S = 120.0
WAITS = {int(step): ranks.split(",") for step, _, ranks in (w.partition(":") for w in options.wait)}
STEP = next(iter(WAITS), 0)
RANK = int(os.environ["RANK"])

torch.set_num_threads(1)
torch.manual_seed(3)
inputs = torch.randn(64, 8)
labels = (inputs[:, :4].sum(1) > 0).long()
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
table = torch.arange(options.table << 18, dtype=torch.float32)


class Holder:
    """An object of the script with a large tensor, which no rank compares with others."""

    def state_dict(self):
        return {"table": table}

    def load_state_dict(self, state):
        table.copy_(state["table"])


if options.periodic:
    config = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=9)
    saving = [ModelCheckpoint("Net", options.periodic, config)]
    state = TrainState(
        model=net,
        optimizer=optimizer,
        ckpt_save_path=options.dumps,
        callbacks=saving,
        is_recover=options.is_recover,
    )
else:
    tables = {"table": Holder() if options.object else table} if options.table else {}
    state = TrainState(model=net, optimizer=optimizer, ckpt_save_path=options.ckpt, **tables)
dist.init_process_group("gloo")
torch.manual_seed(100 + RANK)
data = TensorDataset(inputs, labels)
sampler = DistributedSampler(data, shuffle=True, seed=5)
loader = DataLoader(data, batch_size=4, sampler=sampler)
print(f"from step {state.step}", flush=True)


def wait():
    step = state.step + 1
    file = "go" if step == STEP else f"go_{step}"
    if str(RANK) in WAITS.get(step, ()) and not os.path.exists(file):
        print(f"waits in step {step}", flush=True)
        while not os.path.exists(file):
            time.sleep(0.01)


def train(state):
    model = DistributedDataParallel(net)
    if options.again:
        table.add_(1)
    for _epoch in state.epochs(options.epochs):
        for x, y in state.batches(loader):
            print(f"begins step {state.step + 1}", flush=True)
            time.sleep(options.pause)
            wait()
            nn.functional.cross_entropy(model(x), y).backward()
            if state.step + 1 == STEP:
                print(f"updates step {STEP}", flush=True)
            optimizer.step()
            optimizer.zero_grad()


run(train, state)
tensors = *net.parameters(), table
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors))
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
print(f"ended at step {state.step}, weights {digest.hexdigest()}, attempt {attempt}", flush=True)
dist.destroy_process_group()
