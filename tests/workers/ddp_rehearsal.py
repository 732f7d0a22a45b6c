"""Every way to use DDP: trained undisturbed, then gone on with from what was saved meanwhile.

``ddp_rehearsal.py FOLDER``. One job does all cases; each training makes its own models.
"""

import contextlib
import hashlib
import inspect
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.distributed import ddp_bucket_order as ours

STEPS = 6
WIDTH = 160
CAP = {"bucket_cap_mb": 0.25}  # two layers


class Crossed(nn.Module):
    """Uses its layers in another order than it defines them."""

    def __init__(self, count=8, dtypes=(torch.float32,), sparse=False, spare=False):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=True) if sparse else None
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=dtypes[place % len(dtypes)]) for place in range(count)
        )
        self.order = [*range(0, count, 2), *reversed(range(1, count, 2))]

    def forward(self, x):
        if self.embedding is not None:
            x = x + self.embedding(torch.arange(len(x)) % 50)
        for place in self.order:
            layer = self.layers[place]
            x = x + torch.tanh(layer(x.to(layer.weight.dtype))).to(x.dtype)
        return x


def frozen():
    net = Crossed()
    for place in (1, 4):
        net.layers[place].weight.requires_grad_(False)
    return [net]


CASES = {
    "small caps": (CAP, lambda: [Crossed()]),
    "default caps": ({}, lambda: [Crossed(16)]),  # more than the first bucket's MiB
    "list of caps": ({"bucket_cap_mb_list": [0.25, 0.5, 0.25]}, lambda: [Crossed()]),
    "static graph": ({**CAP, "static_graph": True}, lambda: [Crossed()]),
    "static graph, unused": (
        {**CAP, "static_graph": True},
        lambda: [Crossed(spare=True)],
    ),
    "views": ({**CAP, "gradient_as_bucket_view": True}, lambda: [Crossed()]),
    "batched copies": ({**CAP, "batched_grad_copy": True}, lambda: [Crossed()]),
    "no_sync": (CAP, lambda: [Crossed()]),
    "every batch synchronized": (CAP, lambda: [Crossed()]),
    "two models": (CAP, lambda: [Crossed(), Crossed(5)]),
    "frozen": (CAP, frozen),
    "dtypes": (
        CAP,
        lambda: [Crossed(9, (torch.float32, torch.float64, torch.bfloat16))],
    ),
    "sparse": (CAP, lambda: [Crossed(sparse=True)]),
    "communication hook": (CAP, lambda: [Crossed()]),
    "unused": (
        {**CAP, "find_unused_parameters": True},
        lambda: [Crossed(spare=True)],
    ),
}
OPTIONS = inspect.signature(DistributedDataParallel).parameters.keys()
CASES = {name: case for name, case in CASES.items() if case[0].keys() <= OPTIONS}  # of this torch


class Training:
    def __init__(self, name):
        self.name = name
        self.options, build = CASES[name]
        torch.manual_seed(0)
        self.nets = build()
        self.hooked = 0
        self.ddps = [DistributedDataParallel(net, **self.options) for net in self.nets]
        if name == "communication hook":
            self.ddps[0].register_comm_hook(self, self.hook.__func__)
        parameters = [p for net in self.nets for p in net.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.hooked += 1
        return allreduce_hook(None, bucket)

    def step(self, number):
        micros = 2 if self.name in {"no_sync", "every batch synchronized"} else 1
        for micro in range(micros):
            seed = (number * 10 + micro) * 100 + dist.get_rank()
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            with contextlib.ExitStack() as quiet:
                if self.name == "no_sync" and micro + 1 < micros:
                    quiet.enter_context(self.ddps[0].no_sync())
                for ddp in self.ddps:
                    ddp(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for ddp in self.ddps:
            ours.learn(ddp)

    def orders(self):
        return [ours.ready_order(ddp) for ddp in ours.find_all(self.nets)]

    def rehearse(self, orders):
        before = torch.get_rng_state()
        done = [ours.rehearse(ddp, order) for ddp, order in zip(self.ddps, orders, strict=True)]
        assert torch.equal(before, torch.get_rng_state())
        assert all(p.grad is None for net in self.nets for p in net.parameters())
        assert self.hooked == 0
        return done

    def save(self):
        return {
            "nets": [net.state_dict() for net in self.nets],
            "optimizer": self.optimizer.state_dict(),
            "orders": self.orders(),
        }

    def load(self, saved):
        for net, state in zip(self.nets, saved["nets"], strict=True):
            net.load_state_dict(state)
        self.optimizer.load_state_dict(saved["optimizer"])

    def digest(self):
        """Of all weights and momenta, and of every rank: they must be replicas."""
        state = hashlib.sha256()
        for p in (p for net in self.nets for p in net.parameters()):
            for tensor in (p, self.optimizer.state[p].get("momentum_buffer", p)):
                values = tensor.detach().to_dense().contiguous()
                state.update(values.view(torch.uint8).numpy().tobytes())
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, state.hexdigest())
        assert len(set(digests)) == 1, self.name
        return digests[0]

    def layout(self):
        return [
            [
                [int(index) for index in bucket.split()]
                for bucket in ddp._get_ddp_logging_data()
                .get("rebuilt_per_bucket_param_indices", "")
                .split(",")
            ]
            for ddp in self.ddps
        ]


def undisturbed(folder):
    seen = {}
    for name in CASES:
        training = Training(name)
        for number in range(1, STEPS + 1):
            training.step(number)
            saved = training.save()
            if dist.get_rank() == 0:
                torch.save(saved, folder / f"{name}-{number}.pt")
        seen[name] = {
            "digest": training.digest(),
            "layout": training.layout(),
            "orders": training.orders(),
        }
    return seen


def resumed(folder):
    seen = {}
    for name in CASES:
        for after, with_rehearsal in ((1, True), (2, True), (3, True), (3, False)):
            training = Training(name)
            saved = torch.load(folder / f"{name}-{after}.pt")
            training.load(saved)
            done = training.rehearse(saved["orders"]) if with_rehearsal else None
            told_again = training.orders()
            for number in range(after + 1, STEPS + 1):
                training.step(number)
            seen[f"{name}, {after}{'' if with_rehearsal else ', unrehearsed'}"] = {
                "digest": training.digest(),
                "done": done,
                "recorded": saved["orders"],
                "told again": told_again,
                "layout": training.layout(),
            }
    return seen


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {"undisturbed": undisturbed(folder), "resumed": resumed(folder)}
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
