"""An ordinary training that knows nothing of msrun; ``--die=RANK:STEP:MOMENT`` kills a rank once.

What it prints at its end shows whether a run was like another one: weights, the optimizer, random
numbers, variables of its own, the lines that it read.
"""

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--die", nargs="*", default=[])
parser.add_argument("--shadowed", action="store_true", help="die once all ranks have a shadow")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--persistent", action="store_true")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument(
    "--odd",
    default="",
    help="what cannot be copied: thread (late: at step 6), native, send, shared, iterable, unordered,"
    " cuda, child, sharded,"
    " counts (a data set that changes itself), told (one that the script changes)",
)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
options = parser.parse_args()

torch.set_num_threads(options.threads)
dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group(list(range(dist.get_world_size())))
random.seed(rank)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
numbers = torch.Generator().manual_seed(1)


class Noisy(TensorDataset):
    """Draws from all that can be seeded: its own generator, and the three of the process."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.own = torch.Generator().manual_seed(rank)
        self.calls = 0

    def __getitem__(self, index):
        if options.odd == "counts":
            self.calls += 1
        x, y = super().__getitem__(index)
        drawn = random.random() + np.random.random() + self.calls  # noqa: NPY002
        return x + drawn + torch.randn(32) + torch.randn(32, generator=self.own), y


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield data[int(torch.randint(160, ()))]


data = Noisy(
    torch.randn(160, 32, generator=numbers), torch.randint(0, 10, (160,), generator=numbers)
)
sampler = DistributedSampler(data)
special = {}
if options.workers:
    special = {"persistent_workers": options.persistent, "in_order": options.odd != "unordered"}
if options.odd == "iterable":
    loader = DataLoader(Endless(), batch_size=8, num_workers=options.workers)
else:
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=options.workers, **special)
torch.manual_seed(100 + rank)
np.random.seed(200 + rank)  # noqa: NPY002  as scripts do

own = Path(f"lines-{rank}.txt")
own.write_text("".join(f"line {number}\n" for number in range(4000)))
lines = own.open()
kept = []  # what must not be collected


def is_shadowed() -> bool:
    return "ShadowsChanged" in Path("logs/scheduler.log").read_text()


def die(step: int, moment: str) -> None:
    mark = Path(f"died-{rank}-{step}-{moment}")
    if f"{rank}:{step}:{moment}" in options.die and not mark.exists():
        mark.touch()
        until = (
            time.monotonic() + 60 * options.shadowed
        )  # by then msrun knows that each rank has one
        while time.monotonic() < until and not is_shadowed():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def be_odd(kind: str) -> None:  # noqa: C901  a branch for each
    if kind == "lock":  # a rank dies while it holds it
        kept.append(multiprocessing.RLock())
    if kind == "thread":
        kept.append(threading.Thread(target=time.sleep, args=(60,), name="writer", daemon=True))
        kept[-1].start()
    elif kind == "native":
        libc, pthread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(pthread), None, libc.pause, None)
    elif kind == "shared":
        kept.append(torch.zeros(4).share_memory_())
    elif kind == "send" and rank < 2:
        dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
    elif kind == "pending":
        kept.append(dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None)
    elif kind == "cuda":  # as on a machine that has some
        torch.cuda.is_initialized = lambda: True
    elif kind == "child":
        kept.append(subprocess.Popen(["sleep", "60"]))
    elif kind == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        part = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Shard(0)]))
        optimizer.param_groups[0]["params"].append(part)
    elif kind == "uneven" and rank == 0:
        optimizer.step()


be_odd(options.odd)
step, running = 0, 0.0
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        die(step, "data")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with kept[0] if options.odd == "lock" else contextlib.nullcontext():
            die(step, "forward")
        loss.backward()
        die(step, "backward")
        optimizer.step()
        schedule.step()
        step += 1
        die(step, "stepped")
        if options.odd == "late" and step == 6:
            be_odd("thread")
        if options.odd == "told" and step == 2:
            data.calls = 1
        if options.odd == "iterable" and step % 10 == 0:
            break
        running += loss.item() * random.random() + float(x.sum())
        x.zero_()  # which a copy that was made before must not see
        running += int(lines.readline().split()[1])
        if step % 5 == 0:
            total = torch.tensor(loss.item())
            dist.all_reduce(total, group=pair)
            running += total.item()
        time.sleep(options.pause)
    with torch.no_grad():
        seen = itertools.islice(loader, 10)
        right = sum(int((net.eval()(x).argmax(1) == y).sum()) for x, y in seen)
        net.train()
    die(step, "validated")
    dist.barrier()
digest = hashlib.sha256(repr((step, running, right)).encode())
for tensor in (
    *net.state_dict().values(),
    *(value for state in optimizer.state.values() for value in state.values()),
    torch.get_rng_state(),
):
    digest.update(tensor.numpy().tobytes())
print(f"result of rank {rank}: {digest.hexdigest()[:12]}", flush=True)
dist.destroy_process_group()
