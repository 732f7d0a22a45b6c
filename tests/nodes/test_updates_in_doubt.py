"""A node falls silent before others have heard what it alone holds: its step is not committed."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.node_drills import meeting
from support.node_jobs import NodeJobs
from support.node_trainings import SCRIPT, STALE, go, weights
from support.warm_python import WarmPython

from worker_hooks.guard.update_clearance import PATIENCE_S

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
RANKS = 3  # each on a node of its own
TAKES_PART = "this node takes the part of node 0, which is lost; step "


@pytest.mark.parametrize(("lost", "how"), [(0, "cut"), (2, "poweroff")])
def test_a_node_falls_silent_right_before_an_update(
    nodes: Callable[[int], Cluster], warm_python: WarmPython, tmp_path: Path, lost: int, how: str
) -> None:
    """Its msrun has not read yet that its rank was ready; all gradients are there."""
    expected = weights(warm_python.train(tmp_path / "undisturbed", RANKS, SCRIPT))
    jobs = NodeJobs(nodes(RANKS + 1))
    words = (SCRIPT, "--wait=6:0,1,2")
    job = jobs.start(*words, nodes=range(RANKS))
    where = [word for word in meeting() if not word.startswith("--nproc")]
    spare = jobs.start_one(
        jobs.cluster.nodes[RANKS], "--spare-node", *where, "--nproc-per-node=1", *words
    )
    spare.await_error("this node waits as a spare")
    job.head.await_error("protected")
    job.await_everywhere("waits in step 6")
    job.parts[lost].signal(signal.SIGSTOP)
    began_s = time.monotonic()
    go(jobs)
    job.await_lines("updates step 6", RANKS - 1)  # a msrun that stands still writes no log
    getattr(jobs.cluster.nodes[lost], how)()
    if time.monotonic() - began_s > PATIENCE_S / 2:
        pytest.skip("the machine is too busy: the others have gone on without the one that stops")
    left = [part for rank, part in enumerate(job.parts) if rank != lost]
    if lost == 0:
        left[0].await_error(TAKES_PART)
    ended = [part.wait() for part in (*left, spare)]
    said = "".join(each.err for each in ended)
    assert [each.code for each in ended] == [0] * RANKS, job.told()
    assert not STALE.search(said), said
    assert re.search(r"silent|timed out", said)
    paths = [path for part in (*left, spare) for path in part.folder.glob("worker_*.log")]
    assert weights(path.read_text() for path in paths) == expected, job.told()
