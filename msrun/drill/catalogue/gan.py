"""A GAN: discriminator and generator with an optimizer each, noise from a seed of each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=0.002)
opt_d = torch.optim.Adam(discriminator.parameters(), lr=0.002)
state = TrainState(model=[generator, discriminator], optimizer=[opt_g, opt_d])
dist.init_process_group("gloo")
torch.manual_seed(100 + dist.get_rank())
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    gen, disc = DDP(generator), DDP(discriminator)
    for epoch in state.epochs(2):
        for real, _ in state.batches(loader):
            fake = gen(torch.randn(len(real), 4))
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            opt_d.zero_grad()
            loss_d = bce(disc(torch.cat([real, fake.detach()])), torch.cat([ones, zeros]))
            loss_d.backward()
            opt_d.step()
            opt_g.zero_grad()
            loss_g = bce(disc(fake), ones)
            loss_g.backward()
            opt_g.step()
        print(f"epoch {epoch} losses {loss_d.item():.4f} {loss_g.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*generator.parameters(), *discriminator.parameters())}", flush=True)
dist.destroy_process_group()
