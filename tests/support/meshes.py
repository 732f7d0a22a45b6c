"""A mesh of ranks of which this process is one; collectives return at once, with anything."""

from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def mesh_seen_by(rank, size=2):
    """A mesh of one dimension, as this rank has it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()
