"""Joins a gloo group and sums the ranks. `die=R`: rank R kills itself in attempt 0, mid-collective.

`init=tcp` meets at tcp://localhost:MASTER_PORT instead of env://.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

words = dict(word.split("=") for word in sys.argv[1:])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if words.get("init") == "tcp":
    meeting = f"tcp://localhost:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
else:
    dist.init_process_group("gloo")
total = torch.tensor([rank])
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "die" in words:
    if rank == int(words["die"]):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)  # blocked on the dead
print(f"sum {total.item()}")
dist.destroy_process_group()
