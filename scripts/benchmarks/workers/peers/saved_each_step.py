"""Trains an HSDP model (two replicas), and saves each step with torch's DCP ``async_save``.

A restart loads the newest checkpoint that is complete. Its saves have a group of their own, as
they would mix with the collectives of training otherwise.
"""

import shutil
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharding import sharded
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training import RANK, Steps, arguments, batches, data, network

options = arguments()
dist.init_process_group("gloo")
saving = dist.new_group(backend="gloo")
net = sharded(network(options.width), replicas=2)
optimizer = torch.optim.AdamW(net.parameters())
checkpoints = options.fifo.with_name("checkpoints")


def state() -> dict[str, object]:
    weights, moments = get_state_dict(net, optimizer)
    return {"net": weights, "optimizer": moments}


def complete() -> list[int]:
    """The steps whose checkpoints are complete: DCP writes the metadata last."""
    return sorted(int(path.parent.name) for path in checkpoints.glob("*/.metadata"))


def resumed() -> int:
    """Load the newest checkpoint; its step. All ranks see the same: nobody writes now."""
    newest = max(complete(), default=0)
    dist.barrier()
    if newest:
        saved = state()
        dcp.load(saved, checkpoint_id=str(checkpoints / str(newest)))
        set_state_dict(
            net, optimizer, model_state_dict=saved["net"], optim_state_dict=saved["optimizer"]
        )
    return newest


def forgotten(step: int) -> None:
    """Remove the checkpoints before the last two that are complete."""
    for old in complete()[:-2]:
        if old < step:
            shutil.rmtree(Path(checkpoints, str(old)))


step = resumed()
loader = data()
steps = Steps(options)
steps.begin(step)
pending: Future[object] | None = None
for _, inputs, labels in batches(loader, step):
    torch.nn.functional.cross_entropy(net(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    steps.finish(step)
    if pending is not None:
        pending.result()
        if RANK == 0:
            forgotten(step)
    if step % options.every == 0:
        folder = str(checkpoints / str(step))
        pending = dcp.async_save(state(), checkpoint_id=folder, process_group=saving)
