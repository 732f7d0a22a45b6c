"""Trainings in which ranks hold different states, or keep something that no TrainState knows of.

`train_parts.py KIND STEPS`: `tensor_parallel`, each rank has a slice of the weight; `copies`, two copies of two
slices; `fsdp1`, torch's FullyShardedDataParallel, and `fsdp1_orig`, the same with the model's own parameters, and `fsdp1_hybrid`, two copies of its parts;
`zero`, DDP whose optimizer, torch's ZeroRedundancyOptimizer, keeps a part of its state on each rank; `zero_forgotten`, where
it is not registered;
`fsdp1_inside`, `fsdp2_inside`, `tp_inside`: the model is sharded within `train`, as FSDP and as DTensors;
`refused`, what is sharded before `TrainState`;
`rate_by_hand`, the learning rate follows a counter where msrun does not look; `drifts`, equal until a step.
Each rank writes its weights to `{KIND}.{rank}.sha`, as their digest, at the end.
"""

import argparse
import copy
import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from worker_hooks import CheckpointConfig, ModelCheckpoint, TrainState, run

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("steps", type=int)
parser.add_argument("--every", type=int, default=0, help="a checkpoint")
parser.add_argument("--whole", action="store_true", help="each rank writes all")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--at", type=int, default=4, help="from which step on ranks drift apart")
parser.add_argument("--die", type=int, help="the step in which rank 1 kills itself, once")
options, _ = parser.parse_known_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
is_sliced = options.kind in {"tensor_parallel", "copies"}
is_zero = options.kind in {"zero", "zero_forgotten"}
slices = 2 if options.kind == "copies" else world

torch.manual_seed(1 + rank % slices if is_sliced else 1)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
if options.kind in {"fsdp1", "fsdp1_orig", "fsdp1_hybrid"}:
    hybrid = {}
    if options.kind == "fsdp1_hybrid":
        names = ("copies", "parts")
        hybrid = {
            "device_mesh": dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names),
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        }
    net = FullyShardedDataParallel(
        net,
        device_id=torch.device("cpu"),
        use_orig_params=options.kind == "fsdp1_orig",
        **hybrid,
    )


def sharded(net, way):
    match way:
        case "fsdp1":
            return FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        case "fsdp2":
            return fully_shard(net)
        case "hsdp":
            names = ("copies", "parts")
            return fully_shard(
                net, mesh=dist.init_device_mesh("cpu", (1, world), mesh_dim_names=names)
            )
        case "tp":
            mesh = dist.init_device_mesh("cpu", (world,))
            return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net


if options.kind == "refused":
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for way in ("fsdp2", "hsdp", "tp", "zero"):
        model = sharded(copy.deepcopy(net), way)
        if way == "zero":
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05
            )
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        try:
            TrainState(model=model, optimizer=optimizer)
        except TypeError as error:
            print(f"{way}: {error}", flush=True)
    dist.destroy_process_group()
    sys.exit()

optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
registered = {"optimizer": optimizer}
if is_zero:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    registered = {} if options.kind == "zero_forgotten" else {"optimizer": optimizer}
checkpoints = []
if options.every:
    config = CheckpointConfig(
        save_checkpoint_steps=options.every, integrated_save=not options.whole, async_save=False
    )
    checkpoints = [ModelCheckpoint("parts", "periodic", config)]
state = TrainState(model=net, ckpt_save_path="checkpoints", callbacks=checkpoints, **registered)


class Steps:
    """Batches by their number: no loader draws random numbers."""

    def __len__(self):
        return options.steps

    def __iter__(self):
        for step in range(options.steps):
            generator = torch.Generator().manual_seed(step)
            yield torch.randn(16, 8, generator=generator)


def train(state):  # noqa: C901  a few lines for each kind
    groups = None
    if options.kind == "copies":
        groups = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    model = net
    trained = optimizer
    if is_zero or options.kind in {"rate_by_hand", "drifts"}:
        model = DistributedDataParallel(net)
    if options.kind.endswith("_inside"):
        model = sharded(net, options.kind.removesuffix("_inside"))
        trained = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x in state.batches(Steps()):
        if options.kind == "rate_by_hand":
            count = int(os.environ.get("COUNT", "0"))
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + count)
            os.environ["COUNT"] = str(count + 1)
        out = model(x)
        if is_sliced:  # the sum of what all slices make of it
            total = out.detach().clone()
            dist.all_reduce(total, group=groups[rank // 2] if groups else None)
            out = out + (total - out.detach())
        (out - x[:, :4]).square().mean().backward()
        if (rank, state.batch, ATTEMPT) == (1, options.die, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        if groups:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad, group=groups[2 + rank % 2])
        trained.step()
        if options.kind == "drifts" and state.step + 1 >= options.at:
            with torch.no_grad():
                net[0].bias.add_(0.1 * rank)
        trained.zero_grad()
        print(f"step {state.batch}", flush=True)
        time.sleep(options.pause)
    state.finish()


run(train, state)
weights = b"".join(
    (each.to_local() if hasattr(each, "to_local") else each).detach().numpy().tobytes()
    for each in net.parameters()
)
with open(f"{options.kind}.{rank}.sha", "w") as file:
    file.write(hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
