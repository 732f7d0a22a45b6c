"""Trains under torchft: each rank is a replica group of its own, and its torchrun restarts it."""

import torch
from managed import REPLICA, REPLICAS, Replica
from torchft import DistributedDataParallel
from training import Steps, arguments, network

options = arguments()
net = network(options.width)
adam = torch.optim.AdamW(net.parameters())


def save() -> dict[str, object]:
    return {"net": net.state_dict(), "optimizer": adam.state_dict()}


def load(saved: dict[str, object]) -> None:
    net.load_state_dict(saved["net"])
    adam.load_state_dict(saved["optimizer"])


replica = Replica(save, load)
model = DistributedDataParallel(replica.manager, net)
replica.train(model, adam, Steps(options, REPLICA), REPLICA, REPLICAS)
