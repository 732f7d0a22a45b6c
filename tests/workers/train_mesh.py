"""Trainings in three styles of parallelism, as their STYLE says.

`train_mesh.py STYLE STEPS`: `3d`, on 8 ranks: two ranks share each layer, two such pairs a copy by `fully_shard`, and there
are two copies; `tp`: all ranks share each layer; `tp_fsdp`, on 4: two share each layer, and two such pairs the whole;
`tp_replicate`, on 4: two share each layer, and two such pairs the data by `replicate`;
`pipeline`, on 4: torch's own stages, two of them, and two pipelines that share the data; `zero`,
torch's ZeroRedundancyOptimizer around AdamW. `--pause SECONDS`: in each step. At its end each rank writes a digest of the
weights that it holds to `STYLE.RANK.sha`.
"""

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from worker_hooks import TrainState, run

parser = argparse.ArgumentParser()
parser.add_argument("style", choices=["3d", "pipeline", "tp", "tp_fsdp", "tp_replicate", "zero"])
parser.add_argument("steps", type=int)
parser.add_argument("--pause", type=float, default=0.0)
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
share, schedule = rank, None
match options.style:
    case "3d":
        mesh = dist.init_device_mesh(
            "cpu", (2, world // 4, 2), mesh_dim_names=("copies", "parts", "tensor")
        )
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["copies", "parts"])
        share = rank // 2
    case "tp":
        mesh = dist.init_device_mesh("cpu", (world,))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        share = 0
    case "tp_fsdp" | "tp_replicate":
        mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        {"tp_fsdp": fully_shard, "tp_replicate": replicate}[options.style](net, mesh=mesh["data"])
        share = mesh.get_local_rank("data")
    case "pipeline":
        mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "stage"))
        number, share = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
        net = net[:2] if number == 0 else net[2:]
        stage = PipelineStage(net, number, 2, torch.device("cpu"), group=mesh.get_group("stage"))
        schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)

optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=not options.style.startswith("tp"))
if options.style == "zero":
    net = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
state = TrainState(model=net, optimizer=optimizer, ckpt_save_path="dumps")


class Steps:
    """Batches by their number; ranks that share a layer have the same."""

    def __len__(self):
        return options.steps

    def __iter__(self):
        for step in range(options.steps):
            generator = torch.Generator().manual_seed(100 * step + share)
            yield torch.randn(16, 8, generator=generator)


def train(state):
    for x in state.batches(Steps()):
        optimizer.zero_grad()
        if schedule is not None:
            losses = []
            if number == 0:
                schedule.step(x)
            else:
                schedule.step(target=x[:, :4], losses=losses)
            for each in net.parameters():
                dist.all_reduce(each.grad, group=mesh.get_group("data"))
            loss = torch.stack(losses).mean() if losses else torch.zeros(())
        else:
            loss = nn.functional.mse_loss(net(x), x[:, :4])
            loss.backward()
        optimizer.step()
        print(f"step {state.step + 1} loss {loss.item():.4f}", flush=True)
        time.sleep(options.pause)
    state.finish()


run(train, state)
digest = hashlib.sha256()
for each in net.parameters():
    held = each.to_local() if isinstance(each, DTensor) else each
    digest.update(held.detach().contiguous().numpy().tobytes())
with open(f"{options.style}.{rank}.sha", "w") as file:
    file.write(digest.hexdigest())
dist.destroy_process_group()
