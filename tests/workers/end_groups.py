"""Ends many process groups as scripts end theirs: the DDP goes out of scope after the group is destroyed.

`COUNT` times: a gloo group, a DDP, two steps, `destroy_process_group()`. An end that takes half a minute is
one that hangs: it is shown, and the process exits with 1. With `guarded` the hooks are there, too.
"""

import faulthandler
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

count, is_guarded = int(sys.argv[1]), "guarded" in sys.argv
torch.set_num_threads(1)
if is_guarded:
    from worker_hooks import TrainState

    state = TrainState(model=torch.nn.Linear(1, 1))


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(*address, world_size, is_master=False)


def make_and_end(number):
    own = dist.PrefixStore(
        str(number), store
    )  # in one place a second group finds the first one's addresses
    dist.init_process_group(
        "gloo", store=own, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    net = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


for number in range(count):
    faulthandler.dump_traceback_later(30, exit=True)  # from a thread that needs no GIL
    make_and_end(number)
faulthandler.cancel_dump_traceback_later()
print(f"ended {count} groups", flush=True)
