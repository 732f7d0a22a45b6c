"""Trains with local variables that live from one step to the next, as in nanoGPT.

    carry_locals.py own|elsewhere|batches [--quiet]

All but the batch that is fetched ahead, which is too large for that, are kept in a loop over
`state.batches`, and in one of its own that asks in one place; nothing is kept if it asks in two.
"""

import sys

import torch

from worker_hooks import TrainState, run

torch.manual_seed(1)
net = torch.nn.Linear(256, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
state = TrainState(model=net, optimizer=opt, ckpt_save_path="checkpoints")
if "--quiet" in sys.argv:
    state.ignore("batch", "best")


def get_batch():
    return torch.randn(160, 256)


def trained(loss):
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def own(state):
    batch = get_batch()  # the very first one
    best, total = 1e9, 0.0
    while not state.should_exit and state.step < 3:
        loss, batch = net(batch).square().mean(), get_batch()
        total += trained(loss)
        if loss.item() < best:
            best = loss.item()
            torch.save(net.state_dict(), "best.pt")
        print(f"average {total / (state.step + 1)}")


def elsewhere(state):
    if state.should_exit:
        return
    batch, best, total = get_batch(), 1e9, 0.0
    while state.step < 3:
        loss, batch = net(batch).square().mean(), get_batch()
        total += trained(loss)
        best = min(best, loss.item())
        if best > 1e6:
            break
        print(f"average {total / (state.step + 1)}")
        if state.should_exit:
            break


def batches(state):
    batch = get_batch()
    best, total = 1e9, 0.0
    for _ in state.batches(range(3)):
        loss, batch = net(batch).square().mean(), get_batch()
        total += trained(loss)
        if loss.item() < best:
            best = loss.item()
            torch.save(net.state_dict(), "best.pt")
        print(f"average {total / (state.step + 1)}")
    print(f"last loss {loss.item()} of {len(batch)}")


run({"own": own, "elsewhere": elsewhere, "batches": batches}[sys.argv[1]], state)
print("trained", flush=True)
