"""Trains the ordinary way: rank 0 saves every few steps, a restart resumes from there."""

import torch
import torch.distributed as dist
from stamp import stamp
from torch.nn.parallel import DistributedDataParallel
from training import EPOCHS, RANK, Steps, arguments, data, network, put_back, save

stamp("imported")
options = arguments()
net = network(options.width)
optimizer = torch.optim.AdamW(net.parameters())
checkpoint = options.fifo.with_name("checkpoint.pt")
step = put_back(checkpoint, net, optimizer)
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
    for inputs, labels in loader:  # of the interrupted epoch, from its start
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        steps.finish(step)
        if RANK == 0 and step % options.every == 0:
            save(checkpoint, net, optimizer, step)
