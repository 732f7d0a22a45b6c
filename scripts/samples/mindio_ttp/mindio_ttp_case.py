"""The five-layer network of MindSpore's power-off checkpoint tutorial, in torch.

    msrun --worker_num=4 --local_worker_num=4 --on_failure=dump mindio_ttp_case.py

Kill any rank with -9: the others save the step they are at in ``./ttp_checkpoints``. With
``--is_recover=1`` training resumes from there, at the next step.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from worker_hooks import LossMonitor, OptTFTWrapper, TFTRegister, TimeMonitor, TrainState, run

SEED = 1
BATCH = 32
SIDE = 28
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Power-off checkpoint of a five-layer network.")
    parser.add_argument(
        "--is_recover", type=int, choices=[0, 1], default=0, help="1: resume from the newest one"
    )
    parser.add_argument("--epoch_num", type=int, default=5, help="epochs in all")
    parser.add_argument("--step_num", type=int, help="steps of an epoch; default: all images")
    parser.add_argument("--ckpt_save_path", default="./ttp_checkpoints")
    return parser.parse_args()


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 512, bias=False), nn.ReLU(),
        nn.Linear(512, 5120), nn.ReLU(),
        nn.Linear(5120, 5120), nn.ReLU(),
        nn.Linear(5120, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


def dataset() -> tuple[TensorDataset, str]:
    """Images ``[1, 28, 28]`` with labels, and where they are from."""
    folder = os.environ.get("DATA_PATH")
    digits = importlib.util.find_spec("sklearn")
    if folder:
        images, labels, source = *mnist(Path(folder)), f"MNIST in {folder}"
    elif digits is not None and digits.origin is not None:
        path = Path(digits.origin).parent / "datasets" / "data" / "digits.csv.gz"
        images, labels, source = *upscaled_digits(path), "scikit-learn's digits"
    else:
        images, labels, source = *drawn(), "drawn images (no scikit-learn, no DATA_PATH)"
    images = (images.reshape(-1, 1, SIDE, SIDE) - MEAN) / DEVIATION
    return TensorDataset(images, labels.long()), source


def mnist(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST's training files, plain or gzipped, in the folder or in its ``train``."""
    values = []
    for name, head in (("train-images-idx3-ubyte", 16), ("train-labels-idx1-ubyte", 8)):
        places = [
            room / f"{name}{end}" for room in (folder, folder / "train") for end in ("", ".gz")
        ]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise SystemExit(f"mindio_ttp_case.py: {name} is not in DATA_PATH={folder}")
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        values.append(torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=head))
    return values[0].float() / 255, values[1]


def upscaled_digits(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The scanned digits inside scikit-learn, read without importing it (that takes a second)."""
    lines = gzip.decompress(path.read_bytes()).decode().split()
    table = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    small = table[:, :-1].reshape(-1, 1, 8, 8) / 16
    images = interpolate(small, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return images, table[:, -1]


def drawn(count: int = 1792) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten patterns and noise, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.arange(count) % 10
    patterns = torch.rand(10, SIDE, SIDE, generator=generator)
    noise = torch.rand(count, SIDE, SIDE, generator=generator)
    return 0.7 * patterns[labels] + 0.3 * noise, labels


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
    train_set, source = dataset()
    device = join()
    if options.step_num is not None:
        wanted = options.step_num * BATCH * dist.get_world_size()
        train_set = Subset(train_set, range(min(wanted, len(train_set))))
    if dist.get_rank() == 0:
        print(f"{source}: {len(train_set)} images, {dist.get_world_size()} ranks", flush=True)

    torch.manual_seed(SEED)
    net = network().to(device)
    optimizer = OptTFTWrapper(torch.optim.SGD(net.parameters(), lr=1e-2))
    loss_fn = nn.CrossEntropyLoss()
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, drop_last=True)

    # Only MindSpore needs a controller's rank, address and port; here any rank may die.
    tft = TFTRegister(0, "127.0.0.1", 30051, options.ckpt_save_path)
    state = TrainState(
        model=net,
        optimizer=optimizer,
        is_recover=options.is_recover,
        callbacks=[TimeMonitor(data_size=1), LossMonitor(1), tft],
    )

    def train(state: TrainState) -> None:
        model = DistributedDataParallel(net)
        for _epoch in state.epochs(options.epoch_num):
            for images, labels in state.batches(loader):
                loss = loss_fn(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    run(train, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
