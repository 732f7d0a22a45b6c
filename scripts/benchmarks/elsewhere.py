"""Measures what it costs that a rank which dies is on another node than the controller.

    scripts/bench elsewhere                            medians of 6 turns, 2 deaths each
    scripts/bench elsewhere --ballast 64 --turns 2     with 64 MiB more of state

Four ranks on one node, two and two, and three and one take turns, on nodes that are made of
namespaces. A rank of the last node dies; where it was the only one there the state travels. Ratios
are to one node. Exit status 1: that of two and two is 2 or more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import replacement
import spare_memory
from recovery import milestones
from scenarios import LIMIT_S, Figures
from step_board import Board, lost, sent
from table import aligned, machine
from trial import MARK, WORKERS, Trial, TrialError, environment
from turns import progress, stoppable

from msrun.cluster.cluster import Cluster
from msrun.cluster.namespaces import refusal

BIN = Path(sys.executable).parent
SIZES = {"4 ranks": (4,), "2 + 2": (2, 2), "3 + 1": (3, 1)}
RANKS, GOAL = 4, 2.0
PORT = 29511
STEPS = 20  # of all ranks, before the first death and between two
PARTS = {what: f"  -> {what}" for what in replacement.PARTS.values()}
ROWS = {"": "kill -9 -> all past their next step", **PARTS}


@contextlib.contextmanager
def started(sizes: tuple[int, ...], words: list[str]) -> Iterator[tuple[Trial, Cluster]]:
    """A job of so many ranks on each node; afterwards nothing of it is left."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="msrun-bench-")))
        os.mkfifo(folder / "stamps")
        fifo = os.open(folder / "stamps", os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, fifo)
        # one thread each: a rank that is alone on its node would have as many as there are cores
        environ = environment(folder, f"{MARK}=elsewhere") | {"OMP_NUM_THREADS": "1"}
        cluster = stack.enter_context(Cluster(len(sizes), folder, environ))
        script = (WORKERS / "guarded.py", folder / "stamps", *words)
        heads = [
            node.run(
                [
                    BIN / "msrun",
                    f"--nnodes={len(sizes)}",
                    f"--node-rank={node.index}",
                    f"--nproc-per-node={nproc}",
                    "--master-addr=node0",
                    f"--master-port={PORT}",
                    "--max-replacements=1000",
                    *script,
                ],
                cwd=folder,
                stderr=folder / ("output" if node.index == 0 else f"output{node.index}"),
            )
            for node, nproc in zip(cluster.nodes, sizes, strict=True)
        ]
        exited = os.pidfd_open(heads[0].process.pid)
        stack.callback(os.close, exited)
        output = folder / "output"
        yield Trial(heads[0].process, time.monotonic(), MARK, output, fifo, exited), cluster


def deaths(
    sizes: tuple[int, ...], words: list[str], count: int, seed: int, spare: int
) -> Iterator[Figures]:
    """Kill ranks of the last node in one job.

    ``spare``: bytes of memory that are given back right before each death.

    Raises:
        TrialError: it does not come back.
    """
    chance = random.Random(seed)
    with started(sizes, words) as (trial, cluster):
        board = Board(trial)
        board.wait_all(RANKS, STEPS, LIMIT_S)
        for number in range(count):
            with spare_memory.held(spare):  # else a large state's figure is the hypervisor's
                time.sleep(0.5 + 0.3 * chance.random())  # shadows, copies and news are done
            board.read()
            victim = RANKS - 1 - number % min(2, sizes[-1])
            inner = board.pids()[victim]
            seen = cluster.nodes[-1].processes()
            (pid,) = [pid for pid, own in seen.items() if own == inner]
            wall_s = time.time() - time.monotonic()
            killed_s = sent(pid, signal.SIGKILL)
            back = board.wait_again(RANKS, killed_s, LIMIT_S)
            board.wait_all(RANKS, back.step + STEPS, LIMIT_S)
            if lost(board.lines, back) or back.new != 1:
                raise TrialError(f"death {number}: {back.new} ranks are new")
            events = milestones(cluster.nodes[0].folder, replacement.PARTS)
            parts = {what: at_s - wall_s - killed_s for what, at_s in events.items()}
            yield {"": back.at_s - killed_s, **parts}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench elsewhere", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--turns", type=int, default=6, help="jobs of each kind (6)")
    parser.add_argument("--deaths", type=int, default=2, help="in each job (2)")
    parser.add_argument("--ballast", type=int, default=0, help="MiB of state, beside 1 (0)")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds added to a step (0.02)")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    if why := refusal():
        parser.error(why)
    load = os.getloadavg()[0]
    found: dict[str, list[Figures]] = {name: [] for name in SIZES}
    script = [f"--ballast={options.ballast}", f"--pause={options.pause}"]
    for turn in range(options.turns):
        for name, sizes in SIZES.items():
            for figures in deaths(sizes, script, options.deaths, turn, 4 * options.ballast << 20):
                progress(f"{name}, turn {turn + 1}", figures)
                found[name].append(figures)
    print(f"{machine()}, load before {load:.1f}; medians of {options.turns * options.deaths}\n")
    cells = [["what (ms)", *SIZES]]
    for what, words in ROWS.items():
        one, *others = (median(figures[what] for figures in found[name]) for name in SIZES)
        told = (f"{1e3 * took_s:.0f}, {took_s / one:.2f}x" for took_s in others)
        cells.append([words, f"{1e3 * one:.0f}", *told])
    print("\n".join(aligned(cells)))
    one, two = (median(figures[""] for figures in found[name]) for name in [*SIZES][:2])
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return int(two / one >= GOAL)


if __name__ == "__main__":
    sys.exit(stoppable(main))
