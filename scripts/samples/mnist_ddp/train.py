"""LeNet on handwritten digits with DistributedDataParallel: an ordinary torch script.

It knows nothing of its launcher; all of these run it unchanged::

    msrun --worker-num=8 train.py
    torchrun --nproc-per-node 8 train.py
    python train.py
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from data import DataError, load
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

SEED = 1
EVAL_BATCH = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LeNet on MNIST, one model on many ranks.")
    parser.add_argument("--epochs", type=positive, default=8)
    parser.add_argument(
        "--batch-size", type=positive, default=128, help="digits a step, all ranks together"
    )
    parser.add_argument("--lr", type=float, default=0.004, help="Adam's learning rate")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def lenet() -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling, for 28x28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def join() -> torch.device:
    """Join the process group; NCCL when every rank of this node has its own GPU, else gloo."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # plain python: a world of one needs no port
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Train on every digit once; return the mean loss over all ranks."""
    total = torch.zeros(2, device=device)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.stack((loss.detach() * len(labels), total.new_tensor(len(labels))))
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model: nn.Module, test: Dataset, device: torch.device) -> tuple[int, int]:
    """The numbers of correct and of tested digits; each digit is tested by exactly one rank."""
    mine = Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))
    score = torch.zeros(2, dtype=torch.long, device=device)
    for images, labels in DataLoader(mine, batch_size=EVAL_BATCH):
        right = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        score += torch.stack((right, score.new_tensor(len(labels))))
    dist.all_reduce(score)
    return int(score[0]), int(score[1])


def main() -> None:
    options = arguments()
    try:
        train, test, source = load()
    except DataError as error:
        sys.exit(f"train.py: {error}")
    device = join()
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"{source}: {len(train)} to train, {len(test)} to test; {dist.get_world_size()} ranks")

    torch.manual_seed(SEED)
    net = lenet().to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    sampler = DistributedSampler(train, seed=SEED)
    batch = max(1, options.batch_size // dist.get_world_size())
    loader = DataLoader(train, batch_size=batch, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, device)
        say(f"epoch {epoch + 1}/{options.epochs} loss {loss:.4f}", flush=True)
    right, tested = evaluate(net, test, device)
    say(f"test accuracy {right / tested:.1%} ({right} of {tested})")
    # The wrapper first: as the group's last owner it would end it while holding the GIL, which the
    # group's own thread may be waiting for (torch 2.13: pytorch issue 56297).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
