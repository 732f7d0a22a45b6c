"""A small ResNet on handwritten digits, for eight workers on two machines.

    msrun --worker_num=8 train.py

The last line of each worker has a digest of its weights and of the statistics of its BatchNorm.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import LossMonitor, TrainState, run

SEED = 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small ResNet on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=4, help="epochs in all (4)")
    parser.add_argument("--batch-size", type=int, default=16, help="of a worker (16)")
    parser.add_argument("--ckpt-save-path", default="./checkpoints")
    parser.add_argument(
        "--is_recover", type=int, choices=[0, 1], default=0, help="1: resume from the newest step"
    )
    return parser.parse_args()


class Block(nn.Module):
    """Two convolutions beside a shortcut; the first one may halve the image."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.convolve1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.convolve2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if inside != outside or stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[N, inside, H, W]``; returned are as many images of ``outside`` channels."""
        found = self.norm2(self.convolve2(relu(self.norm1(self.convolve1(x)))))
        return relu(found + self.shortcut(x))


def resnet() -> nn.Sequential:
    """For images ``[N, 1, 8, 8]``; returns ten logits of each."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Block(8, 8), Block(8, 16, 2), Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def digits() -> TensorDataset:
    """The 1797 scanned digits that scikit-learn brings, read without importing it."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise SystemExit("train.py: pip install scikit-learn, whose digits are learned here")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    return TensorDataset(table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long())


def digest(net: nn.Module) -> str:
    content = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # four workers share a machine
    train_set = digits()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    net = resnet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    state = TrainState(
        model=net,
        optimizer=optimizer,
        ckpt_save_path=options.ckpt_save_path,
        is_recover=options.is_recover,
        callbacks=[LossMonitor(10)] if rank == 0 else [],
    )
    torch.manual_seed(SEED + rank)  # each worker has its own noise
    sampler = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True)

    def train(state: TrainState) -> None:
        model = DistributedDataParallel(net)
        for _epoch in state.epochs(options.epochs):
            for images, labels in state.batches(loader):
                noisy = images + 0.1 * torch.randn_like(images)
                cross_entropy(model(noisy), labels).backward()
                optimizer.step()
                optimizer.zero_grad()

    run(train, state)
    print(f"worker {rank} is at step {state.step}, weights {digest(net)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
