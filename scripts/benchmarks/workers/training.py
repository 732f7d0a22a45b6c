"""The training that both sides of ``scripts/bench recover`` do, and what they tell of it."""

import argparse
import os
import time
from pathlib import Path

import torch
from board import SPAN
from stamp import stamp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
SAMPLES, FEATURES, CLASSES, BATCH = 4096, 64, 10, 8
EPOCHS = 10**9  # until it is stopped


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("fifo", type=Path)
    parser.add_argument("--width", type=int, default=256, help="256: 85 thousand parameters")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to a step")
    parser.add_argument("--mark", type=int, default=0, help="say when this step is finished")
    parser.add_argument("--every", type=int, default=1, help="steps from save to save, unguarded")
    return parser.parse_known_args()[0]


def network(width: int) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def data() -> DataLoader:
    """Draw samples, the same on every rank; each epoch in another order."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    samples = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    sampler = DistributedSampler(samples, num_replicas=WORLD, rank=RANK, seed=3)
    return DataLoader(samples, batch_size=BATCH, sampler=sampler)


class Steps:
    """Finishes steps: says where this attempt began, and how far it is."""

    def __init__(self, options: argparse.Namespace, begun: int) -> None:
        self._options = options
        self._begun = begun
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._board = os.open(options.fifo.with_name("board"), flags, 0o600)
        self._write(begun)

    def finish(self, step: int) -> None:
        """Note that this rank has finished a step, and rest if that was asked for."""
        self._write(step)
        if step == self._begun + 1:
            stamp("trained")
        if step == self._options.mark:
            stamp("marked")
        time.sleep(self._options.pause)

    def _write(self, step: int) -> None:
        line = SPAN.pack(self._begun, step)
        os.pwrite(self._board, line, (ATTEMPT * WORLD + RANK) * SPAN.size)
