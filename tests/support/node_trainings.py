"""Trainings on two nodes, whose end can be compared bit by bit."""

from __future__ import annotations

import re
from collections.abc import Iterable

from support.jobs import WORKERS
from support.node_jobs import NodeJobs, NodeMsrun, NodesJob
from worker_hooks.storage import manifest as manifests

SCRIPT = WORKERS / "train_on_nodes.py"
PATIENT = "--patient"  # of the training: its updates wait for other nodes as long as it takes
RESTARTS = "--on-failure=dump,restart"
STALE = re.compile(r"(random numbers|buffers|data position).* (of a step before|were not saved)")
TRIGGERED = "Graceful exit is triggered, stop training"


def train(jobs: NodeJobs, *words: str, nproc: int = 2, **how: object) -> NodesJob:
    """The training on two nodes; ``words``: msrun's options, then behind ``/`` those of it."""
    mine = list(words)
    split = mine.index("/") if "/" in mine else len(mine)
    return jobs.start(*mine[:split], SCRIPT, *mine[split + 1 :], nproc=nproc, **how)


def go(jobs: NodeJobs, step: int = 0) -> None:
    """Who waits goes on; ``step``: that of a second wait."""
    (jobs.folder / (f"go_{step}" if step else "go")).touch()


def weights(logs: Iterable[str]) -> list[str]:
    """How each rank has ended."""
    found = [re.findall(r"ended at step \d+, weights \w+", log) for log in logs]
    return sorted(line for lines in found for line in lines)


def logs_of(*parts: NodeMsrun) -> list[str]:
    """Those of the ranks in the last job of these msruns."""
    return [path.read_text() for part in parts for path in part.folder.glob("worker_*.log")]


def check_weights(found: list[str], undisturbed: list[str], said: str) -> None:
    """They are those of an undisturbed run, whatever was said of what the lost ranks alone had.

    An update waits until what each rank alone has is on another node, but for a second only: on a
    busy machine the training is to be ``PATIENT``.
    """
    assert found == undisturbed, said


def first_step(job: NodesJob) -> int:
    """The first that a rank of the present attempt has begun."""
    logs = job.logs().values()
    return min(int(step) for log in logs for step in re.findall(r"begins step (\d+)", log))


def saved(jobs: NodeJobs, folder: str = "checkpoints") -> list[manifests.Manifest]:
    """All that is saved, verified, in the order of the steps."""
    found = []
    for path in (jobs.folder / folder).glob("*"):
        assert re.fullmatch(r"tft_saved_checkpoints-step_\d+|Net-\d+_\d+", path.name), path
        found.append(manifests.read(path))
        assert manifests.verify(path, found[-1]) == []
    return sorted(found, key=lambda each: each.step)
