"""Trains the head of a model, and the rest of it from the second of three epochs on.

    adds_group.py OUT again|once

``again``: a script that begins within a later epoch adds the group, too; ``once``: it does not.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import TrainState, run

EPOCHS = 3  # of four steps


def main(out, how):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    body, norm, head = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    net = torch.nn.Sequential(body, head)
    opt = torch.optim.Adam(head.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    state = TrainState(model=net, optimizer=opt)
    dist.init_process_group("gloo")
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))

    def train(state):
        for epoch in state.epochs(EPOCHS):
            if epoch == 1 or (how == "again" and epoch > 1 and len(net) == 2):
                net.insert(1, norm)
                opt.add_param_group({"params": [*body.parameters(), *norm.parameters()], "lr": 0.1})
            model = DistributedDataParallel(net)
            for x, y in state.batches(loader):
                opt.zero_grad()
                (model(x) - y).square().mean().backward()
                opt.step()

    run(train, state)
    held = [*net.state_dict().values(), *opt.state_dict()["state"][2].values()]
    octets = b"".join(each.detach().numpy().tobytes() for each in held)
    Path(out, os.environ["RANK"]).write_text(hashlib.sha256(octets).hexdigest())
    dist.destroy_process_group()


main(*sys.argv[1:])
