"""Ranks that meet at an address and a port that the script names, as with torchrun's own store.

Behind it they wait for the file whose name follows, if one does.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world)
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print(f"sum {total.item():g} of {world}", flush=True)
while sys.argv[2:] and not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
dist.destroy_process_group()
