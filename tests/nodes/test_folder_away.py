"""A folder of checkpoints whose file server is away looks as if nothing had ever been saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.node_jobs import NodeJobs, check_nothing_left
from support.sharded_trainings import SCRIPT as SHARDED

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]


def cover(jobs: NodeJobs, node: int, folder: Path) -> None:
    """A node sees an empty folder from now on: of another disk, that of the mount point."""
    where = jobs.cluster.nodes[node]
    (empty := where.folder / "empty").mkdir()
    assert where.run(["mount", "--bind", empty, folder]).wait() == 0


def test_a_job_whose_checkpoints_are_away_does_not_begin_anew(jobs: NodeJobs) -> None:
    """Each rank has a part that no other holds: what node 0 had is in the checkpoints alone."""
    words = (SHARDED, "fsdp", 40, "--pause=0.1", "--periodic=2")
    job = jobs.start("--max-restarts=3", *words, nproc=2)
    job.await_lines("step 5", 4)
    saved = jobs.folder / "saved"
    assert [*saved.glob("net-*/manifest.json")]
    cover(jobs, 1, saved)
    jobs.cluster.nodes[0].kill()
    ended = job.parts[1].wait()
    assert ended.code == 1, job.told()
    assert "begins anew" not in ended.err
    assert "saved/net-1_" in ended.err, job.told()
    assert f"node 0 with --resume={saved}" in ended.err, job.told()
    check_nothing_left(jobs.cluster.nodes[1])
