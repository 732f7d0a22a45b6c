"""Trains an HSDP model of two replicas with TrainState: if a rank dies, others keep their step."""

import torch
import torch.distributed as dist
from sharding import sharded
from stamp import stamp
from training import EPOCHS, Steps, arguments, data, network

from worker_hooks import TrainState, run

stamp("imported")
options = arguments()
dist.init_process_group("gloo")
stamp("joined")
net = sharded(network(options.width), replicas=2)
optimizer = torch.optim.AdamW(net.parameters())
checkpoints = options.fifo.with_name("checkpoints")
state = TrainState(model=net, optimizer=optimizer, ckpt_save_path=checkpoints)
stamp("wrapped")
loader = data()
steps = Steps(options)


def train(state: TrainState) -> None:
    steps.begin(state.step)
    for _epoch in state.epochs(EPOCHS):
        for inputs, labels in state.batches(loader):
            torch.nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.finish(state.step + 1)


run(train, state)
