"""Model saving in data parallel: MindSpore's tutorial, in torch.

    msrun --worker_num=8 --local_worker_num=8 train_saving.py --integrated_save 0

Checkpoints are ``./src_checkpoints/checkpoint-{epoch}_{step}``, complete ones only, the newest two.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import (
    CheckpointConfig,
    LossMonitor,
    ModelCheckpoint,
    ParallelStrategy,
    TrainState,
    run,
)

SEED = 1
SAMPLES, FEATURES, CLASSES = 2048, 784, 10
BATCH = 32
COPIES = 2  # of a model that is cut over ranks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Save checkpoints in data parallel.")
    parser.add_argument(
        "--integrated_save", type=int, choices=[0, 1], default=1, help="0: every rank writes (1)"
    )
    parser.add_argument(
        "--remove_redundancy", type=int, choices=[0, 1], default=0, help="1: each a part (0)"
    )
    parser.add_argument(
        "--sharded", type=int, choices=[0, 1], default=0, help="1: ranks share the model (0)"
    )
    parser.add_argument("--strategy_file", help="write here which part each rank has")
    parser.add_argument("--async_save", type=int, choices=[0, 1], default=0)
    parser.add_argument("--is_recover", type=int, choices=[0, 1], default=0, help="1: resume")
    parser.add_argument("--epoch_num", type=int, default=2, help="epochs in all (2)")
    parser.add_argument("--directory", default="./src_checkpoints")
    return parser.parse_args()


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 512), nn.ReLU(),
        nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, CLASSES),
    )  # fmt: skip


def dataset() -> TensorDataset:
    """Ten patterns and noise, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.arange(SAMPLES) % CLASSES
    patterns = torch.rand(CLASSES, FEATURES, generator=generator)
    noise = torch.rand(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(0.7 * patterns[labels] + 0.3 * noise, labels)


def join() -> torch.device:
    """Join the process group: NCCL when every rank has its own GPU, else gloo."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # plain python: a world of one needs no port
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def main() -> None:
    options = arguments()
    device = join()
    torch.manual_seed(SEED)
    net = network().to(device)
    if options.sharded:  # DDP's sums are FSDP's concern then, too
        shape = COPIES, dist.get_world_size() // COPIES
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("copies", "parts"))
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    train_set = dataset()
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, drop_last=True)

    config = CheckpointConfig(
        save_checkpoint_steps=4,
        keep_checkpoint_max=2,
        integrated_save=bool(options.integrated_save),
        remove_redundancy=bool(options.remove_redundancy),
        async_save=bool(options.async_save),
        append_info=["epoch_num", "step_num"],
    )
    saving = ModelCheckpoint(prefix="checkpoint", directory=options.directory, config=config)
    strategy = ParallelStrategy({"save_file": options.strategy_file})
    state = TrainState(
        model=net,
        optimizer=optimizer,
        ckpt_save_path=options.directory,
        is_recover=options.is_recover,
        callbacks=[LossMonitor(4), saving, strategy],
    )

    def train(state: TrainState) -> None:
        model = net if options.sharded else DistributedDataParallel(net)
        for _epoch in state.epochs(options.epoch_num):
            for inputs, labels in state.batches(loader):
                loss = loss_fn(model(inputs.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    run(train, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
