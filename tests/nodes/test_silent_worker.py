"""A worker that was started by hand falls silent, and is started elsewhere before that is noticed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.hand_jobs import start, start_all
from support.node_jobs import NodeJobs, check_nothing_left
from support.node_trainings import PATIENT, SCRIPT, check_weights, go, weights

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
WAITS = (SCRIPT, PATIENT, "--wait=5:0")


def test_it_has_its_place_once_the_silent_one_counts_as_lost(
    jobs: NodeJobs, undisturbed: Sequence[str]
) -> None:
    """At once would be two workers of one name, if the machine lived."""
    job = start_all(jobs, *WAITS)
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    jobs.cluster.nodes[1].poweroff()  # of worker_1 and worker_2
    again = [
        start(jobs, name, *WAITS, again="_again", place=0) for name in ("worker_1", "worker_2")
    ]
    for part in again:
        part.await_error("this node waits as a spare")
    assert "silent" not in job.head.errors
    for name in ("worker_1", "worker_2"):
        job.head.await_error(f"{name} (node0) has come in the place of the lost one")
    go(jobs)
    job.parts[2:4] = again
    job.succeed()
    check_weights(weights(job.logs().values()), undisturbed, job.head.errors)
    assert "training resumes at step 5, no step is lost" in job.head.errors
    check_nothing_left(jobs.cluster.nodes[0])
