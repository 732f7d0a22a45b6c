"""Recovery from redundancy: MindSpore's tutorial, in torch.

    msrun --worker_num=8 train_recover.py

Three matrix products on digits. Four ranks share the first two matrices (tensor parallelism), and
two such groups share the data: ranks ``r`` and ``r + 4`` hold the same. Each saves what it holds,
in ``./checkpoint/net-{epoch}_{step}/rank_{r}``.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import CheckpointConfig, LossMonitor, ModelCheckpoint, TrainState, run

SEED = 1
SHARING, GROUPS = 4, 2  # ranks that share a matrix, and groups of them
SAMPLES, PIXELS, CLASSES = 2048, 784, 10
BATCH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Save, lose a file, recover.")
    parser.add_argument("--epochs", type=int, default=1, help="epochs in all (1)")
    return parser.parse_args()


def digits() -> TensorDataset:
    """Ten patterns and noise, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.arange(SAMPLES) % CLASSES
    patterns = torch.rand(CLASSES, PIXELS, generator=generator)
    noise = torch.rand(SAMPLES, PIXELS, generator=generator)
    return TensorDataset(0.7 * patterns[labels] + 0.3 * noise, labels)


def share(gradient: Tensor) -> Tensor:
    """The part of a gradient that this rank has."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (GROUPS, SHARING), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Linear(PIXELS, 512, bias=False), nn.ReLU(),
        nn.Linear(512, 512, bias=False), nn.ReLU(),
        nn.Linear(512, CLASSES, bias=False),
    )  # fmt: skip
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    loss_fn = nn.CrossEntropyLoss()
    group, data = mesh.get_group("data"), digits()
    # ranks that share a matrix read the same samples
    sampler = DistributedSampler(data, GROUPS, mesh.get_local_rank("data"), seed=SEED)
    loader = DataLoader(data, BATCH, sampler=sampler)

    config = CheckpointConfig(save_checkpoint_steps=8, keep_checkpoint_max=2, integrated_save=False)
    saving = ModelCheckpoint(prefix="net", directory="./checkpoint", config=config)
    told = [LossMonitor(8)] if dist.get_rank() == 0 else []
    state = TrainState(
        model=net, optimizer=optimizer, ckpt_save_path="./dumps", callbacks=[*told, saving]
    )

    def train(state: TrainState) -> None:
        for _ in state.epochs(options.epochs):
            for pixels, labels in state.batches(loader):
                loss_fn(net(pixels), labels).backward()
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        mean = share(parameter.grad).div_(GROUPS)
                        dist.all_reduce(mean, group=group)
                optimizer.step()
                optimizer.zero_grad()

    run(train, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
