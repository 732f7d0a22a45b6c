"""Trains with TrainState: if a rank dies, the others keep their step."""

import torch
import torch.distributed as dist
from stamp import stamp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import EPOCHS, Steps, arguments, ballast, data, network

from worker_hooks import TrainState, run

stamp("imported")
options = arguments()
net = network(options.width)
whole = nn.ModuleDict({"net": net, "ballast": ballast(options.ballast)})
optimizer = torch.optim.AdamW(net.parameters())
checkpoints = options.fifo.with_name("checkpoints")
state = TrainState(model=whole, optimizer=optimizer, ckpt_save_path=checkpoints)
stamp("restored")
dist.init_process_group("gloo")
stamp("joined")
loader = data()
steps = Steps(options)


def train(state: TrainState) -> None:
    model = DistributedDataParallel(net)
    stamp("wrapped")
    steps.begin(state.step)
    for _epoch in state.epochs(EPOCHS):
        for inputs, labels in state.batches(loader):
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.finish(state.step + 1)


run(train, state)
