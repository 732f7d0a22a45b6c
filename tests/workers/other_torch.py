"""The small training on a torch that lacks a name or works by another rule: `other_torch.py HOW ...`."""

import runpy
import sys
from pathlib import Path

from torch.distributed import distributed_c10d

from worker_hooks.distributed import communicators, ddp_bucket_order

if sys.argv[1] == "lacks":
    del distributed_c10d._get_default_store
elif sys.argv[1] == "watches":  # there is no NCCL here
    communicators.why_peers_end_it = lambda _: "a reason; what helps"
else:
    assign = ddp_bucket_order.dist._compute_bucket_assignment_by_size

    def first_alone(tensors, limits, is_sparse, *order):
        """DDP itself gives no order."""
        buckets, sizes = assign(tensors, limits, is_sparse, *order)
        return ([buckets[0][:1], buckets[0][1:], *buckets[1:]] if order else buckets), sizes

    ddp_bucket_order.dist._compute_bucket_assignment_by_size = first_alone
script = Path(__file__).with_name("train_small.py")
sys.argv = [str(script), *sys.argv[2:]]
runpy.run_path(str(script), run_name="__main__")
