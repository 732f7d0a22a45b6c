"""The cost of the vote on each update, beside a barrier of gloo among the same ranks.

    scripts/bench votes [--ranks 2 4 8] [--steps 2000]

Each rank is a process that does nothing else, so what is measured is the vote, and what the
scheduler makes of more ranks than processors. Processor time is that of one rank.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch.distributed as dist

from worker_hooks.contract import vote_board
from worker_hooks.contract.vote_board import VoteBoard
from worker_hooks.guard.update_vote import UpdateVote

WARM = 20  # steps


def main() -> None:
    """Print a line for each count of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print(f"{'ranks':>5} {'vote':>12} {'processor':>12} {'gloo barrier':>14} {'ratio':>7}")
    for count in args.ranks:
        wall_us, cpu_us = measured(count, args.steps, voting)
        barrier_us, _ = measured(count, args.steps, meeting)
        print(
            f"{count:>5} {wall_us:>9.1f} us {cpu_us:>9.1f} us {barrier_us:>11.1f} us "
            f"{barrier_us / wall_us:>6.1f}x"
        )


def voting(board: int, rank: int, _count: int, _folder: Path) -> Callable[[int], None]:
    """What one rank does in a step: vote, and wait for all votes."""
    vote = UpdateVote(VoteBoard(board), rank, 0, set)

    def step(number: int) -> None:
        vote.cast(number)
        vote.wait(number, bool)

    return step


def meeting(_board: int, rank: int, count: int, folder: Path) -> Callable[[int], None]:
    """The same by a collective, which does not outlive a rank."""
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    return lambda _number: dist.barrier()


def measured(
    count: int, steps: int, make: Callable[[int, int, int, Path], Callable[[int], None]]
) -> tuple[float, float]:
    """Microseconds of a step, and of one rank's processor time in it; medians over the ranks."""
    board = vote_board.create(count)
    shared = VoteBoard(board)
    shared.begin(1)
    with tempfile.TemporaryDirectory() as folder:
        readers = [_started(make, board, rank, count, steps, Path(folder)) for rank in range(count)]
        found = [tuple(map(float, os.fdopen(each).read().split())) for each in readers]
        for _ in range(count):
            os.wait()
    shared.close()
    os.close(board)
    return median(wall for wall, _ in found), median(cpu for _, cpu in found)


def _started(
    make: Callable[[int, int, int, Path], Callable[[int], None]],
    board: int,
    rank: int,
    count: int,
    steps: int,
    folder: Path,
) -> int:
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return reader
    try:
        step = make(board, rank, count, folder)
        for number in range(1, WARM):
            step(number)
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(WARM, WARM + steps):
            step(number)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        os.write(writer, f"{wall / steps * 1e6} {cpu / steps * 1e6}".encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
