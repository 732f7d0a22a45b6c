"""Jobs that an engine has started on the nodes of a cluster: what their ranks tell, and deaths."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

from msrun.cluster.namespaces import PATH
from msrun.cluster.program import NodeProgram
from support.cluster import Cluster
from support.jobs import DEADLINE_S, PYTHON, WORKERS, poll
from support.node_trainings import weights

MSRUN = (*PYTHON, "-m", "msrun")
PLACE = WORKERS / "place.py"


def missing_programs(names: Iterable[str], why_root: str) -> str:
    """Why an engine cannot be had here, in a sentence, or nothing."""
    if os.getuid() != 0:
        return why_root
    absent = [name for name in names if shutil.which(name, path=PATH) is None]
    return f"{' and '.join(absent)} would have to be installed" if absent else ""


def logs(folder: Path) -> list[str]:
    """Of the present attempt's ranks, which share a log folder."""
    return [path.read_text() for path in sorted(folder.glob("worker_?.log"))]


def await_logs(folder: Path, text: str) -> None:
    """Wait until a rank has written ``text``."""
    poll(lambda: text in "".join(logs(folder)))


def places(folder: Path) -> list[dict]:
    """What the ranks told of themselves, by rank."""
    lines = [line for log in logs(folder) for line in log.splitlines() if line.startswith("place ")]
    found = [json.loads(line.removeprefix("place ")) for line in lines]
    return sorted(found, key=lambda each: int(each["RANK"]))


def await_said(handle: NodeProgram, text: str) -> None:
    """Wait until a job has said ``text`` on stderr; fails when it has ended without."""

    def said() -> bool:
        over, found = handle.process.poll() is not None, text in handle.errors()
        assert found or not over, handle.errors()
        return found

    try:
        poll(said)
    except AssertionError as error:
        raise AssertionError(handle.errors()) from error


def kill_rank(cluster: Cluster, folder: Path, rank: int, node: int) -> None:
    """Kill a rank that runs on a node."""
    events = (folder / "events.jsonl").read_text().splitlines()
    started = [each for line in events if (each := json.loads(line))["event"] == "WorkerStarted"]
    inner = [each["pid"] for each in started if each["rank"] == rank][-1]
    seen = cluster.nodes[node].processes()
    (found,) = [pid for pid, own in seen.items() if own == inner]
    os.kill(found, signal.SIGKILL)


def check_replaced(
    cluster: Cluster, folder: Path, job: NodeProgram, rank: int, undisturbed: list[str]
) -> None:
    """Kill a rank of node 1 in a training that waits in step 5: it is replaced, bitwise."""
    await_logs(folder, "waits in step 5")
    await_said(job, "msrun: protected: ")  # its first steps were compared
    kill_rank(cluster, folder, rank, node=1)
    await_said(job, "replacing it")
    (cluster.folder / "go").touch()
    assert job.wait(DEADLINE_S) == 0, job.errors()
    assert weights(logs(folder)) == undisturbed
    assert "training resumes at step 5, no step is lost" in job.errors()
