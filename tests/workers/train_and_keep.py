# ruff: noqa: PLW0603  globals are what this is about
"""Trains with values that no TrainState knows of, as scripts do, and says at the end what they are.

    train_and_keep.py OUT

Weights depend on all of them: a learning rate from a counter outside of `train`, an early stop from
a deque, noise from generators of its own, a running mean, an object's attribute, a closure's cell.
"""

import hashlib
import json
import math
import os
import sys
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import TrainState, run

RANK = int(os.environ["RANK"])
EPOCHS, BATCHES = 3, 4

iter_num = 0
best = math.inf
recent = deque(maxlen=5)
noise = np.random.RandomState(7 + RANK)
dropped = np.random.default_rng(3)
mean = torch.zeros(4)
samples, seen = [0], {"ranks": [0, 0, 0]}


class Meter:
    """An object of the script's own."""

    def __init__(self):
        self.total = 0.0
        self.count = 0

    def update(self, value):
        self.total += value
        self.count += 1


meter = Meter()


def warm_up(iteration):
    return 0.1 * min(1.0, (iteration + 1) / 10)


def main(out):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(3 * 4 * BATCHES, 4), torch.randn(3 * 4 * BATCHES, 4))
    dist.init_process_group("gloo")
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    state = TrainState(model=net, optimizer=opt, ckpt_save_path="checkpoints")
    decay, stale = 1.0, 0
    history = []

    def train(state):
        global best, iter_num
        nonlocal decay, stale
        model = DistributedDataParallel(net)
        state.own.setdefault(worst=0.0, of_rank=RANK, draws=torch.Generator().manual_seed(RANK))
        state.shared.setdefault(steps=0)
        for _ in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                for group in opt.param_groups:
                    group["lr"] = warm_up(iter_num) * decay
                shift = torch.from_numpy(noise.normal(size=(4,)).astype("float32"))
                shift += torch.randn(4, generator=state.own.draws) * 0.1
                mean.mul_(0.9).add_(shift * 0.1)
                loss = (model(x + shift - mean) - y).square().mean() * (1 + dropped.random())
                seen["ranks"][RANK] += 1  # what differs between ranks changes before backward
                state.own.worst = max(state.own.worst, loss.item())
                opt.zero_grad()
                loss.backward()
                dist.all_reduce(shared := loss.detach().clone())
                shared = shared.item()
                opt.step()
                iter_num += 1
                recent.append(shared)
                history.append(shared)
                samples[0] += len(x)
                meter.update(shared)
                state.shared.steps += 1
                stale = stale + 1 if shared > sum(recent) / len(recent) else 0
                if stale >= 2:
                    decay *= 0.5
            if RANK == 0:
                best = min(best, recent[-1])
        decay *= 0.9

    run(train, state)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    found = {
        "weights": digest.hexdigest(),
        "iter_num": iter_num,
        "best": best.hex(),
        "recent": [each.hex() for each in recent],
        "history": [each.hex() for each in history],
        "noise": [noise.random_sample(), dropped.random()],
        "draws": torch.rand(1, generator=state.own.draws).item(),
        "mean": mean.tolist(),
        "seen": [samples, seen],
        "meter": [meter.total.hex(), meter.count],
        "cells": [decay, stale],
        "own": [state.own.worst, state.own.of_rank, state.shared.steps],
    }
    print(f"rank {RANK} ended at step {state.step}", flush=True)
    Path(out, f"{RANK}.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    main(sys.argv[1])
