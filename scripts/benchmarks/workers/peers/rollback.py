"""The training of a peer that goes back to the last save: rank 0 saves every few steps."""

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel
from training import Steps, batches, data, network


def train(
    options: argparse.Namespace,
    rank: int,
    world: int,
    steps: Steps,
    attempt: int,
    *,
    beat: Callable[[], None] = lambda: None,
    saving: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Train for ever in the process group that there is; ``beat`` after every step.

    ``saving`` wraps each save.
    """
    net = network(options.width)
    optimizer = torch.optim.AdamW(net.parameters())
    checkpoint = options.fifo.with_name("checkpoint.pt")
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(net)
    steps.begin(step, attempt)
    for batch, inputs, labels in batches(data(rank, world), step):
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        steps.finish(step, batch)
        beat()
        if rank == 0 and step % options.every == 0:
            with saving():
                whole = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(whole, aside := checkpoint.with_suffix(".aside"))
                os.replace(aside, checkpoint)
