"""A training that says what lived on over a replacement: its process, its objects, what it loaded.

The loader, with workers that stay, is made outside of the training function. LOADS.RANK has a line
for each sample that was loaded; KEPT.RANK.json tells of each entry into the training function, and
which samples each batch had that was handed out.
"""

import json
import os
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from worker_hooks import TrainState, run

EPOCHS, COUNT, BATCH = 2, 48, 4
RANK = int(os.environ["RANK"])


class Noted(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        with open(f"LOADS.{RANK}", "a") as file:
            file.write(f"{index}\n")
        return torch.full((8,), index / COUNT), index % 2, index


torch.set_num_threads(1)
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
state = TrainState(model=net, optimizer=optimizer, ckpt_save_path="checkpoints")
state.ignore("entries", "handed", "workers")  # notes of what happened, no state of the training
dist.init_process_group("gloo")
sampler = DistributedSampler(Noted(), shuffle=True, seed=5)
loader = DataLoader(sampler.dataset, BATCH, sampler=sampler, num_workers=2, persistent_workers=True)
entries, handed = [], []
weights = [tensor.data_ptr() for tensor in net.parameters()]
workers = set()


def train(state):
    entries.append({"attempt": os.environ["TORCHELASTIC_RESTART_COUNT"], "step": state.step})
    print(f"entered at step {state.step}", flush=True)
    model = DistributedDataParallel(net)
    for _ in state.epochs(EPOCHS):
        for x, y, indices in state.batches(loader):
            handed.append(indices.tolist())
            workers.update(each.pid for each in loader._iterator._workers)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


run(train, state)
told = {
    "entries": entries,
    "handed": handed,
    "workers": len(workers),
    "same weights": weights == [tensor.data_ptr() for tensor in net.parameters()],
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "pid": os.getpid(),
}
with open(f"KEPT.{RANK}.json", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
