"""Measures how long saving a checkpoint stalls training: several ways, in turns in one process.

    scripts/bench save                                 500 MB, 5 saves of each way after a warm-up
    scripts/bench save --mb 2000 --runs 3 --folder /mnt/ckpt --json result.json

One training runs all along: wide layers, AdamW, one thread, as ranks have. The stall of a save is
how much longer its steps take, the save's own call included, from the step that saves until the
checkpoint is complete. torch.save gets only the tensors and does not wait for the disk; the
others bring them to the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import machine
from rows import Goal, Samples
from torch import nn

from worker_hooks import CheckpointConfig, ModelCheckpoint, TrainState

FASTEST = Goal(ratio=5)  # DCP's stall / ours
SAME_BYTES = 0.01  # as a share
QUIET = 6  # steps before each save, for the usual step time
MOST = 400  # steps of a save
WIDTH = 2048
COPIES = 3  # of each weight: itself and two of AdamW's
TORCH, SYNC, DCP, ASYNC = "torch.save", "ours, sync", "DCP async_save", "ours, async_save"
WAYS = (TORCH, SYNC, DCP, ASYNC)


@dataclass(slots=True)
class Way:
    """The figures of one way to save."""

    stall_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)  # of the step that saves, as much longer
    whole_s: list[float] = field(default_factory=list)  # until the checkpoint is complete
    nbytes: int = 0


class Due:
    """A schedule that the benchmark controls."""

    def __init__(self) -> None:
        self.is_on = False

    def is_due(self, _step: int) -> bool:
        """Whether a checkpoint is due."""
        return self.is_on

    def close(self) -> None:
        """Nothing."""


class Training:
    """The training, and all ways to save it."""

    def __init__(self, mb: float, folder: Path) -> None:
        torch.manual_seed(1)
        count = max(1, round(mb * 1e6 / (4 * COPIES * WIDTH * WIDTH)))
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.folder = folder
        self.due = {SYNC: Due(), ASYNC: Due()}
        self.saving = {
            way: ModelCheckpoint("CKP", folder / way, config(is_async=way == ASYNC))
            for way in self.due
        }
        self.state = TrainState(
            model=self.net, optimizer=self.optimizer, callbacks=list(self.saving.values())
        )
        for way, due in self.due.items():
            self.saving[way]._schedule = due  # noqa: SLF001  the bench's own
        self._inputs = torch.randn(8, WIDTH)
        self._steps = self._training()
        self._future: object = None
        self.step()

    def step(self) -> float:
        """Train one step; its seconds, the commit before it included."""
        began = time.perf_counter()
        next(self._steps)
        return time.perf_counter() - began

    def _training(self) -> Iterator[None]:
        for _ in self.state.batches(iter(int, 1)):
            self.net(self._inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            yield

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, for ways that take tensors."""
        found = {f"model.{name}": each for name, each in self.net.state_dict().items()}
        for number, held in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{number}.{key}": each for key, each in held.items()}
        return found

    def save(self, way: str, tensors: dict[str, torch.Tensor]) -> float:
        """Train the step that saves; its seconds."""
        began = time.perf_counter()
        if way == TORCH:
            torch.save(tensors, self.folder / way / "state.pt")
        elif way == DCP:
            self._future = dcp.async_save(tensors, checkpoint_id=self.folder / way / "state")
        else:
            self.due[way].is_on = True
        self.step()
        for due in self.due.values():
            due.is_on = False
        return time.perf_counter() - began

    def is_complete(self, way: str) -> bool:
        """Whether the save is complete; a failure is raised."""
        if way == DCP:
            if self._future.done():
                self._future.result()
            return self._future.done()
        background = self.saving[ASYNC]._writer  # noqa: SLF001  the bench's own
        return way != ASYNC or not background.is_busy


def main() -> int:
    options = arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="msrun-bench-", dir=options.folder) as folder:
        training = Training(options.mb, Path(folder))
        nbytes = sum(each.nbytes for each in training.tensors().values())
        found = measure(training, options.runs)
        training.state.finish()
    dist.destroy_process_group()
    print(f"{nbytes / 1e6:.0f} MB, {machine()}, load before {load:.1f}; median [min, max]\n")
    print("\n".join(table(found)))
    ratio = median(found[DCP].stall_s) / median(found[ASYNC].stall_s)
    share = abs(found[ASYNC].nbytes / found[DCP].nbytes - 1)
    reached = [ratio >= FASTEST.ratio, share < SAME_BYTES]
    words = {True: "yes", False: "NO"}
    print(f"\nstall, DCP async_save / ours: {ratio:.1f}x, goal {FASTEST}: {words[reached[0]]}")
    print(f"bytes on disk differ by {share:.2%}, goal < {SAME_BYTES:.0%}: {words[reached[1]]}")
    if options.json:
        ways = {
            way: {name: getattr(one, name) for name in Way.__slots__} for way, one in found.items()
        }
        result = {"machine": machine(), "load_before": load, "nbytes": nbytes, "ratio": ratio}
        options.json.write_text(json.dumps({**result, "ways": ways}, indent=2))
    return int(not all(reached))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench save",
        description="Measure what a save costs training. Exit status 1: a goal was missed.",
    )
    parser.add_argument("--runs", type=int, default=5, help="saves of each way (5)")
    parser.add_argument("--mb", type=float, default=500.0, help="size of the state (500)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (.)")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    if options.runs < 1 or not options.mb > 0:
        parser.error("--runs must be at least 1, --mb above 0")
    if not options.folder.is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    return options


def config(*, is_async: bool) -> CheckpointConfig:
    return CheckpointConfig(keep_checkpoint_max=1, async_save=is_async)


def measure(training: Training, runs: int) -> dict[str, Way]:
    """Take turns after a warm-up of each way."""
    found = {way: Way() for way in WAYS}
    for number in range(runs + 1):
        for way in WAYS:
            one = saved(training, way)
            turn = f"turn {number}" if number else "warm-up"
            print(f"{way}, {turn}: {one[0] * 1e3:.0f} ms", file=sys.stderr, flush=True)
            if number:
                for name, figure in zip(("stall_s", "call_s", "whole_s"), one, strict=True):
                    getattr(found[way], name).append(figure)
            found[way].nbytes = sum(
                path.lstat().st_size
                for path in (training.folder / way).rglob("*")
                if path.is_file() and not path.is_symlink()
            )
    return found


def saved(training: Training, way: str) -> tuple[float, float, float]:
    """Save once: the stall, that of the first step, and the time until all is complete."""
    if way in {TORCH, DCP}:
        shutil.rmtree(training.folder / way, ignore_errors=True)
        (training.folder / way).mkdir()
    os.sync()  # the disk has finished the turn before
    usual_s = median(training.step() for _ in range(QUIET))
    tensors = training.tensors()
    began = time.perf_counter()
    call_s = stall_s = training.save(way, tensors) - usual_s
    for _ in range(MOST):
        if training.is_complete(way):
            return stall_s, call_s, time.perf_counter() - began
        stall_s += training.step() - usual_s
    raise TimeoutError(f"{way} is not complete after {MOST} steps")


def table(found: dict[str, Way]) -> Iterator[str]:
    """Build a Markdown table."""
    ms: Callable[[list[float]], str] = lambda values: str(Samples([each * 1e3 for each in values]))  # noqa: E731
    cells = [["way", "stall (ms)", "of its first step (ms)", "complete after (ms)", "MB on disk"]]
    for way, one in found.items():
        size = f"{one.nbytes / 1e6:.1f}"
        cells.append([way, ms(one.stall_s), ms(one.call_s), ms(one.whole_s), size])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(padded)} |"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
