"""The training of a peer that returns to the last save: rank 0 saves every few steps."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel
from training import Steps, batches, data, network, put_back, save


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
    """Train forever in the existing process group; call ``beat`` after every step.

    ``saving`` wraps each save.
    """
    net = network(options.width)
    optimizer = torch.optim.AdamW(net.parameters())
    checkpoint = options.fifo.with_name("checkpoint.pt")
    step = put_back(checkpoint, net, optimizer)
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
                save(checkpoint, net, optimizer, step)
