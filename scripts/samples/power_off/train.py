"""A small convolutional network on handwritten digits; any rank may be killed at any moment.

    msrun --worker-num=8 --max-restarts=3 train.py

What guards it are the three places marked below. BatchNorm, Dropout, a schedule and a shuffling
sampler are here because all of them must come back exactly. ``torchrun`` and ``python`` run it,
too; then nothing guards it.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import TrainState, run

SEED = 1
TEST_SHARE = 5  # one digit of five is kept for the test


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Digits, with nothing to lose.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128, help="digits a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--ckpt-save-path", default="power_off_checkpoints")
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """To train and to test: scanned digits ``[1, 8, 8]`` in 0..1 with labels.

    Read from scikit-learn's file; importing it would take every rank a second.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        sys.exit("train.py: no digits here; pip install scikit-learn")
    packed = (Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode().split()
    table = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(SEED))]
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
    cut = len(table) // TEST_SHARE
    return TensorDataset(images[cut:], labels[cut:]), TensorDataset(images[:cut], labels[:cut])


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def join() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # plain python: a world of one needs no port
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@torch.no_grad()
def correct(net: nn.Module, test: TensorDataset) -> int:
    net.eval()
    images, labels = test.tensors
    return int((net(images).argmax(1) == labels).sum())


def main() -> None:
    options = arguments()
    train_set, test_set = digits()
    torch.manual_seed(SEED)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
    state = TrainState(  # 1: what must survive
        model=net,
        optimizer=optimizer,
        scheduler=scheduler,
        ckpt_save_path=options.ckpt_save_path,
    )
    join()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)  # each rank has its own dropout
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, seed=SEED)
    loader = DataLoader(train_set, max(2, options.batch_size // world), sampler=sampler)

    def train(state: TrainState) -> None:
        model = DistributedDataParallel(net)
        for epoch in state.epochs(options.epochs):  # 2: loops that know their position
            for images, labels in state.batches(loader):
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if rank == 0:
                print(f"epoch {epoch + 1}/{options.epochs} loss {state.loss:.4f}", flush=True)

    run(train, state)  # 3: the function that run() can call again
    if rank == 0:
        right, tested = correct(net, test_set), len(test_set)
        print(f"test accuracy {right / tested:.1%} ({right} of {tested})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
