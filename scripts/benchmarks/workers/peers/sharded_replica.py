"""Trains an HSDP model under torchft: each replica is a group of FSDP ranks, under one torchrun.

As in torchft's own tests, FSDP reduces within the replica, and its hook hands what comes out to the
manager, which averages it over the replicas. torchrun starts a replica again as a whole.
"""

import torch
import torch.distributed as dist
from managed import REPLICA, REPLICAS, Replica
from sharding import sharded
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training import RANK, WORLD, Steps, arguments, network

GLOBAL_RANK = REPLICA * WORLD + RANK

options = arguments()
dist.init_process_group("gloo")
net = sharded(network(options.width), replicas=1)
adam = torch.optim.AdamW(net.parameters())


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def save() -> dict[str, object]:
    moments = [
        {name: local(value).clone() for name, value in adam.state[weight].items()}
        for weight in net.parameters()
    ]
    weights = [local(weight.detach()).clone() for weight in net.parameters()]
    return {"net": weights, "optimizer": moments}


def load(saved: dict[str, object]) -> None:
    with torch.no_grad():
        for weight, value, moments in zip(
            net.parameters(), saved["net"], saved["optimizer"], strict=True
        ):
            local(weight).copy_(value)
            for name, moment in moments.items():
                mine = moment.clone() if name == "step" else torch.zeros_like(weight)
                local(mine).copy_(moment)
                adam.state[weight][name] = mine


replica = Replica(save, load)


def reduce(gradients: torch.Tensor) -> None:
    replica.manager.allreduce(gradients).wait()  # averages


for module in net.modules():
    if isinstance(module, FSDPModule):
        module.set_all_reduce_hook(reduce)
replica.train(net, adam, Steps(options, GLOBAL_RANK), GLOBAL_RANK, REPLICAS * WORLD)
