"""A small transformer that is cut over ranks, and outlives any of them.

    msrun --worker_num=4 train.py              FSDP2 on a mesh of 2 x 2: half of the model each
    msrun --worker_num=4 train.py --tensor     two ranks share each layer, two such pairs the data
    msrun drill --kill rank=1,step=20 -- --worker_num=4 train.py

It learns to reverse a row of digits. Mesh, ``fully_shard`` and ``parallelize_module`` stand where
they always do; msrun needs the lines with ``TrainState``, ``state.batches`` and ``run``.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from worker_hooks import TrainState, run

DIGITS, LENGTH, WIDTH, HEADS, LAYERS = 10, 8, 64, 4, 2
COPIES = 2  # of the model; each is cut over half of the ranks
BATCH = 16


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of digits, and the same reversed."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(DIGITS, (LENGTH,), generator=generator)
        return row, row.flip(0)


class Attention(nn.Module):
    """Of all places to all, by as many heads as this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[batch, length, width]``, and so is what is returned."""
        parts = (each(x).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.q, self.k, self.v))
        found = scaled_dot_product_attention(*(each.transpose(1, 2) for each in parts))
        return self.out(found.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """As of :class:`Attention`."""
        x = x + self.attention(self.before(x))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Digits in, digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(DIGITS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, row: Tensor) -> Tensor:
        """``row``: ``[batch, length]``; returned are ``[batch * length, digits]``."""
        x = self.digits(row) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def share_layers(net: Transformer, mesh: dist.DeviceMesh) -> None:
    """Tensor parallelism: each rank has some heads of an attention, and some columns."""
    inner = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    inner |= {
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in net.blocks:
        parallelize_module(block, mesh, inner)


def average(net: Transformer, group: dist.ProcessGroup) -> None:
    """Make the gradients of all copies equal; FSDP does that by itself."""
    for each in net.parameters():
        gradient = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
        dist.all_reduce(gradient.div_(COPIES), group=group)


def digest(net: Transformer) -> str:
    """Of the whole weights, the same on all ranks."""
    found = hashlib.sha256()
    for each in net.parameters():
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", action="store_true", help="share layers, not the state")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    shape = COPIES, dist.get_world_size() // COPIES
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    torch.manual_seed(0)
    net = Transformer()
    if options.tensor:
        share_layers(net, mesh["parts"])
    else:
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    # parameters with and without parts are not updated by one call
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, foreach=not options.tensor)
    rows, copies = Rows(), mesh.get_group("copies")
    # ranks that share a layer read the same rows
    readers = (COPIES, mesh.get_local_rank("copies")) if options.tensor else (None, None)
    loader = DataLoader(rows, BATCH, sampler=DistributedSampler(rows, *readers))
    state = TrainState(model=net, optimizer=optimizer, ckpt_save_path="dumps")

    def train(state: TrainState) -> None:
        for epoch in state.epochs(options.epochs):
            for row, reversed_row in state.batches(loader):
                loss = cross_entropy(net(row), reversed_row.flatten())
                loss.backward()
                if options.tensor:
                    average(net, copies)
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0 and state.batch % 16 == 0:
                    told = f"epoch {epoch + 1}, step {state.step + 1}: loss {loss.detach():.4f}"
                    print(told, flush=True)

    run(train, state)
    weights = digest(net)  # a collective
    if dist.get_rank() == 0:
        print("weights", weights, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
