"""Trains the ordinary way: rank 0 saves every few steps, a restart begins from there."""

import os

import torch
import torch.distributed as dist
from stamp import stamp
from torch.nn.parallel import DistributedDataParallel
from training import EPOCHS, RANK, Steps, arguments, data, network

stamp("imported")
options = arguments()
net = network(options.width)
optimizer = torch.optim.AdamW(net.parameters())
checkpoint = options.fifo.with_name("checkpoint.pt")
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
stamp("restored")
dist.init_process_group("gloo")
stamp("joined")
model = DistributedDataParallel(net)
stamp("wrapped")
loader = data()
steps = Steps(options)
steps.begin(step)
for epoch in range(step // len(loader), EPOCHS):
    loader.sampler.set_epoch(epoch)
    for inputs, labels in loader:  # of the epoch that was under way, from its beginning
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        steps.finish(step)
        if RANK == 0 and step % options.every == 0:
            whole = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(whole, aside := checkpoint.with_suffix(".aside"))
            os.replace(aside, checkpoint)
