"""An embedding with sparse gradients and SparseAdam beside the dense optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randint(50, (64,)), torch.randn(64, 1))
embedding = nn.Embedding(50, 8, sparse=True)
head = nn.Linear(8, 1)
net = nn.Sequential(embedding, head)
sparse = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)
dense = torch.optim.Adam(head.parameters(), lr=0.01)
state = TrainState(model=net, optimizer=[sparse, dense])
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for token, y in state.batches(loader):
            loss = mse_loss(model(token), y)
            net.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())}", flush=True)
dist.destroy_process_group()
