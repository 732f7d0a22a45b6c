"""Trains an HSDP model under torchft: each replica is a group of FSDP ranks, under one torchrun.

As in torchft's own tests, FSDP reduces within the replica, and its hook hands what comes out to the
manager, which averages it over the replicas. torchrun starts a replica again as a whole.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from sharding import sharded
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchft import Manager, Optimizer, ProcessGroupGloo
from training import RANK, WORLD, Steps, arguments, batches, data, network

REPLICA, REPLICAS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
GLOBAL_RANK = REPLICA * WORLD + RANK

options = arguments()
dist.init_process_group("gloo")
net = sharded(network(options.width), replicas=1)
adam = torch.optim.AdamW(net.parameters())
batch = -1
healed: list[int] = []  # the batch of the replica that sent its state


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def save() -> dict[str, object]:
    moments = [
        {name: local(value).clone() for name, value in adam.state[weight].items()}
        for weight in net.parameters()
    ]
    return {
        "net": [local(weight.detach()).clone() for weight in net.parameters()],
        "optimizer": moments,
        "batch": batch,
    }


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
    healed.append(saved["batch"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=save,
    replica_id=f"replica_{REPLICA}",
    timeout=timedelta(seconds=10),
    init_sync=False,  # every replica starts with the same weights
)


def reduce(gradients: torch.Tensor) -> None:
    manager.allreduce(gradients).wait()  # averages


for module in net.modules():
    if isinstance(module, FSDPModule):
        module.set_all_reduce_hook(reduce)
optimizer = Optimizer(manager, adam)
loader = data(GLOBAL_RANK, REPLICAS * WORLD)
steps = Steps(options, GLOBAL_RANK)
steps.begin(0, attempt=0)
feed = batches(loader, 0)
while True:
    batch, inputs, labels = next(feed)
    optimizer.zero_grad()  # requests the quorum
    torch.nn.functional.cross_entropy(net(inputs), labels).backward()
    before = manager.current_step()
    optimizer.step()  # if the replicas commit
    is_committed = manager.current_step() > before
    if healed:  # the others' gradients alone moved it: its own batch was not trained
        feed, batch = batches(loader, healed.pop() + 1), -1
    if is_committed:
        steps.finish(manager.current_step(), batch)
