"""Proves msrun on this machine's accelerators, and prints a table to send back.

    scripts/gpu_check                          all devices, of the kind that torch finds
    scripts/gpu_check --ranks 2 --only kill    some rows
    scripts/gpu_check --device cpu             a rehearsal on gloo, without any device

Each row is a drill: a real kill of a rank of a real training, whose weights must end bitwise as
those of an undisturbed one. Exit code 1 if a row fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

FOLDER = Path(__file__).parent
MSRUN = str(Path(sys.executable).with_name("msrun"))
STEPS, AT = 60, 30  # the training's, and the one that is struck
LIMIT_S = 900.0  # for one row
GIB = 1 << 30
LEAST = 2  # ranks: another one must hold what the dead one did
END_S = 60.0  # for a drill that is told to end, with its job


class Drill(NamedTuple):
    """A fault, and what is run under it."""

    name: str
    fault: Sequence[str]  # options of ``msrun drill``
    job: Sequence[str] = ()  # options of ``msrun``
    script: Sequence[str] = ()


DRILLS = (
    Drill("kill in forward", ("--kill", f"rank=1,step={AT},phase=forward")),
    Drill("kill in backward", ("--kill", f"rank=1,step={AT},phase=backward")),
    Drill("kill in the update", ("--kill", f"rank=1,step={AT},phase=update")),
    Drill("kill in the commit", ("--kill", f"rank=1,step={AT},phase=commit")),
    Drill("kill rank 0", ("--kill", f"rank=0,step={AT},phase=backward")),
    Drill("kill, loss.item()", ("--kill", f"rank=1,step={AT},phase=backward"), (), ("--item",)),
    Drill("kill, average of weights", ("--kill", f"rank=1,step={AT},phase=any"), (), ("--ema",)),
    Drill("hang", ("--kill", f"rank=1,step={AT},phase=backward,signal=STOP")),
    Drill("stopped for a second", ("--stop", f"rank=1,step={AT},for=1")),
    Drill(
        "dump and restart",
        ("--kill", f"rank=1,step={AT},phase=backward"),
        ("--on-failure=dump,restart", "--max-restarts=1"),
    ),
    Drill("msrun killed, resume", ("--kill", f"rank=launcher,step={AT}")),
    Drill("graceful exit, resume", ("--graceful", f"step={AT}")),
)


class Row(NamedTuple):
    """A line of the table."""

    name: str
    result: str
    is_good: bool
    took_s: float
    more: str = ""


def main() -> int:
    options = arguments()
    rows = []
    for drill in DRILLS:
        if options.only in drill.name:
            rows.append(drilled(drill, options))
            print(f"{'ok  ' if rows[-1].is_good else 'FAIL'} {rows[-1].name}", file=sys.stderr)
    if options.only in "speeds":
        rows += [*step_times(options), *copy_rates(options)]
    facts = machine(options)
    print("\n".join(f"{name:8} {value}" for name, value in facts.items()))
    print("\n| check | result | s | |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.name} | {row.result} | {row.took_s:.1f} | {row.more} |")
    if options.json:
        document = {"machine": facts, "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if rows and all(row.is_good for row in rows) else 1


def arguments() -> argparse.Namespace:
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if found is None else found.type
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="" if kind == "cpu" else kind)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--only", default="", help="rows with this in their name; speeds: the last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.device:
        parser.error("torch finds no accelerator here; --device cpu rehearses without one")
    count = 4 if options.device == "cpu" else torch.accelerator.device_count()
    options.ranks = options.ranks or count
    if not LEAST <= options.ranks <= count:
        parser.error(f"--ranks must be from {LEAST} to {count}, a rank for each device")
    return options


def machine(options: argparse.Namespace) -> dict[str, str]:
    name = platform.processor() or platform.machine()
    if options.device != "cpu":
        module = torch.get_device_module(options.device)
        name = str(getattr(module, "get_device_name", lambda _: options.device)(0))
    return {
        "device": f"{options.ranks} x {name}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def drilled(drill: Drill, options: argparse.Namespace) -> Row:
    """One drill; its verdict is ``msrun drill``'s."""
    training = (*job(options, *drill.job), *script(options, *drill.script))
    began = time.monotonic()
    code, said, error = run([MSRUN, "drill", *drill.fault, "--json", "--", *training])
    took_s = time.monotonic() - began
    try:
        found: dict[str, Any] = json.loads(said)
        (outcome,) = found["drills"]
    except (ValueError, KeyError):
        return Row(drill.name, "FAIL", is_good=False, took_s=took_s, more=last_line(error or said))
    back = outcome.get("training_s")
    more = f"{outcome.get('answer') or ''}, trains again after {back:.2f} s" if back else ""
    is_good = code == 0 and bool(found["ok"])
    return Row(drill.name, str(outcome["verdict"]), is_good, took_s, more.strip(", "))


def step_times(options: argparse.Namespace) -> list[Row]:
    """The cost of the hooks, in turns."""
    found: dict[bool, list[float]] = {True: [], False: []}
    began = time.monotonic()
    for turn in range(6):
        plain = turn % 2 == 0
        more = ("--pause=0", "--width=1024", "--steps=400", *(("--no-state",) if plain else ()))
        _, said, error = run([MSRUN, *job(options), *script(options, *more)])
        times = re.findall(r"median step ([\d.]+) ms", said)
        if not times:
            return [Row("step time", "FAIL", is_good=False, took_s=0, more=last_line(error))]
        found[plain].append(float(times[0]))
    plain_ms, ours_ms = min(found[True]), min(found[False])
    said = f"{ours_ms:.2f} ms with TrainState, {plain_ms:.2f} ms without"
    ratio = f"{ours_ms / plain_ms:.3f}"
    return [Row("step time", ratio, is_good=True, took_s=time.monotonic() - began, more=said)]


def copy_rates(options: argparse.Namespace) -> list[Row]:
    """How fast state comes from a device, as a dump reads it and as pinned memory takes it."""
    if options.device == "cpu":  # is read where it lies
        return []
    from worker_hooks.device.side_stream import DeviceAccess
    from worker_hooks.tensors.device_digest import side_streams
    from worker_hooks.tensors.reader import Reader
    from worker_hooks.tensors.shard import Replica, quick_digest

    torch.manual_seed(1)
    source = torch.randint(-(1 << 62), 1 << 62, (GIB // 8 - 5,)).to(options.device)
    rows, digests, on_host = [], set(), source.cpu()
    sides = side_streams([source])
    is_good = bool(sides)
    for name, access in ("pageable", DeviceAccess()), ("page-locked", DeviceAccess(sides=sides)):
        began = time.monotonic()
        for _ in Reader(access).pieces(source):
            pass
        rows.append(speed(f"read for a dump, {name}", time.monotonic() - began, is_good=is_good))
    for name, tensor in ("host", on_host), ("device", source):
        began = time.monotonic()
        digests.add(quick_digest(Replica({"w": tensor}, (), "", {}, DeviceAccess(sides=sides))))
        is_good &= len(digests) == 1  # else replicas that are equal seem to differ
        rows.append(speed(f"digest on the {name}", time.monotonic() - began, is_good=is_good))
    target = torch.empty(source.shape, pin_memory=True)
    torch.accelerator.synchronize()
    began = time.monotonic()
    target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    return [*rows, speed("copy to pinned memory", time.monotonic() - began, is_good=True)]


def speed(name: str, took_s: float, *, is_good: bool) -> Row:
    return Row(name, f"{GIB / took_s / 1e9:.1f} GB/s", is_good=is_good, took_s=took_s)


def job(options: argparse.Namespace, *more: str) -> tuple[str, ...]:
    return (f"--worker-num={options.ranks}", *more)


def script(options: argparse.Namespace, *more: str) -> tuple[str, ...]:
    told = () if any(each.startswith("--steps") for each in more) else (f"--steps={STEPS}",)
    return (str(FOLDER / "train.py"), f"--device={options.device}", *told, *more)


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """A command in an empty folder, to its end."""
    with tempfile.TemporaryDirectory(prefix="msrun-gpu-check-") as folder:
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        try:
            said, error = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)
            process.kill()
            return 1, "", f"not done within {LIMIT_S:.0f} s"
        return process.returncode, said, error


def last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "")[:200].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
