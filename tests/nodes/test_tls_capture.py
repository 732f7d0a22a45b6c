"""Somebody reads what passes between the nodes while the state travels to new ranks."""

from __future__ import annotations

import re
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support import listen_in
from support.certificates import PASSWORDS, authority
from support.cluster import Cluster
from support.jobs import PYTHON
from support.node_jobs import NodeJobs
from support.node_trainings import go, train

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
TABLE_MIB = 8
PATTERN = struct.pack("<16f", *range(98_304, 98_320))  # some numbers in the middle of the table


@pytest.mark.parametrize("lost", [(2, 3), (0, 1)], ids=["there", "back"])
@pytest.mark.parametrize("is_secured", [True, False], ids=["certificates", "none"])
def test_with_certificates_nobody_reads_the_state_that_travels(
    nodes: Callable[[int], Cluster],
    tmp_path_factory: pytest.TempPathFactory,
    lost: tuple[int, int],
    is_secured: bool,
) -> None:
    """Without any it is found: so would it be with them, if it were not encrypted."""
    jobs = NodeJobs(cluster := nodes(2))
    (folder := tmp_path_factory.mktemp("certificates")).chmod(0o755)
    option = [f"--tls-config={authority(folder).config()}"] if is_secured else []
    (jobs.folder / "pattern").write_bytes(PATTERN)
    job = train(jobs, *option, "/", "--wait=5:3", f"--table={TABLE_MIB}", environ=PASSWORDS)
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    reader = cluster.nodes[0].run([*PYTHON, Path(listen_in.__file__), jobs.folder / "pattern"])
    reader.await_output("listens")
    job.kill_rank(*lost)
    job.head.await_error("keep running")
    go(jobs)
    job.head.await_error("training resumes at step 5, no step is lost")
    reader.signal(signal.SIGTERM)
    assert reader.wait() == 0
    job.succeed()
    (said,) = re.findall(r"seen (\d+) times in (\d+) packets", reader.output())
    seen, packets = map(int, said)
    assert packets > 100
    assert (seen > 0) is not is_secured
