"""Trains with TrainState: if a rank dies, the others keep their step."""

import torch
import torch.distributed as dist
from stamp import stamp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import EPOCHS, Steps, arguments, ballast, begin_moments, data, moments, network

from worker_hooks import TrainState, run

stamp("imported")
options = arguments()
net = network(options.width)
whole = nn.ModuleDict({"net": net, "ballast": ballast(options.ballast)})
optimizer = torch.optim.AdamW(net.parameters())
frozen = moments(options.moments)
checkpoints = options.fifo.with_name("checkpoints")
state = TrainState(model=whole, optimizer=[optimizer, frozen], ckpt_save_path=checkpoints)
stamp("restored")
dist.init_process_group("gloo")
stamp("joined")
loader = data()
steps = Steps(options)


def train(state: TrainState) -> None:
    model = DistributedDataParallel(net)
    stamp("wrapped")
    if not state.step:
        begin_moments(frozen)
    steps.begin(state.step)
    for _epoch in state.epochs(EPOCHS):
        for inputs, labels in state.batches(loader):
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.finish(state.step + 1)


run(train, state)
