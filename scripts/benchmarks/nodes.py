"""Measures what a job on many nodes costs node 0: its processor time and its memory.

    scripts/bench nodes                            2,048 nodes of one rank
    scripts/bench nodes --nproc 8                  the same of eight ranks each, which has no goals
    scripts/bench nodes --nodes 64 256 --json result.json

The goals are those of up to 2,048 nodes of one rank: a death takes a second of node 0's processor
time, its memory is 200 MiB at most. With more ranks on each node, or more nodes, figures are shown.

Node 0 is a real msrun, the scheduler of a job that is started one by one. The other nodes are
faked, 512 in a process (``workers/fake_nodes.py``): each has a real connection, and says what a
real node would say whose ranks start, register, train, and are replaced when one dies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from processes import KIB, PROC, field
from table import aligned, machine

WORKERS = Path(__file__).resolve().parent / "workers"
AT_ONCE = 512  # nodes in a process
LIMIT_S = 600.0  # for each point to be reached
IDLE_S = 10.0
BEAT_S = 1.0
SETTLE_S = 3.0  # after the ranks were told to train, and again until node 0 has heard it of all
BUSY = 0.3  # share of one processor that it takes for that
MOST_CPU_S, MOST_MIB = 1.0, 200.0  # the goals, of up to so many nodes of one rank:
MOST_NODES = 2048
GOALS = (
    f"The goals are for up to {MOST_NODES:,} nodes of one rank: {MOST_CPU_S:g} s of processor time "
    f"for a death, {MOST_MIB:g} MiB at most, amid the replacement as well."
)
MIB = KIB * KIB


class FailedError(Exception):
    """A point was not reached."""


@dataclass(frozen=True)
class Found:
    """The figures of one job; seconds are of node 0's processor time."""

    nodes: int
    ranks: int
    join_s: float  # until all nodes know that they begin
    start_s: float  # from then until all ranks train
    idle: float  # share of one processor while they do
    death_s: float  # from a rank's death until all train again
    death_wall_s: float
    begin_mib: float  # once all nodes have joined
    mib: float  # once all ranks train
    peak_mib: float

    @property
    def has_goals(self) -> bool:
        """Whether it is a job of the kind that the goals are for."""
        return self.ranks == self.nodes <= MOST_NODES

    def verdict(self) -> tuple[str, bool]:
        """What there is to say of the goals, and whether one is missed."""
        name = f"{self.nodes:,} nodes, {self.ranks:,} ranks"
        if not self.has_goals:
            return f"{name}: no goals, they are for {MOST_NODES:,} nodes of one rank", False
        missed = []
        if self.death_s > MOST_CPU_S:
            missed.append(f"a death takes {self.death_s:.2f} s instead of {MOST_CPU_S:g} s")
        if self.peak_mib > MOST_MIB:
            missed.append(f"{self.peak_mib:.0f} MiB at most instead of {MOST_MIB:g} MiB")
        return f"{name}: " + (f"missed: {', '.join(missed)}" if missed else "reached"), bool(missed)


class Job:
    """Node 0, and the processes that fake the others."""

    def __init__(self, folder: Path, nodes: int, nproc: int, beat_s: float) -> None:
        self.folder = folder
        self.ranks = nodes * nproc
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environ |= {
            "MS_ROLE": "MS_SCHED",
            "MS_WORKER_NUM": str(self.ranks),
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": str(port),
            "XDG_STATE_HOME": str(folder / "state"),
            "TMPDIR": str(folder),
        }
        command = (
            str(Path(sys.executable).parent / "msrun"),
            f"--log-dir={folder / 'logs'}",
            # thousands of fakes have two processors: that they answer late is no failure
            f"--freeze-timeout={LIMIT_S / 2}",
            f"--dump-timeout={LIMIT_S}",
        )
        script = folder / "train.py"
        script.write_text("")
        self.output = (folder / "output").open("wb")
        self.head = subprocess.Popen(
            [*command, str(script)], env=environ, stdout=self.output, stderr=subprocess.STDOUT
        )
        fake = (sys.executable, str(WORKERS / "fake_nodes.py"), str(port))
        parts = [(first, min(AT_ONCE, nodes - first)) for first in range(0, nodes, AT_ONCE)]
        self._wait_until_it_listens(port)
        self.fakes = [
            subprocess.Popen(
                [*fake, str(count), str(nproc), str(first), str(folder), str(beat_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.output,
            )
            for first, count in parts
        ]

    def _wait_until_it_listens(self, port: int) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.head.poll() is None:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                return
            time.sleep(0.05)
        raise FailedError(self.tail())

    def cpu_s(self) -> float:
        """Node 0's processor time so far, that of threads which have ended included."""
        return time.clock_gettime(~self.head.pid << 3 | 2)  # as clock_getcpuclockid

    def mib(self, what: str) -> float:
        """A figure of node 0's memory."""
        return field(PROC / str(self.head.pid) / "status", what) * KIB / MIB

    def wait(self, what: str) -> int:
        """Until all ranks, or nodes, have come there; how many heartbeats were sent by then.

        Raises:
            FailedError: they do not.
        """
        beats = 0
        for each in self.fakes:
            assert each.stdout is not None
            line = each.stdout.readline().decode().strip()
            came, _, count = line.partition(", ")
            if came != what:
                raise FailedError(f"{line!r} instead of {what!r}; {self.tail()}")
            beats += int(count)
        return beats

    def settle(self) -> None:
        """Until node 0 has heard what all ranks have said, and has decided on it.

        Raises:
            FailedError: it has not.
        """
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            before = self.cpu_s()
            time.sleep(SETTLE_S)
            if self.cpu_s() - before < BUSY * SETTLE_S:
                return
        raise FailedError(f"node 0 is still busy; {self.tail()}")

    def kill_rank(self, rank: int) -> None:
        """A rank dies, on whatever node it is."""
        for each in self.fakes:
            assert each.stdin is not None
            try:
                each.stdin.write(f"{rank}\n".encode())
                each.stdin.flush()
            except BrokenPipeError as error:
                raise FailedError(self.tail()) from error

    def tail(self) -> str:
        """The end of what was said."""
        return (self.folder / "output").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """End all of it."""
        for each in (self.head, *self.fakes):
            each.kill()
            each.wait()
        for each in self.fakes:
            assert each.stdin is not None
            assert each.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                each.stdin.close()
            each.stdout.close()
        self.output.close()


@contextlib.contextmanager
def started(nodes: int, nproc: int, beat_s: float = BEAT_S) -> Iterator[Job]:
    """A job; afterwards nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="msrun-bench-", ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), nodes, nproc, beat_s)
        try:
            yield job
        finally:
            job.close()


def measured(nodes: int, nproc: int, beat_s: float) -> Found:
    """Play one job, and see what it costs node 0.

    Raises:
        FailedError: it does not come to its end.
    """
    with started(nodes, nproc, beat_s) as job:
        begun = job.cpu_s()
        job.wait("joined")
        joined, begin_mib = job.cpu_s(), job.mib("VmRSS")
        job.wait("trained 0")
        job.settle()
        trained = job.cpu_s()
        time.sleep(IDLE_S)
        idle, mib = job.cpu_s() - trained, job.mib("VmRSS")
        before, at_s = job.cpu_s(), time.monotonic()
        job.kill_rank(job.ranks // 2)
        job.wait("on 1")
        death, wall_s = job.cpu_s() - before, time.monotonic() - at_s
        job.wait("trained 1")
        return Found(
            nodes,
            job.ranks,
            join_s=joined - begun,
            start_s=trained - joined,
            idle=idle / IDLE_S,
            death_s=death,
            death_wall_s=wall_s,
            begin_mib=begin_mib,
            mib=mib,
            peak_mib=job.mib("VmHWM"),
        )


def main() -> int:
    """Print a row for each count of nodes; 1: a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench nodes",
        description=f"{__doc__.splitlines()[0]} {GOALS}",
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[MOST_NODES], help=f"how many ({MOST_NODES})"
    )
    parser.add_argument(
        "--nproc", type=int, default=1, help="ranks of a node (1); with more there are no goals"
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=BEAT_S,
        help="seconds between two of a node (1, as real ones); on a busy machine, where a death "
        "takes long, a large number leaves out what they cost meanwhile",
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    print(f"{options.nproc} ranks a node, {machine()}, load before {os.getloadavg()[0]:.1f}\n")
    head = ("nodes", "ranks", "join", "start", "idle", "a death", "its wall time")
    cells = [[*head, "MiB joined", "MiB training", "MiB at most"]]
    rows = []
    for count in options.nodes:
        found = measured(count, options.nproc, options.heartbeat)
        rows.append(found)
        seconds = (found.join_s, found.start_s)
        cells.append(
            [
                f"{count:,}",
                f"{found.ranks:,}",
                *(f"{each:.2f} s" for each in seconds),
                f"{found.idle:.1%}",
                f"{found.death_s:.2f} s",
                f"{found.death_wall_s:.1f} s",
                *(f"{each:.0f}" for each in (found.begin_mib, found.mib, found.peak_mib)),
            ]
        )
    print("\n".join(aligned(cells)))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in rows], indent=2))
    verdicts = [each.verdict() for each in rows]
    print("\n".join(["", *(said for said, _ in verdicts)]))
    return int(any(is_missed for _, is_missed in verdicts))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FailedError as error:
        sys.exit(f"failed: {error}")
