"""The training of all sides of ``scripts/bench recover``, and its reports."""

import argparse
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import board
import torch
from stamp import stamp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAMPLES, FEATURES, CLASSES, BATCH = 4096, 64, 10, 8
EPOCHS = 10**9  # until it is stopped


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("fifo", type=Path)
    parser.add_argument("--width", type=int, default=256, help="256: 85 thousand parameters")
    parser.add_argument("--ballast", type=int, default=0, help="MiB of parameters kept as they are")
    parser.add_argument("--moments", type=int, default=0, help="MiB of an optimizer's state")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to a step")
    parser.add_argument("--mark", type=int, default=0, help="say when this step is finished")
    parser.add_argument("--turns", type=Path, help="a file: trains only while it can be locked")
    parser.add_argument("--every", type=int, default=1, help="steps from save to save, unguarded")
    return parser.parse_args()


def network(width: int) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def ballast(mib: int) -> nn.ParameterList:
    """Parameters that no step touches: state to save, but nothing to compute or reduce."""
    pieces = (torch.ones(min(64, left), 1 << 18) for left in range(mib, 0, -64))
    return nn.ParameterList(nn.Parameter(piece, requires_grad=False) for piece in pieces)


def moments(mib: int) -> torch.optim.Optimizer:
    """An optimizer that will have so much state, and never updates anything."""
    sizes = (min(64, left) for left in range(mib, 0, -64))
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    return torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(0))], lr=0.1, momentum=0.9)


def begin_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make its state, as its first update would; a new rank is given it."""
    for parameter in optimizer.param_groups[0]["params"]:
        buffer = torch.ones(len(parameter), 1 << 18)
        optimizer.state[parameter]["momentum_buffer"] = buffer


def data(rank: int = RANK, world: int = WORLD) -> DataLoader:
    """Random samples, the same on every rank; each epoch in another order."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    samples = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    sampler = DistributedSampler(samples, num_replicas=world, rank=rank, seed=3)
    return DataLoader(samples, batch_size=BATCH, sampler=sampler)


def put_back(checkpoint: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what :func:`save` saved last; its step."""
    if not checkpoint.exists():
        return 0
    saved = torch.load(checkpoint)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def save(checkpoint: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save under a temporary name, then rename."""
    whole = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(whole, aside := checkpoint.with_suffix(".aside"))
    os.replace(aside, checkpoint)


def batches(loader: DataLoader, begun: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Number the batches of all epochs, and skip the first ``begun``."""
    for epoch in range(begun // len(loader), EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch, (inputs, labels) in enumerate(loader, epoch * len(loader)):
            if batch >= begun:
                yield batch, inputs, labels


class Steps:
    """Reports steps: where the training started or resumed, and each finished step."""

    def __init__(self, options: argparse.Namespace, rank: int = RANK) -> None:
        self._options = options
        self._rank = rank
        self._attempt = self._first = 0
        self._board = board.opened(options.fifo.parent)
        self._turns = options.turns and options.turns.open("a")

    def begin(self, begun: int, attempt: int | None = None) -> None:
        """Start an attempt at a step; surviving processes do so, too."""
        counted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._attempt = int(counted) if attempt is None else attempt
        self._first = begun + 1

    def finish(self, step: int, batch: int | None = None) -> None:
        """Report that this rank has finished a step, and sleep if an option says so."""
        board.add(
            self._board, self._rank, self._attempt, step, step - 1 if batch is None else batch
        )
        if step == self._first:
            stamp("trained")
        if step == self._options.mark:
            stamp("marked")
        time.sleep(self._options.pause)
        if self._turns:  # wait until it is this job's turn
            fcntl.flock(self._turns, fcntl.LOCK_SH)
            fcntl.flock(self._turns, fcntl.LOCK_UN)
