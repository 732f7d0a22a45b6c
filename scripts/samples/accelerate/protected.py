"""Accelerate: gradient accumulation, a schedule, a validation and a saved state per epoch."""

import argparse
import hashlib
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from msrun import run
from worker_hooks.adapters.accelerate import protect

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(1)
inputs = torch.randn(1100, 16)
labels = inputs[:, :4].argmax(1)
train_data = TensorDataset(inputs[:900], labels[:900])
valid_data = TensorDataset(inputs[900:], labels[900:])
net = nn.Sequential(
    nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
)
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=400)
history = []
state = protect(
    accelerator, model=net, optimizer=opt, scheduler=sched, ckpt_save_path="checkpoints"
)


def train(state):
    model, optimizer, scheduler, loader, valid = accelerator.prepare(
        net, opt, sched, DataLoader(train_data, 16, shuffle=True), DataLoader(valid_data, 64)
    )
    for epoch in state.epochs(args.epochs):
        model.train()
        state.own.total = 0.0
        for x, y in state.batches(loader):
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                state.own.total += loss.item()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for x, y in valid:
            with torch.no_grad():
                found = model(x).argmax(1)
            right.append(accelerator.gather_for_metrics((found == y).float()))
        accuracy = torch.cat(right).mean().item()
        mean = accelerator.reduce(torch.tensor(state.own.total), "mean").item() / len(loader)
        history.append({"epoch": epoch, "loss": mean, "accuracy": accuracy})
        accelerator.print(f"epoch {epoch} loss {mean:.4f} accuracy {accuracy:.4f}", flush=True)
        accelerator.save_state(f"states/epoch_{epoch}")


run(train, state)
digest = hashlib.sha256(json.dumps(history).encode())
for value in net.state_dict().values():
    digest.update(value.numpy().tobytes())
accelerator.print(f"weights and history {digest.hexdigest()[:12]}")
accelerator.end_training()
