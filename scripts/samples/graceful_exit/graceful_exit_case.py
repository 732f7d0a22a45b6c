"""LeNet5 that exits on request: MindSpore's graceful exit case, in torch.

    msrun --worker_num=8 --local_worker_num=8 graceful_exit_case.py

Write ``{"GracefulExit": 1}`` into ``graceful_exit.json`` while it trains (or send SIGTERM to msrun
or to any rank): all ranks finish the same step and exit with 0. ``rank_0`` ... ``rank_7`` then
hold ``LeNet_train.safetensors`` and ``LeNet_train.pt2``, and ``msrun --resume`` continues.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import LossMonitor, OnRequestExit, TrainState, run

SEED = 1
BATCH = 32
SIDE = 32
# Segments of seven-segment digits: top, left, right, middle, left, right, bottom
SEGMENTS = ("1110111", "0010010", "1011101", "1011011", "0111010",
            "1101011", "1101111", "1010010", "1111111", "1111011")  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LeNet5 that exits on request.")
    parser.add_argument("--epoch_num", type=int, default=10, help="epochs in all")
    parser.add_argument("--image_num", type=int, default=4096, help="of an epoch, all ranks")
    parser.add_argument("--config_file", default="./graceful_exit.json", help="watched for 1")
    parser.add_argument("--directory", default="./", help="for the folders of the ranks")
    parser.add_argument("--ckpt_save_path", default="./graceful_exit_checkpoints")
    return parser.parse_args()


def lenet5() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def digits(count: int) -> TensorDataset:
    """Seven-segment digits at random places, in noise; the same every time."""
    generator = torch.Generator().manual_seed(SEED)
    glyphs = torch.stack([glyph(segments) for segments in SEGMENTS])
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.5 * torch.rand(count, 1, SIDE, SIDE, generator=generator)
    height, width = glyphs.shape[1:]
    tops = torch.randint(SIDE - height, (count,), generator=generator).tolist()
    lefts = torch.randint(SIDE - width, (count,), generator=generator).tolist()
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[0, top : top + height, left : left + width] += 0.5 * glyphs[label]
    return TensorDataset((images - 0.3) / 0.2, labels)


def glyph(segments: str) -> torch.Tensor:
    """The digit's image, 20 by 12."""
    shape = torch.zeros(20, 12)
    bars = (
        (slice(0, 2), slice(2, 10)),
        (slice(2, 9), slice(0, 2)),
        (slice(2, 9), slice(10, 12)),
        (slice(9, 11), slice(2, 10)),
        (slice(11, 18), slice(0, 2)),
        (slice(11, 18), slice(10, 12)),
        (slice(18, 20), slice(2, 10)),
    )
    for is_on, bar in zip(segments, bars, strict=True):
        shape[bar] = float(is_on)
    return shape


def join() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # plain python: a world of one needs no port
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # eight ranks share this machine
    train_set = digits(options.image_num)
    join()
    torch.manual_seed(SEED)
    net = lenet5()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss()
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, drop_last=True)

    on_request = OnRequestExit(
        file_name="LeNet", directory=options.directory, config_file=options.config_file
    )
    state = TrainState(
        model=net,
        optimizer=optimizer,
        ckpt_save_path=options.ckpt_save_path,
        callbacks=[on_request, LossMonitor(1)],
    )

    def train(state: TrainState) -> None:
        model = DistributedDataParallel(net)
        for _epoch in state.epochs(options.epoch_num):
            for images, labels in state.batches(loader):
                loss = loss_fn(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    run(train, state)
    if dist.get_rank() == 0:
        print(f"trained to the end, step {state.step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
