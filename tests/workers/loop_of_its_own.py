"""Asks for itself whether to exit, in a `for`.

    loop_of_its_own.py range|list|right [--ignore=NAME]

When training is entered again, `range` and `list` train what was trained once more.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from worker_hooks import TrainState, run

STEPS = 8
torch.manual_seed(1)
dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
state = TrainState(model=net, optimizer=opt, ckpt_save_path="checkpoints")
state.ignore(*(word.removeprefix("--ignore=") for word in sys.argv[2:]))
batches = list(torch.randn(STEPS, 8, 4))


def trained(model, x, made):
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    print(f"made {made}", flush=True)
    time.sleep(0.1)  # else the launcher kills a rank that is done


def by_range(state):
    model = DistributedDataParallel(net)
    if state.should_exit:
        return
    for number in range(STEPS):
        trained(model, batches[number], number)
        if state.should_exit:
            break


def by_list(state):
    model = DistributedDataParallel(net)
    for x in batches:
        if state.should_exit:
            break
        trained(model, x, state.step)


def right(state):
    model = DistributedDataParallel(net)
    if state.should_exit:
        return
    for number in range(state.step, STEPS):
        trained(model, batches[number], number)
        if state.should_exit:
            break


run({"range": by_range, "list": by_list, "right": right}[sys.argv[1]], state)
print(f"trained {state.step}", flush=True)
dist.destroy_process_group()
