"""A script as they are found: DDP around the model at its top, no `run`, a loop over `state.batches`.

Three buckets of gradients, Dropout, loader processes that shuffle and add noise. `--fill N` makes the state so many MB larger;
`--pause SECONDS`: in each step. At its end rank 0 writes a digest of the weights and of the losses to `whole.sha`.
"""

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import TrainState

parser = argparse.ArgumentParser()
parser.add_argument("--fill", type=int, default=0)
parser.add_argument("--pause", type=float, default=0.0)
options, _ = parser.parse_known_args()

torch.set_num_threads(1)
torch.manual_seed(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
inputs = torch.randn(192, 64)
labels = (inputs[:, :4].sum(1) > 0).long()
net = nn.Sequential(
    nn.Linear(64, 256),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 2),
)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
filling = torch.zeros(options.fill * 250_000)
state = TrainState(model=net, optimizer=optimizer, filling=filling, ckpt_save_path="dumps")
model = DistributedDataParallel(net, bucket_cap_mb=0.1)
torch.manual_seed(100 + rank)  # Dropout differs between ranks
data = TensorDataset(inputs, labels)
sampler = DistributedSampler(data, shuffle=True, seed=5)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
losses = 0.0
for _epoch in state.epochs(5):
    for x, y in state.batches(loader):
        loss = nn.functional.cross_entropy(model(x + 0.01 * torch.randn_like(x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = 0.9 * losses + loss.item()
        time.sleep(options.pause)
digest = hashlib.sha256(losses.hex().encode())
for each in net.parameters():
    digest.update(each.detach().numpy().tobytes())
if rank == 0:
    with open("whole.sha", "w") as file:
        file.write(digest.hexdigest())
dist.destroy_process_group()
