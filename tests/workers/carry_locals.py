"""Trains with local variables that live from one step to the next, as in nanoGPT."""

import sys

import torch

from worker_hooks import TrainState, run

torch.manual_seed(1)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
state = TrainState(model=net, optimizer=opt, ckpt_save_path="checkpoints")
if "--quiet" in sys.argv:
    state.ignore("batch", "best")


def get_batch():
    return torch.randn(8, 4)


def train(state):
    batch = get_batch()  # the very first one
    best, total = 1e9, 0.0
    while not state.should_exit and state.step < 3:
        loss = net(batch).square().mean()
        batch = get_batch()
        loss.backward()
        opt.step()
        opt.zero_grad()
        total += loss.item()
        if loss.item() < best:
            best = loss.item()
            torch.save(net.state_dict(), "best.pt")
        print(f"average {total / (state.step + 1)}")


run(train, state)
print("trained", flush=True)
