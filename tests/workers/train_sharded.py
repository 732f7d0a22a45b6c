"""A training whose weights are cut over ranks, with an average of them, as its STYLE says.

`train_sharded.py STYLE STEPS`: `hsdp` and `fsdp`, by `fully_shard` over a mesh of 2 x 2 and of one dimension; `tpdp`,
two ranks share each layer, and two such pairs the data; `moe`, the same, and each pair has an expert of its own: no rank
holds what another one does, but each tensor of each rank is held by another one. `--die RANKS STEP WHERE`: in that step of the first attempt
these ranks, as `1+2`, kill themselves, where backward begins or after the first weights of the update; `--shrink STEP`: from then on
each step begins with smaller weights, which `--foreach` makes all at once; `--pause SECONDS`: in each step;
`--die-noted STEP`: all ranks kill themselves once they have noted where this commit lies, but not said that it is one;
`--periodic STEPS`: a ModelCheckpoint saves so often, into `saved`.
At its end rank 0 writes to `STYLE.sha` a digest of the whole weights, of their average and of the sum of all norms.
"""

import argparse
import hashlib
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from worker_hooks import CheckpointConfig, ModelCheckpoint, TrainState, run
from worker_hooks.kept.state_mapper import StateMapper

parser = argparse.ArgumentParser()
parser.add_argument("style", choices=["hsdp", "fsdp", "tpdp", "moe"])
parser.add_argument("steps", type=int)
parser.add_argument("--die", nargs=3, default=("", "", ""))
parser.add_argument("--die-noted", type=int)
parser.add_argument("--shrink", type=int)
parser.add_argument("--foreach", action="store_true")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--periodic", type=int, default=0)
parser.add_argument("--late", action="store_true", help="a new rank waits for a file")
parser.add_argument("--table", type=int, default=0, help="MiB that ranks of a part hold besides")
options, _ = parser.parse_known_args()

torch.set_num_threads(1)
while options.late and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and not os.path.exists("go"):
    time.sleep(0.01)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 18), nn.Tanh(), nn.Linear(18, 4))
match options.style:
    case "hsdp":
        mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "parts"))
    case "fsdp":
        mesh = dist.init_device_mesh("cpu", (world,))
    case "tpdp" | "moe":
        mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, mesh["tensor"], plan)
is_by_hand = options.style in {"tpdp", "moe"}
if not is_by_hand:
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)


class Expert(nn.Module):
    """Half of the rows of each pair of ranks come here, and go back."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(2 + number)
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, rows):
        halves = [len(rows) // 2] * 2
        here = all_to_all_single_autograd(rows, halves, halves, mesh.get_group("data"))
        back = torch.tanh(here @ self.weight)
        return all_to_all_single_autograd(back, halves, halves, mesh.get_group("data"))


if options.style == "moe":
    net.append(Expert(mesh.get_local_rank("data")))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
ema = [each.detach().clone() for each in net.parameters()]
config = CheckpointConfig(save_checkpoint_steps=options.periodic or 1)
table = torch.arange(options.table << 18, dtype=torch.float32) + rank % 2
tables = {"table": [table]} if options.table else {}
periodic = [ModelCheckpoint("net", "saved", config)] if options.periodic else []
state = TrainState(
    model=net, optimizer=optimizer, ema=ema, ckpt_save_path="dumps", callbacks=periodic, **tables
)
total_norm = None  # a global that is a DTensor


class DeadlyUpdate(TorchDispatchMode):
    """The process ends when the first weight is another one."""

    changes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.changes += function._schema.is_mutable
        if self.changes == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def dies(where):
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    ranks, step, place = options.die
    return (
        is_first and str(rank) in ranks.split("+") and (step, place) == (str(state.step + 1), where)
    )


def die_in_backward(gradient):
    if dies("backward"):
        os.kill(os.getpid(), signal.SIGKILL)
    return gradient


def die_noted(mapper, state, commit, private, note=StateMapper.note):
    note(mapper, state, commit, private)
    if commit.step == options.die_noted and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


if options.die_noted:
    StateMapper.note = die_noted


class Steps:
    """Batches by their number; ranks that share a layer have the same."""

    def __len__(self):
        return options.steps

    def __iter__(self):
        for step in range(options.steps):
            share = mesh.get_local_rank("data") if is_by_hand else rank
            generator = torch.Generator().manual_seed(100 * step + share)
            yield torch.randn(16, 8, generator=generator)


def train(state):
    global total_norm  # noqa: PLW0603
    norms = 0.0
    for x in state.batches(Steps()):
        if options.shrink is not None and state.step >= options.shrink:
            with torch.no_grad():
                if options.foreach:  # on those of one kind, as torch mixes them with no others
                    cut = [each for each in net.parameters() if isinstance(each, DTensor)]
                    torch._foreach_mul_(cut, 0.99)  # torch counts it nowhere
                else:
                    for each in net.parameters():
                        each.mul_(0.99)  # torch counts it on the DTensor, not on the part
        out = net(x)
        out.register_hook(die_in_backward)
        (out - x[:, :4]).square().mean().backward()
        if is_by_hand:
            for each in net[:3].parameters():
                dist.all_reduce(each.grad._local_tensor if isinstance(each.grad, DTensor) else each.grad,
                                group=mesh.get_group("data"))  # fmt: skip
        else:
            total_norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            norms += total_norm.full_tensor().item()
        if dies("update"):
            with DeadlyUpdate():
                optimizer.step()
        optimizer.step()
        with torch.no_grad():
            for mean, each in zip(ema, net.parameters(), strict=True):
                mean.lerp_(each, 0.1)
        optimizer.zero_grad()
        print(f"step {state.step + 1}", flush=True)
        time.sleep(options.pause)
    state.finish()
    return norms


norms = run(train, state)
digest = hashlib.sha256(norms.hex().encode())
assert torch.equal(table, torch.arange(len(table), dtype=torch.float32) + rank % 2)
for each in (*net.parameters(), *ema):
    whole = each.full_tensor() if isinstance(each, DTensor) else each
    if options.style == "moe":
        every = [torch.empty_like(whole) for _ in range(world)]
        dist.all_gather(every, whole.detach().contiguous())
        whole = torch.stack(every)
    digest.update(whole.detach().contiguous().numpy().tobytes())
if rank == 0:
    with open(f"{options.style}.sha", "w") as file:
        file.write(digest.hexdigest())
dist.destroy_process_group()
