"""Trains inside run(), and says late where a step ends, or never: counts_late.py [epochs|late]."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from msrun import TrainState, run

dist.init_process_group("gloo")
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
state = TrainState(model=net, optimizer=optimizer, ckpt_save_path="checkpoints")


def train(state: TrainState) -> None:
    model = DistributedDataParallel(net)
    for _ in state.epochs(1) if "epochs" in sys.argv else [0]:
        for _ in range(80):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            time.sleep(0.05)  # a model of a hundred times this size
    while "late" in sys.argv and state.step < 100 and not state.should_exit:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


run(train, state)
dist.destroy_process_group()
