"""A training whose weights are cut over two ranks and held twice, by `fully_shard` over a mesh of 2 x 2.

`train_hsdp.py STEPS`. `--die RANK STEP`: in that step of the first attempt this rank kills itself; `--every N`: a
checkpoint, `--integrated`, `--split`, `--async`: how. `--copies N`: how often they are held; 0: each rank holds all,
and trains by itself. `--backwards`: the optimizer has the parameters in that order. Whenever it resumes, rank 0
writes the complete state to `resumed-{STEP}.safetensors`, as torch itself puts it together, and at its end to
`end.safetensors`.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from worker_hooks import CheckpointConfig, ModelCheckpoint, TrainState, run

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--die", type=int, nargs=2, default=(None, None))
parser.add_argument("--every", type=int, default=0)
parser.add_argument("--integrated", action="store_true")
parser.add_argument("--split", action="store_true")
parser.add_argument("--async", action="store_true", dest="is_async")
parser.add_argument("--copies", type=int)
parser.add_argument("--backwards", action="store_true")
options, _ = parser.parse_known_args()
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 4))  # 17: not the same on all
copies = world // 2 if options.copies is None else options.copies
if copies:
    shape = copies, world // copies
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
parameters = list(net.parameters())
optimizer = torch.optim.AdamW(parameters[:: -1 if options.backwards else 1], lr=0.01)
checkpoints = []
if options.every:
    config = CheckpointConfig(
        save_checkpoint_steps=options.every,
        keep_checkpoint_max=9,
        integrated_save=options.integrated,
        remove_redundancy=options.split,
        async_save=options.is_async,
    )
    checkpoints = [ModelCheckpoint("hsdp", "periodic", config)]
state = TrainState(model=net, optimizer=optimizer, ckpt_save_path="dumps", callbacks=checkpoints)


def keep(file):
    """All ranks: rank 0 writes what they hold together."""
    found = {f"model.{name}": each for name, each in net.named_parameters()}
    for number, each in enumerate(parameters):
        found |= {
            f"optimizer.state.{number}.{name}": one for name, one in optimizer.state[each].items()
        }
    whole = {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().contiguous()
        for name, each in found.items()
    }
    if rank == 0:
        save_file(whole, file)


class Steps:
    """Batches by their number."""

    def __len__(self):
        return options.steps

    def __iter__(self):
        for step in range(options.steps):
            generator = torch.Generator().manual_seed(100 * step + rank)
            yield torch.randn(16, 8, generator=generator)


def train(state):
    if state.step:
        keep(f"resumed-{state.step}.safetensors")
    for x in state.batches(Steps()):
        (net(x) - x[:, :4]).square().mean().backward()
        if ATTEMPT == "0" and (rank, state.step + 1) == tuple(options.die):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    state.finish()


run(train, state)
keep("end.safetensors")
dist.destroy_process_group()
