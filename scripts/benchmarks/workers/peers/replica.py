"""Trains under torchft: each rank is a replica group of its own, and its torchrun restarts it.

A replica whose step is not committed continues with its next batch, as in torchft's own examples.
A replica that returns gets the data position with the rest of the state.
"""

import os
from datetime import timedelta

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from training import Steps, arguments, batches, data, network

REPLICA, REPLICAS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])

options = arguments()
net = network(options.width)
adam = torch.optim.AdamW(net.parameters())
batch = -1
healed: list[int] = []  # the batch of the replica that sent its state


def save() -> dict[str, object]:
    return {"net": net.state_dict(), "optimizer": adam.state_dict(), "batch": batch}


def load(saved: dict[str, object]) -> None:
    net.load_state_dict(saved["net"])
    adam.load_state_dict(saved["optimizer"])
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
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, adam)
loader = data(REPLICA, REPLICAS)
steps = Steps(options, REPLICA)
steps.begin(0, attempt=0)
feed = batches(loader, 0)
while True:
    batch, inputs, labels = next(feed)
    optimizer.zero_grad()  # requests the quorum
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    before = manager.current_step()
    optimizer.step()  # if the replicas commit
    is_committed = manager.current_step() > before
    if healed:  # the others' gradients alone moved it: its own batch was not trained
        feed, batch = batches(loader, healed.pop() + 1), -1
    if is_committed:
        steps.finish(manager.current_step(), batch)
