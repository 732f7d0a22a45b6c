"""Measures the cost of the hooks: training with and without them, in turns in one process.

    scripts/bench overhead                             1500 steps of about 5 ms on each side
    scripts/bench overhead --steps 5000 --step-ms 2 --json result.json
    scripts/bench overhead --live                      with --protect-memory=live

The guarded side works as under msrun: it is connected to a small agent in a thread, and its status
page is real. Both sides train one model in one memory: of two equal models one is up to 2 % slower,
depending on its place in memory. The cost is the median of the differences between steps a turn
apart, for each line of the loop, so that other load of the machine has little influence. The first
steps of a turn do not count. A commit costs more in training than in a tight loop: a step evicts
most of its data from the processor's caches.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from table import machine
from torch import nn

from worker_hooks import TrainState
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import HOOKS, KEEPS_MEMORY
from worker_hooks.data.feed import Feed
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of

RATIO = 1.01  # at most
COMMIT_US = 40.0  # below
WIDEST = 4096
BATCHES = 64
FEATURES, CLASSES, BATCH = 64, 10, 32
LINES = ("next batch (the commit)", "forward", "backward", "optimizer", "scheduler", "zero_grad")
LEAST = 20  # steps
TURN = 20  # steps of one side before it is the other's turn
FIRST = 2  # of them that do not count

Batch = tuple[torch.Tensor, torch.Tensor]
Watched = tuple[Iterator[Batch], Callable[..., None], dict[int, Any], dict[int, Any]]
"""A loop's batches, what its backward calls, and hooks before and after an optimizer's update."""


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    batches = data()
    width = width_for(options.step_ms, batches)
    guard()
    os.environ[KEEPS_MEMORY] = "live" if options.live else ""
    training = Training(width, batches)
    training.arm()
    for turn in range(options.steps // TURN):
        for is_guarded in (False, True) if turn % 2 else (True, False):
            training.turn(TURN, is_guarded=is_guarded)
    extra_us = dict(zip(LINES, extras(training), strict=True))
    step_us = median(map(sum, training.times[False])) * 1e6
    ratio = 1 + sum(extra_us.values()) / step_us
    commit_us, record_us = alone(training, options.steps)
    reached = ratio <= RATIO, commit_us < COMMIT_US
    words = {True: "yes", False: "NO"}
    print(f"{machine()}, load before {load:.1f}; {options.steps} steps of each side\n")
    print(f"a step: {step_us / 1e3:.3f} ms; the hooks add, line by line:")
    for name, each_us in extra_us.items():
        print(f"{each_us:8.1f} us  {name}")
    print(f"guarded / plain: {ratio:.4f}, goal <= {RATIO}: {words[reached[0]]}\n")
    print("Again and again, at once:")
    print(f"{commit_us:8.1f} us  a commit, goal < {COMMIT_US:g}: {words[reached[1]]}")
    print(f"{record_us:8.1f} us  the record under way, once a backward")
    if options.json:
        found = {"machine": machine(), "load_before": load, "ratio": ratio, "extra_us": extra_us}
        found |= {"commit_us": commit_us, "record_us": record_us, "lines": LINES}
        times = {"plain_s": training.times[False], "guarded_s": training.times[True]}
        options.json.write_text(json.dumps(found | times))
    return int(not all(reached))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench overhead",
        description="Measure what the hooks cost a step. Exit status 1: a goal was missed.",
    )
    parser.add_argument("--steps", type=int, default=1500, help="of each side (1500)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="about, without hooks (5)")
    parser.add_argument(
        "--live", action="store_true", help="with --protect-memory=live, which has no goal"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    if options.steps < LEAST or not options.step_ms > 0:
        parser.error(f"--steps must be at least {LEAST}, --step-ms above 0")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    return options


class _Many:
    """Many batches."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return cycle(self._batches)


class Training:
    """One model, trained with or without the hooks."""

    def __init__(self, width: int, batches: list[Batch]) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)]
        self.net = nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, CLASSES))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        # by whether it is guarded: seconds of each line of the loop, step by step
        self.times: dict[bool, list[list[float]]] = {False: [], True: []}
        self._batches = batches
        self._plain: Watched = (cycle(batches), torch.autograd.backward, {}, {})
        self._guarded = self._plain

    def arm(self) -> None:
        """Let the hooks watch the next turns that are guarded."""
        state = TrainState(**self.pieces())
        self._changes = state._committed.changes  # noqa: SLF001
        state.ignore("rows", "at")  # of this measurement, not of a training
        loop = iter(state.batches(_Many(self._batches)))
        self._train(loop, 1)
        before, after = (
            dict(self.optimizer._optimizer_step_pre_hooks),  # noqa: SLF001  torch's own dicts
            dict(self.optimizer._optimizer_step_post_hooks),  # noqa: SLF001
        )
        self._guarded = (loop, torch.autograd.backward, before, after)

    def turn(self, steps: int, *, is_guarded: bool = False) -> None:
        """Train some steps; the first do not count."""
        loop, backward, before, after = self._guarded if is_guarded else self._plain
        if is_guarded:  # the turn without hooks has changed weights behind its back
            self._changes.forget()
        torch.autograd.backward = backward
        for hooks, mine in (
            (self.optimizer._optimizer_step_pre_hooks, before),  # noqa: SLF001
            (self.optimizer._optimizer_step_post_hooks, after),  # noqa: SLF001
        ):
            hooks.clear()
            hooks.update(mine)
        self.times[is_guarded] += self._train(loop, steps)[FIRST:]

    def _train(self, loop: Iterator[Batch], steps: int) -> list[list[float]]:
        """Seconds of each line of so many steps."""
        rows = []
        at = [time.perf_counter()]
        for inputs, labels in loop:
            at.append(time.perf_counter())
            loss = nn.functional.cross_entropy(self.net(inputs), labels)
            at.append(time.perf_counter())
            loss.backward()
            at.append(time.perf_counter())
            self.optimizer.step()
            at.append(time.perf_counter())
            self.scheduler.step()
            at.append(time.perf_counter())
            self.optimizer.zero_grad()
            at.append(time.perf_counter())
            rows.append([after - before for before, after in pairwise(at)])
            if len(rows) == steps:
                break
            at = [time.perf_counter()]
        return rows

    def pieces(self) -> dict[str, object]:
        """What TrainState is given."""
        return {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}


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
    for width in range(64, WIDEST, 64):
        training = Training(width, batches)
        training.turn(LEAST)
        if median(map(sum, training.times[False])) * 1e3 > step_ms:
            return width
    return WIDEST


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
    while (heard := wire.receive(link))[0] is not None:
        pages += heard[1]
        if isinstance(heard[0], protocol.Hello):
            wire.send(link, protocol.Welcome(""))
        elif isinstance(heard[0], protocol.Leaving):
            wire.send(link, protocol.Release("the bench is over"))


def extras(training: Training) -> Iterator[float]:
    """Microseconds that each line takes longer; medians over all pairs of steps."""
    pairs = list(zip(training.times[False], training.times[True], strict=True))
    for line in range(len(LINES)):
        yield median(theirs[line] - ours[line] for ours, theirs in pairs) * 1e6


def alone(training: Training, repeat: int) -> tuple[float, float]:
    """Microseconds of a commit, and of the record under way; medians of ``repeat``."""
    committed = CommittedState(pieces_of(training.pieces()), dict)
    feed, position = Feed(data()), Position(epoch=0, batch=1)
    os.close(committed.open(0, 0, feed, position))
    commits = [microseconds(lambda: committed.commit(position)) for _ in range(repeat)]
    records = [microseconds(lambda: committed.under_way(position)) for _ in range(repeat)]
    return median(commits), median(records)


def microseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
