"""Random faults in jobs that are started one by one: a scheduler, and four workers on two nodes.

    python tests/support/hand_drills.py COUNT [FIRST_SEED] [CASE ...]

What is struck, at which step and how long after its begin follows from the seed. Every job ends
with 0 on all nodes, and bitwise as if nothing had happened, unless msrun says what is lost.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = map(str, (Path(__file__).parents[2], Path(__file__).parents[1]))

from support.cluster import Cluster
from support.hand_jobs import PLACES, SCHEDULER, start, start_all
from support.jobs import PYTHON
from support.node_drills import ENDS_S, play, undisturbed
from support.node_jobs import NodeJobs, NodesJob, check_nothing_left
from support.node_trainings import SCRIPT, STALE, weights

RANKS = len(PLACES)
WORDS = ("--epochs=8", "--pause=0.05")  # 32 steps
STEPS = range(2, 24)  # at which something is struck


@dataclass
class Drill:
    """One job and what befalls it."""

    jobs: NodeJobs
    chance: random.Random
    job: NodesJob
    notes: list[str] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)  # of the ranks at first

    def note(self, text: str) -> None:
        self.notes.append(text)

    def pause(self, most_s: float) -> None:
        seconds = self.chance.choice((0.0, self.chance.uniform(0.0, most_s)))
        self.note(f"{seconds:.2f} s later")
        time.sleep(seconds)

    def kill_scheduler(self) -> None:
        self.note("scheduler killed")
        self.job.head.signal(signal.SIGKILL)

    def start_scheduler(self) -> None:
        self.note("scheduler started")
        self.job.parts[0] = start(self.jobs, SCHEDULER, SCRIPT, *WORDS, again=len(self.notes))

    def kill_rank(self) -> None:
        rank = self.chance.randrange(RANKS)
        self.note(f"rank {rank} killed")
        try:
            os.kill(self.pids[rank], signal.SIGKILL)
        except ProcessLookupError:
            self.note("which had ended")

    def kill_worker(self) -> int:
        number = self.chance.randrange(RANKS)
        self.note(f"msrun of worker {number} killed")
        self.job.parts[number + 1].signal(signal.SIGKILL)
        return number

    def start_worker(self, number: int, at: Sequence[str] | None = None) -> None:
        self.note(f"worker {number} started")
        where = {} if at is None else {"at": at}
        self.job.parts[number + 1] = start(
            self.jobs, f"worker_{number}", SCRIPT, *WORDS, again=len(self.notes), **where
        )


def the_scheduler_stays_away(drill: Drill) -> None:
    drill.kill_scheduler()


def the_scheduler_comes_back(drill: Drill) -> None:
    drill.kill_scheduler()
    drill.pause(1.0)
    drill.start_scheduler()


def it_comes_back_and_a_rank_dies(drill: Drill) -> None:
    the_scheduler_comes_back(drill)
    drill.pause(1.5)
    drill.kill_rank()


def a_rank_dies_without_it(drill: Drill) -> None:
    drill.kill_scheduler()
    drill.pause(0.5)
    drill.kill_rank()


def a_rank_dies_and_then_the_scheduler(drill: Drill) -> None:
    drill.kill_rank()
    drill.pause(0.5)
    drill.kill_scheduler()


def a_rank_dies_without_it_and_it_comes_back(drill: Drill) -> None:
    a_rank_dies_without_it(drill)
    drill.pause(3.0)
    drill.start_scheduler()


def a_worker_is_started_again(drill: Drill) -> None:
    number = drill.kill_worker()
    drill.pause(1.0)
    drill.start_worker(number)


def both_are_started_again(drill: Drill) -> None:
    """What the worker's rank alone had is lost with its msrun."""
    drill.kill_scheduler()
    drill.pause(0.5)
    number = drill.kill_worker()
    drill.pause(3.0)
    acts = [drill.start_scheduler, lambda: drill.start_worker(number)]
    drill.chance.shuffle(acts)
    for act in acts:
        act()
        drill.pause(2.0)


def a_rank_dies(drill: Drill) -> None:
    drill.kill_rank()


CASES: tuple[Callable[[Drill], None], ...] = (
    *(the_scheduler_stays_away, the_scheduler_comes_back, it_comes_back_and_a_rank_dies),
    *(a_rank_dies_without_it, a_rank_dies_and_then_the_scheduler, a_worker_is_started_again),
    *(a_rank_dies_without_it_and_it_comes_back, a_rank_dies, both_are_started_again),
)


def run(seed: int, case: Callable[[Drill], None], expected: Sequence[str], folder: Path) -> str:
    """One drill.

    Returns:
        What befell the job, and how it went.

    Raises:
        AssertionError: it went wrong.
    """
    folder.mkdir(parents=True)
    with Cluster(2, folder) as cluster:
        jobs, chance = NodeJobs(cluster), random.Random(seed)
        drill = Drill(jobs, chance, start_all(jobs, SCRIPT, *WORDS))
        job = drill.job
        try:
            step, later_s = chance.choice(STEPS), chance.uniform(0.0, 0.08)
            drill.note(f"step {step} + {1000 * later_s:.0f} ms")
            job.await_lines(f"begins step {step}\n")
            drill.pids = {rank: job.rank_pid(rank) for rank in range(RANKS)}
            time.sleep(later_s)
            case(drill)
            how = ended(drill, expected)
            check_nothing_left(*cluster.nodes)
        except BaseException as error:
            raise AssertionError(f"{'; '.join(drill.notes)}\n{error}\n{job.told()}") from error
        return f"{'; '.join(drill.notes)}: {how}"


def ended(drill: Drill, expected: Sequence[str]) -> str:
    """Wait for the job's end."""
    job = drill.job
    codes = [part.wait(ENDS_S).code for part in job.parts[1:]]
    assert codes == [0] * RANKS, codes
    if "0 of 4 workers are here" in job.head.errors or not job.head.is_over:
        job.head.signal(signal.SIGTERM)  # all had gone on without it, or ended
    said = "".join(part.errors for part in job.parts)
    job.head.wait(ENDS_S)
    paths = [path for part in job.parts for path in part.folder.glob("worker_*.log")]
    logs = [path.read_text() for path in paths]
    if weights(logs) == expected:
        return "equal"
    is_told = STALE.search(said) or any(STALE.search(log) or "are lost" in log for log in logs)
    assert is_told, f"other weights, and nothing was said: {weights(logs)} {expected}"
    return "other weights, as was said"


def expect(folder: Path) -> list[str]:
    return undisturbed(folder, RANKS, WORDS)


if __name__ == "__main__":
    assert PYTHON
    first = int((sys.argv[2:] or ["0"])[0])
    sys.exit(play(CASES, run, expect, int(sys.argv[1]), first, *sys.argv[3:]))
