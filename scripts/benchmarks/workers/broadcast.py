"""Sends a tensor from rank 0 to the others with a plain broadcast; the second time is timed."""

import sys

import torch
import torch.distributed as dist
from stamp import stamp

dist.init_process_group("gloo")
tensor = torch.ones(int(sys.argv[2]), 1 << 18)  # so many MiB
for what in ("warm", "sent"):
    dist.broadcast(tensor, 0)
    dist.barrier()
    stamp(what)
dist.destroy_process_group()
