"""One job on several nodes of a cluster: the same command on each, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from msrun.cluster.node import ClusterNode
from msrun.cluster.program import NodeProgram
from support.cluster import Cluster
from support.jobs import DEADLINE_S, PYTHON, Ended, Job, poll

PORT = 29511
NOBODY = "0"  # holds the socket: of a connection that has ended, in the kernel alone
OF_TORCH = "torchinductor_"  # folders of a cache that torch keeps


@dataclass
class NodeMsrun(Job):
    """The msrun of one node."""

    handle: NodeProgram | None = None
    node: ClusterNode | None = None
    nproc: int = 1
    rank: int = 0  # of the node

    def status(self) -> dict:
        name = f"node_{self.rank}.status.json" if self.rank else "status.json"
        try:
            return json.loads((self.folder / name).read_bytes())
        except FileNotFoundError:
            return {"state": "none", "attempt": -1, "workers": []}

    def wait(self, within_s: float = DEADLINE_S) -> Ended:
        code = self.handle.wait(within_s)
        return Ended(code, self.handle.output(), self.errors)

    def signal(self, signum: int) -> None:
        self.handle.signal(signum)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def errors(self) -> str:
        return self.handle.errors()

    def await_error(self, text: str, within_s: float = DEADLINE_S) -> None:
        """Wait until it has said ``text`` on stderr; fails when it has ended without."""

        def said() -> bool:
            over, found = self.is_over, text in self.errors
            assert found or not over, self.errors
            return found

        poll(said, within_s)

    def command(self, *words: object) -> Ended:
        """`msrun WORDS` beside it, as the same user: stop, status, logs."""
        handle = self.node.run([*PYTHON, "-m", "msrun", *words], cwd=self.node.shared)
        return Ended(handle.wait(), handle.output(), handle.errors())


@dataclass
class NodesJob:
    """A job; ``parts`` by the ranks of the nodes."""

    parts: list[NodeMsrun]

    @property
    def head(self) -> NodeMsrun:
        """Of the controller's node."""
        return self.parts[0]

    def wait(self, within_s: float = DEADLINE_S) -> list[Ended]:
        return [part.wait(within_s) for part in self.parts]

    def succeed(self) -> list[Ended]:
        """Wait for its end on all nodes, which must be a good one."""
        ended = self.wait()
        assert [each.code for each in ended] == [0] * len(ended), self.told()
        return ended

    def logs(self) -> dict[str, str]:
        """The ranks' present logs of all nodes, by their names."""
        found: dict[str, str] = {}
        for folder in dict.fromkeys(part.folder for part in self.parts):
            for path in folder.glob("worker_*.log"):
                if not re.fullmatch(r"worker_\d+\.log", path.name):
                    continue  # of an earlier attempt
                assert path.name not in found, f"two nodes have a {path.name}"
                with contextlib.suppress(FileNotFoundError):  # a new attempt moves it away
                    found[path.name] = path.read_text(errors="replace")
        return found

    def await_lines(self, text: str, count: int = 1, within_s: float = DEADLINE_S) -> None:
        """Wait until ``text`` stands ``count`` times in the ranks' present logs of all nodes."""

        def written() -> bool:
            over = all(part.is_over for part in self.parts)
            found = sum(log.count(text) for log in self.logs().values()) >= count
            assert found or not over, self.told()
            return found

        poll(written, within_s)

    def await_everywhere(self, text: str, within_s: float = DEADLINE_S) -> None:
        """Wait until every rank's present log has ``text``."""

        def written() -> bool:
            over = all(part.is_over for part in self.parts)
            logs = self.logs()
            found = len(logs) == self.world and all(text in log for log in logs.values())
            assert found or not over, self.told()
            return found

        poll(written, within_s)

    @property
    def world(self) -> int:
        return sum(part.nproc for part in self.parts)

    def node_of(self, rank: int) -> ClusterNode:
        ends = accumulate(part.nproc for part in self.parts)
        return next(part.node for part, end in zip(self.parts, ends, strict=True) if rank < end)

    def rank_pid(self, rank: int) -> int:
        """The process of a rank of the present attempt, as the test process sees it."""
        inner = poll(lambda: self.head.pids().get(rank))
        seen = self.node_of(rank).processes()
        (found,) = [pid for pid, own in seen.items() if own == inner]
        return found

    def kill_rank(self, *ranks: int, signum: int = signal.SIGKILL) -> None:
        for pid in [self.rank_pid(rank) for rank in ranks]:
            os.kill(pid, signum)

    def told(self) -> str:
        """All that was said, for a test that fails."""
        said = [
            f"--- {part.node.name}: {part.process.poll()}\n{part.handle.output()}{part.errors}"
            for part in self.parts
        ]
        for part in self.parts:  # a node that had other ranks before has their logs as well
            paths = sorted(part.folder.glob("worker_*.log"))
            said += [f"--- {path}\n{path.read_text(errors='replace')}" for path in paths]
        return "\n".join(("", *said))


def job_of(*parts: NodeMsrun) -> NodesJob:
    """The job of these, by the ranks of their nodes."""
    for rank, part in enumerate(parts):
        part.rank = rank
    return NodesJob(list(parts))


@dataclass
class NodeJobs:
    """Starts jobs on the nodes of a cluster."""

    cluster: Cluster
    started: int = 0
    common: tuple[object, ...] = ()  # options of all jobs

    @property
    def folder(self) -> Path:
        """Which all nodes see, and in which the jobs run."""
        return self.cluster.folder

    def start_one(
        self,
        node: ClusterNode,
        *words: object,
        nproc: int = 1,
        log_dir: Path | None = None,
        **environ: str,
    ) -> NodeMsrun:
        """`msrun WORDS` on one node."""
        folder = log_dir or node.folder / f"logs{self.started}"
        argv = [f"--log_dir={folder}", *self.common, *words]
        handle = self.cluster.run_msrun(node, argv, environ, self.folder)
        mark = self.cluster.mark
        return NodeMsrun(handle.process, folder, mark, handle.pid, handle, node, nproc)

    def start(
        self,
        *words: object,
        nodes: Sequence[int] = (0, 1),
        nproc: int | Sequence[int] = 1,
        how: Callable[[int], Sequence[object]] | None = None,
        order: Iterable[int] | None = None,
        log_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        port: int = PORT,
    ) -> NodesJob:
        """The same command on each node.

        Args:
            words: options and the program.
            nodes: which take part, by their ranks in the job.
            nproc: ranks of each node, or of all.
            how: the options of a node by its rank, in place of torchrun's static ones.
            order: the ranks of the nodes in the order of their starts.
            log_dir: of all nodes; else each has its own.
            environ: of msrun.
            port: where they meet.
        """
        sizes = [nproc] * len(nodes) if isinstance(nproc, int) else list(nproc)
        parts = {}
        for rank in order or range(len(nodes)):
            own = (
                static(rank, len(nodes), sizes[rank], port, nodes[0]) if how is None else how(rank)
            )
            parts[rank] = self.start_one(
                self.cluster.nodes[nodes[rank]],
                *own,
                *words,
                nproc=sizes[rank],
                log_dir=log_dir,
                **(environ or {}),
            )
        self.started += 1
        return job_of(*(parts[rank] for rank in range(len(nodes))))


def static(rank: int, nnodes: int, nproc: int, port: int = PORT, head: int = 0) -> list[str]:
    """The options with which torchrun's users start each node by hand."""
    return [
        f"--nnodes={nnodes}",
        f"--node-rank={rank}",
        f"--nproc-per-node={nproc}",
        f"--master-addr=node{head}",
        f"--master-port={port}",
    ]


# --- what is there, and what is left --------------------------------------------------------------


def programs_on(node: ClusterNode) -> list[str]:
    """Their command lines."""
    found = []
    for pid in node.processes():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def sockets_on(node: ClusterNode) -> list[str]:
    """What listens or is connected there, and msrun's names of sockets."""
    if not node.init:
        return []
    net = Path(f"/proc/{node.pid}/net")
    lines = [line for name in ("tcp", "tcp6") for line in (net / name).read_text().splitlines()[1:]]
    names = (net / "unix").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[9] != NOBODY] + [
        line for line in names if "@" in line.split()[-1]
    ]


def temporary_on(node: ClusterNode) -> list[str]:
    """What lies in its temporary folder and in its shared memory."""
    places = [node.folder / "tmp"]
    if node.init:
        places.append(Path(f"/proc/{node.pid}/root/dev/shm"))
    found = (path for place in places for path in place.iterdir())
    return [str(path) for path in found if not path.name.startswith(OF_TORCH)]


def check_nothing_left(*nodes: ClusterNode, within_s: float = 20.0) -> None:
    """No process, no socket and no temporary file of a job is left on a node that is on."""
    for node in nodes:
        with contextlib.suppress(AssertionError):
            poll(lambda node=node: not programs_on(node) and not sockets_on(node), within_s)
        assert programs_on(node) == [], node.name
        assert sockets_on(node) == [], node.name
        if node.init:  # who was killed with its machine cleans nothing up
            assert temporary_on(node) == [], node.name
