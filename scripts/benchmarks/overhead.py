"""What the hooks cost: a training step with and without them, by turns in one process.

The guarded side is armed as under msrun: its line leads to a small agent in a thread, its status
page is real. Both sides train models of their own, equal in everything; the ratio is of the sums
of all steps. Then each part of the cost is timed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import threading
import time

import torch
from torch import nn

from worker_hooks import TrainState, protocol
from worker_hooks.env import HOOKS
from worker_hooks.watch import unwatch_backward, watch_backward

STEP_MS = 5.0


def greet(listener: socket.socket, pages: list[int]) -> None:
    """Be the agent: welcome the rank and hold its page."""
    link, _ = listener.accept()
    while (heard := protocol.receive(link))[0] is not None:
        pages += heard[1]
        if isinstance(heard[0], protocol.Hello):
            protocol.send(link, protocol.Welcome(""))
        elif isinstance(heard[0], protocol.Leaving):
            protocol.send(link, protocol.Release("the bench is over"))


def guarded_by_a_thread() -> None:
    name = f"msrun-bench-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen()
    threading.Thread(target=greet, args=(listener, []), daemon=True).start()
    os.environ[HOOKS] = name


def network(width: int) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1)]
    layers += [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


class Side:
    """One of the two trainings; :meth:`step` is one turn of its loop."""

    def __init__(self, width: int, data: list, *, is_guarded: bool) -> None:
        self.net = network(width)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        self.state = None
        self.batches = iter(data)
        if is_guarded:
            self.state = TrainState(
                model=self.net, optimizer=self.optimizer, scheduler=self.scheduler
            )
            self.batches = self.state.batches(data)
        self.times: list[float] = []

    def step(self) -> None:
        started = time.perf_counter()
        x, y = next(self.batches)
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - started)


def width_for(step_ms: float) -> int:
    """The width of layers that makes a step about so long on this machine."""
    for width in range(128, 4096, 64):
        side = Side(width, data(24), is_guarded=False)
        for _ in range(24):
            side.step()
        if statistics.median(side.times[4:]) * 1000 > step_ms:
            return width
    return 4096


def data(count: int) -> list:
    make = torch.Generator().manual_seed(2)
    return [
        (torch.randn(32, 64, generator=make), torch.randint(0, 10, (32,), generator=make))
        for _ in range(count)
    ]


def parts(state: TrainState, repeat: int) -> dict[str, float]:
    """Microseconds of each part, alone: medians of ``repeat``."""
    ledger, position = state._ledger, state._position()
    snapshots = {
        f"snapshot {piece.name}": piece.snapshot for piece in ledger.pieces
    }
    calls = {
        "commit, all of it": lambda: ledger.commit(position),
        "record under way, all of it": lambda: ledger.under_way(position),
        "  randomness": lambda: ledger.randomness.fill(ledger.page._address + 64 * 1024),
        "  heartbeat": lambda: ledger.beat(position, state._phase),
        **{f"  {name}": call for name, call in snapshots.items()},
    }
    return {name: microseconds(call, repeat) for name, call in calls.items()}


def microseconds(call, repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="of each side (default 1500)")
    parser.add_argument("--step_ms", type=float, default=STEP_MS, help="about (default 5)")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    torch.set_num_threads(1)
    guarded_by_a_thread()
    width = width_for(told.step_ms)
    samples = data(64)
    plain = Side(width, samples * (told.steps // 64 + 2), is_guarded=False)
    hooked = Side(width, samples * (told.steps // 64 + 2), is_guarded=True)
    for turn in range(told.steps):
        for side in (plain, hooked) if turn % 2 else (hooked, plain):
            if side is plain and turn:
                unwatch_backward(hooked.state._began_backward)
            side.step()
            if side is plain and turn:
                watch_backward(hooked.state._began_backward)
    warm = told.steps // 10
    sums = [sum(sorted(side.times[warm:])[: -len(side.times) // 20]) for side in (plain, hooked)]
    medians = [statistics.median(side.times[warm:]) * 1000 for side in (plain, hooked)]
    found = {
        "step_ms": medians[0],
        "guarded_step_ms": medians[1],
        "ratio_of_sums": sums[1] / sums[0],
        "ratio_of_medians": medians[1] / medians[0],
        "parts_us": parts(hooked.state, 2000),
    }
    if told.json:
        print(json.dumps(found, indent=1))
        return
    print(f"a step: {medians[0]:.3f} ms, guarded {medians[1]:.3f} ms (medians of {told.steps})")
    print(f"ratio: {found['ratio_of_sums']:.4f} of sums without the slowest twentieth,")
    print(f"       {found['ratio_of_medians']:.4f} of medians; to reach: at most 1.01")
    for name, took in found["parts_us"].items():
        print(f"{took:8.1f} us  {name}")


if __name__ == "__main__":
    main()
