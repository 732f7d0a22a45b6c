"""Measures what the hooks cost: a training step with and without them, by turns in one process.

    scripts/bench overhead                             1500 steps of about 5 ms on each side
    scripts/bench overhead --steps 5000 --step-ms 2 --json result.json

The guarded side is armed as under msrun: its line leads to a small agent in a thread, its status
page is real. Both sides train models of their own, equal in everything; the ratio is of the sums
of all steps but each side's slowest twentieth. Then each part of the cost is timed alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from rows import three_digits
from table import machine
from torch import nn

from worker_hooks import TrainState, protocol
from worker_hooks.env import HOOKS
from worker_hooks.ledger import Ledger, Position
from worker_hooks.loader import Feed
from worker_hooks.page import Phase
from worker_hooks.pieces import pieces_of

RATIO = 1.01  # at most
COMMIT_US = 40.0  # below
SLOWEST = 20  # one step of so many is left out of the sums: the machine's, not ours
BATCHES = 64
FEATURES, CLASSES, BATCH = 64, 10, 32

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    batches = data()
    width = width_for(options.step_ms, batches)
    guard()
    plain, guarded = sides = (Side(width, batches), Side(width, batches, is_guarded=True))
    for number in range(options.steps):
        for side in sides if number % 2 else reversed(sides):
            side.step()
    ratio = guarded.total_s() / plain.total_s()
    parts_us = parts(guarded, options.steps)
    took = {name: median(side.times) * 1e3 for name, side in zip(("plain", "guarded"), sides)}
    reached = (ratio <= RATIO, parts_us["commit"] < COMMIT_US)
    said = {True: "yes", False: "NO"}
    print(f"{machine()}, load before {load:.1f}; {options.steps} steps of each side\n")
    print(f"a step: {took['plain']:.3f} ms, guarded {took['guarded']:.3f} ms (medians)")
    print(f"guarded / plain: {ratio:.4f}, goal <= {RATIO}: {said[reached[0]]}")
    print(f"a commit: {parts_us['commit']:.1f} us, goal < {COMMIT_US:g}: {said[reached[1]]}")
    for name, each_us in parts_us.items():
        print(f"  {three_digits(each_us):>6} us  {name}")
    if options.json:
        found = {"machine": machine(), "load_before": load, "ratio": ratio, "parts_us": parts_us}
        times = {"plain_s": plain.times, "guarded_s": guarded.times}
        options.json.write_text(json.dumps(found | times, indent=2))
    return int(not all(reached))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench overhead",
        description="Measure what the hooks cost a step. Exit status 1: a goal was missed.",
    )
    parser.add_argument("--steps", type=int, default=1500, help="of each side (1500)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="about, without hooks (5)")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    if options.steps < SLOWEST or not options.step_ms > 0:
        parser.error(f"--steps must be at least {SLOWEST}, --step-ms above 0")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    return options


class Side:
    """One of the two trainings."""

    def __init__(self, width: int, batches: list[Batch], *, is_guarded: bool = False) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)]
        self.net = nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, CLASSES))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        self.times: list[float] = []
        self._loop = self._batches(batches, is_guarded=is_guarded)
        self._backward = torch.autograd.backward
        self.step()  # arms the hooks, which watch every backward of the process
        self._backward = torch.autograd.backward
        self.times.clear()

    def step(self) -> None:
        """Train one step, from batch to batch."""
        torch.autograd.backward = self._backward
        started = time.perf_counter()
        inputs, labels = next(self._loop)
        nn.functional.cross_entropy(self.net(inputs), labels).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - started)

    def total_s(self) -> float:
        """The sum of all steps but the slowest."""
        return sum(sorted(self.times)[: -(len(self.times) // SLOWEST)])

    def pieces(self) -> dict[str, object]:
        """What TrainState is given."""
        return {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def _batches(self, batches: list[Batch], *, is_guarded: bool) -> Iterator[Batch]:
        if not is_guarded:
            return cycle(batches)
        state = TrainState(**self.pieces())
        return (batch for _ in cycle([0]) for batch in state.batches(batches))


def data() -> list[Batch]:
    make = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(BATCH, FEATURES, generator=make),
            torch.randint(0, CLASSES, (BATCH,), generator=make),
        )
        for _ in range(BATCHES)
    ]


def width_for(step_ms: float, batches: list[Batch]) -> int:
    """Find layers so wide that a step takes about so long on this machine."""
    for width in range(64, 4096, 64):
        side = Side(width, batches)
        for _ in range(SLOWEST):
            side.step()
        if median(side.times) * 1e3 > step_ms:
            return width
    return 4096


def guard() -> None:
    """Be the agent, in a thread: the next TrainState finds somebody who guards it."""
    name = f"msrun-bench-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen()
    threading.Thread(target=welcome, args=(listener,), daemon=True).start()
    os.environ[HOOKS] = name


def welcome(listener: socket.socket) -> None:
    link, _ = listener.accept()
    pages: list[int] = []  # held, as the agent does
    while (heard := protocol.receive(link))[0] is not None:
        pages += heard[1]
        if isinstance(heard[0], protocol.Hello):
            protocol.send(link, protocol.Welcome(""))
        elif isinstance(heard[0], protocol.Leaving):
            protocol.send(link, protocol.Release("the bench is over"))


def parts(side: Side, repeat: int) -> dict[str, float]:
    """Microseconds of each part, alone: medians of ``repeat``."""
    ledger = Ledger(pieces_of(side.pieces()), dict)
    feed, position = Feed(data()), Position(epoch=0, batch=1)
    os.close(ledger.open(0, 0, feed, position))
    room = ctypes.create_string_buffer(sum(each.nbytes for each in ledger.randomness.entries))
    address = ctypes.addressof(room)
    calls: dict[str, Callable[[], object]] = {
        "commit": lambda: ledger.commit(position),
        "of it: random generators": lambda: ledger.randomness.fill(address),
        **{f"of it: snapshot of {piece.name}": piece.snapshot for piece in ledger.pieces},
        **{f"of it: mark of {piece.name}": piece.marks for piece in ledger.pieces},
        "record under way, once a backward": lambda: ledger.under_way(position),
        "heartbeat, five times a step": lambda: ledger.beat(position, Phase.FORWARD),
    }
    return {name: microseconds(call, repeat) for name, call in calls.items()}


def microseconds(call: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return median(times) / 1e3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
