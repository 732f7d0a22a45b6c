"""The sharded model of the sides of ``scripts/bench peers --sharded``."""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import WORLD


def sharded(net: nn.Module, replicas: int) -> nn.Module:
    """Shard each layer's weights over the ranks of a replica, with FSDP2."""
    mesh = init_device_mesh(
        "cpu", (replicas, WORLD // replicas), mesh_dim_names=("replicate", "shard")
    )
    mesh = mesh if replicas > 1 else mesh["shard"]
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)
