"""Policy gradient in an environment that lives outside of the state."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)


class Walk:
    """A walk on a line: the reward is to stay near the middle."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.place = self.speed = 0.0

    def step(self, action):
        self.speed = 0.9 * self.speed + (0.1 if action else -0.1) + self.random.gauss(0, 0.05)
        self.place += self.speed
        return -abs(self.place)


net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
env = Walk(dist.get_rank())
torch.manual_seed(100 + dist.get_rank())


def train(state):
    model = DDP(net)
    while not state.should_exit and state.step < 16:
        losses = []
        for _ in range(4):
            policy = torch.distributions.Categorical(
                logits=model(torch.tensor([env.place, env.speed]))
            )
            action = policy.sample()
            losses.append(-policy.log_prob(action) * env.step(action.item()))
        opt.zero_grad()
        torch.stack(losses).mean().backward()
        opt.step()
    print(f"place {env.place:.3f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())} place={env.place}", flush=True)
dist.destroy_process_group()
