"""Measures a dump beside a plain loop that writes and fsyncs the same bytes to the same folder.

    scripts/bench dump                             1 GiB, medians of 7 turns after a warm-up
    scripts/bench dump --gib 4 --folder /mnt/ckpt --parts 4 --json result.json

Both sides write the same live tensors. The dump also computes the file's checksum and the state's
digest; the loop only writes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from launch import machine
from rows import Goal, Samples, three_digits

from worker_hooks.tensors.shard import Replica, digest, write
from worker_hooks.tensors.tensor_bytes import to_bytes

GIB = 1 << 30
FASTEST = Goal(ratio=0.85)  # of the plain loop's throughput
LEANEST = Goal(below=64)  # MB of extra memory
ROW = 4096 * 1024  # elements of a tensor


@dataclass(slots=True)
class Turns:
    """The figures of all turns."""

    plain_s: list[float] = field(default_factory=list)
    dump_s: list[float] = field(default_factory=list)
    digest_s: list[float] = field(default_factory=list)
    extra_mb: list[float] = field(default_factory=list)


def main() -> int:
    options = arguments()
    state = replica(options.gib, strided=options.strided)
    nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="msrun-bench-", dir=options.folder) as folder:
        turns = measure(state, Path(folder, "state"), options)
    written = nbytes // options.parts
    ratio = median(turns.plain_s) / median(turns.dump_s)
    extra_mb = max(turns.extra_mb)
    print(f"{nbytes / GIB:.3g} GiB, {machine()}, load before {load:.1f}; median [min, max]\n")
    print("\n".join(table(turns, written, nbytes)))
    reached = [ratio >= FASTEST.ratio, extra_mb < LEANEST.below]
    words = {True: "yes", False: "NO"}
    print(f"\nthroughput, dump / plain loop: {ratio:.2f}x, goal {FASTEST}: {words[reached[0]]}")
    print(f"extra peak memory: {extra_mb:.1f} MB, goal {LEANEST}: {words[reached[1]]}")
    if options.json:
        figures = {name: getattr(turns, name) for name in Turns.__slots__}
        result = {"machine": machine(), "load_before": load, "nbytes": nbytes, "ratio": ratio}
        options.json.write_text(json.dumps({**result, **figures}, indent=2))
    return int(not all(reached))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench dump",
        description="Measure a dump beside a plain loop. Exit status 1: a goal was missed.",
    )
    parser.add_argument("--runs", type=int, default=7, help="turns of each side (7)")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (1)")
    parser.add_argument("--parts", type=int, default=1, help="write one of so many parts (1)")
    parser.add_argument("--strided", action="store_true", help="tensors that lie out of order")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (.)")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    if options.runs < 1 or options.parts < 1 or not options.gib * GIB >= 4 * ROW:
        parser.error("--runs and --parts must be at least 1, --gib at least 1/64")
    if not options.folder.is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    return options


def replica(gib: float, *, strided: bool) -> Replica:
    """Build tensors of 16 MiB and some small ones, as of a model and its optimizer."""
    torch.manual_seed(0)
    count = round(gib * GIB / (4 * ROW))
    tensors = {f"layer.{n}.weight": torch.randn(4096, 1024 + strided) for n in range(count)}
    if strided:
        tensors = {name: tensor[:, 1:] for name, tensor in tensors.items()}
    tensors |= {f"layer.{number}.bias": torch.randn(1024) for number in range(count)}
    tensors |= {f"layer.{number}.step": torch.tensor(1.0) for number in range(count)}
    return Replica(tensors, [], "{}", {})


def measure(state: Replica, path: Path, options: argparse.Namespace) -> Turns:
    """Take turns after a warm-up of each side: plain, dump, plain, dump ..."""
    turns = Turns()
    sides: list[tuple[str, Callable[[], object], list[float]]] = [
        ("plain loop", lambda: plain(state, path, options.parts), turns.plain_s),
        ("dump", lambda: write(path, state, 0, options.parts, quiet), turns.dump_s),
        ("digest", lambda: digest(state, quiet), turns.digest_s),
    ]
    for number in range(options.runs + 1):
        for name, act, figures in sides:
            os.sync()  # what the turn before left to the disk is not this one's
            before = peak_mb()
            started = time.perf_counter()
            act()
            took_s = time.perf_counter() - started
            extra_mb = peak_mb(since=False) - before
            path.unlink(missing_ok=True)
            turn = f"turn {number}" if number else "warm-up"
            print(f"{name}, {turn}: {took_s:.3f} s, {extra_mb:.1f} MB", file=sys.stderr, flush=True)
            if number:
                figures.append(took_s)
            if name == "dump":  # the warm-up, too: a process dumps once
                turns.extra_mb.append(extra_mb)
    return turns


def plain(state: Replica, path: Path, parts: int) -> None:
    """Write and fsync the same bytes, or a part as large as the dump's."""
    left = sum(tensor.nbytes for tensor in state.tensors.values()) // parts
    with open(path, "wb", buffering=0) as file:
        for content in contents(state):
            file.write(content[:left])
            left -= min(left, len(content))
        os.fsync(file.fileno())


def contents(state: Replica) -> Iterator[memoryview]:
    for tensor in state.tensors.values():
        yield to_bytes(tensor)


def quiet(_nbytes: int) -> None:
    pass


def peak_mb(*, since: bool = True) -> float:
    """Read the peak of this process's resident memory; ``since``: measured from now on."""
    if since:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3 * 1.024


def table(turns: Turns, written: int, nbytes: int) -> Iterator[str]:
    """Build a Markdown table of seconds, and what they mean in gigabytes a second."""
    rows = (
        ("plain loop: write, fsync", written, turns.plain_s),
        ("dump: write, checksum, digest, fsync", written, turns.dump_s),
        ("digest alone", nbytes, turns.digest_s),
    )
    yield f"| {'what':36} | {'GB/s':5} | {'s':24} |"
    yield f"| {'-' * 36} | {'-' * 5} | {'-' * 24} |"
    for what, size, figures in rows:
        speed = three_digits(size / 1e9 / median(figures))
        yield f"| {what:36} | {speed:5} | {Samples(figures)!s:24} |"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
