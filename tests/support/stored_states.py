"""Real states of training, saved as periodic checkpoints without a run."""

from __future__ import annotations

import json
import time

import torch
from torch import nn

from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.state.registry import pieces_of
from worker_hooks.storage import commit
from worker_hooks.storage.manifest import Manifest, Shard
from worker_hooks.tensors.shard import Replica, write
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes


class Net(nn.Module):
    """Large enough to be cut, with what has its own troubles: buffers, a shared weight, scalars."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(700, 800)
        self.norm = nn.BatchNorm1d(800)
        self.tied = nn.Linear(700, 800)
        self.tied.weight = self.wide.weight
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.short = nn.Parameter(torch.randn(3, 5).bfloat16())
        self.register_buffer("table", torch.arange(4), persistent=True)


def trained(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    net.norm.running_mean.normal_()
    return optimizer


def stored(folder, objects, *, step=7, parts=3, whole_each=False, more=()):
    """A periodic checkpoint of registered objects, as training writes it; ``more``: of the model."""
    pieces = pieces_of(objects)
    tensors, buffers, values = {}, [], {}
    for piece in pieces:
        value, small = piece.encode(piece.snapshot())
        tensors |= piece.tensors() | small
        values[piece.name] = value
        places = getattr(piece, "places", tuple)()
        buffers += [(entry_of(one.name, one.tensor), to_bytes(one.tensor)) for one in places]
    if more:
        values["model"] |= more
    replica = Replica(tensors, buffers, json.dumps({"pieces": values}), {"objects": "{}"})
    layout = CheckpointLayout(folder, "CKP", 1, step, "r1")
    commit.make_folder(layout.place)
    shards = []
    for rank in range(parts):
        path = layout.unfinished / layout.shard(rank)
        path.parent.mkdir()
        part = (0, 1) if whole_each else (rank, parts)
        done = write(path, replica, *part, lambda _: None)
        shards.append(Shard(layout.shard(rank), rank, "replicated", done.nbytes, done.sha256))
    made = Manifest(
        "checkpoint", step, 1, step, parts, 0, "r1", "", time.time(), tuple(shards), "d"
    )
    commit.commit(layout.place, made)
    return layout.folder
