"""Random faults on three nodes: the job ends bitwise as if nothing had happened, and leaves nothing.

    python tests/support/node_drills.py COUNT [FIRST_SEED] [CASE ...]

Each seed is a job of six ranks on three machines, made of namespaces, and a fourth one as a spare.
What is struck, at which step and how long after its begin follows from the seed. A node that was
lost takes its newest random numbers along if they were still on their way: then msrun says so, and
the weights may differ.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = map(str, (Path(__file__).parents[2], Path(__file__).parents[1]))

from support import bad_cables
from support.cluster import Cluster
from support.jobs import PYTHON, poll
from support.node_jobs import (
    PORT,
    NodeJobs,
    NodeMsrun,
    NodesJob,
    check_nothing_left,
)
from support.node_trainings import SCRIPT, STALE, weights
from support.warm_python import WarmPython

NODES, NPROC = 3, 2
RANKS = NODES * NPROC
WORDS = ("--epochs=10", "--pause=0.04")  # 30 steps
STEPS = range(3, 24)  # at which something is struck
ENDS_S = 150.0


@dataclass
class Drill:
    """One job and what befalls it."""

    jobs: NodeJobs
    chance: random.Random
    job: NodesJob | None = None
    spare: NodeMsrun | None = None
    notes: list[str] = field(default_factory=list)
    resumes: bool = False  # the job ends in between
    inexact: bool = False  # what the ranks of a lost node alone had may be lost

    def node(self, first: int = 1) -> int:
        return self.chance.randrange(first, NODES)

    def lose(self, node: int) -> None:
        """A node is gone: the spare one has its place."""
        assert self.spare is not None
        self.spare.rank = node
        self.job.parts[node], self.spare = self.spare, None

    def note(self, text: str) -> None:
        self.notes.append(text)


def ranks(drill: Drill, count: int = 1, signum: int = signal.SIGKILL) -> None:
    struck = drill.chance.sample(range(RANKS), count)
    drill.note(f"{signal.Signals(signum).name} to ranks {struck}")
    drill.job.kill_rank(*struck, signum=signum)


def kill_one(drill: Drill) -> None:
    ranks(drill)


def kill_two(drill: Drill) -> None:
    ranks(drill, 2)


def kill_one_after_the_other(drill: Drill) -> None:
    ranks(drill)
    time.sleep(drill.chance.uniform(0.0, 0.8))
    try:
        ranks(drill)
    except AssertionError:
        drill.note("too late for a second one")


def stop_one(drill: Drill) -> None:
    ranks(drill, signum=signal.SIGSTOP)


def kill_a_node(drill: Drill) -> None:
    node = drill.node()
    drill.note(f"node {node} killed")
    drill.jobs.cluster.nodes[node].kill()
    drill.lose(node)


def power_off_a_node(drill: Drill) -> None:
    node = drill.node()
    drill.note(f"node {node} off")
    drill.jobs.cluster.nodes[node].poweroff()
    drill.lose(node)


def kill_msrun_of_a_node(drill: Drill) -> None:
    node = drill.node()
    drill.note(f"msrun of node {node} killed")
    drill.job.parts[node].signal(signal.SIGKILL)
    drill.lose(node)


def kill_a_node_and_a_rank(drill: Drill) -> None:
    node = drill.node()
    (rank,) = drill.chance.sample([r for r in range(RANKS) if r // NPROC != node], 1)
    drill.note(f"node {node} and rank {rank} killed")
    pid = drill.job.rank_pid(rank)
    acts: list[Callable[[], object]] = [
        drill.jobs.cluster.nodes[node].kill,
        lambda: os.kill(pid, signal.SIGKILL),
    ]
    drill.chance.shuffle(acts)
    for act in acts:
        act()
        time.sleep(drill.chance.choice((0.0, 0.0, 0.1, 0.5)))
    drill.lose(node)


def kill_the_spare_as_well(drill: Drill) -> None:
    """Another node is started in the place of both."""
    node = drill.node()
    drill.note(f"node {node} and the spare killed")
    cluster = drill.jobs.cluster
    cluster.nodes[node].kill()
    time.sleep(drill.chance.uniform(0.0, 1.0))
    cluster.nodes[NODES].kill()
    cluster.nodes[node].boot()
    new = drill.jobs.start_one(
        cluster.nodes[node],
        *meeting(),
        SCRIPT,
        *WORDS,
        nproc=NPROC,
        log_dir=cluster.nodes[node].folder / "again",
    )
    drill.spare = new
    drill.lose(node)


def cut_a_node(drill: Drill) -> None:
    node, for_s = drill.node(0), drill.chance.uniform(0.5, 7.5)
    drill.note(f"node {node} cut for {for_s:.1f} s")
    drill.jobs.cluster.nodes[node].cut()
    time.sleep(for_s)
    drill.jobs.cluster.nodes[node].mend()


def cut_a_node_for_long(drill: Drill) -> None:
    node = drill.node()
    drill.note(f"node {node} cut for 20 s")
    drill.jobs.cluster.nodes[node].cut()
    lost = drill.job.parts[node]
    drill.lose(node)
    time.sleep(20)
    drill.jobs.cluster.nodes[node].mend()
    drill.spare = lost  # it waits for a place, as another one has its own


def stop_an_msrun(drill: Drill) -> None:
    node, for_s = drill.node(0), drill.chance.uniform(0.5, 7.0)
    drill.note(f"msrun of node {node} stopped for {for_s:.1f} s")
    drill.job.parts[node].signal(signal.SIGSTOP)
    time.sleep(for_s)
    drill.job.parts[node].signal(signal.SIGCONT)


def lose_packets(drill: Drill) -> None:
    node = drill.node(0)
    drill.note(f"node {node} loses 5 % of its packets, and a rank is killed")
    bad_cables.lose(drill.jobs.cluster, node, 5)
    ranks(drill)


def stop_gracefully(drill: Drill) -> None:
    node = drill.node(0)
    drill.note(f"SIGTERM to msrun of node {node}")
    drill.job.parts[node].signal(signal.SIGTERM)
    drill.resumes = True


def kill_msrun_of_node_0(drill: Drill) -> None:
    drill.note("msrun of node 0 killed")
    drill.job.head.signal(signal.SIGKILL)
    drill.lose(0)


def kill_node_0(drill: Drill) -> None:
    drill.note("node 0 killed")
    drill.jobs.cluster.nodes[0].kill()
    drill.lose(0)


def power_off_node_0(drill: Drill) -> None:
    drill.note("node 0 off")
    drill.jobs.cluster.nodes[0].poweroff()
    drill.lose(0)


def cut_node_0_for_long(drill: Drill) -> None:
    """The others go on without it; it saves the same step, and ends."""
    drill.note("node 0 cut for 40 s")
    drill.jobs.cluster.nodes[0].cut()
    lost = drill.job.head
    drill.lose(0)
    time.sleep(40)
    drill.jobs.cluster.nodes[0].mend()
    assert lost.wait(60).code == 1


def kill_both_first_nodes(drill: Drill) -> None:
    """Node 0, and the one that would take its part; another one is started for that."""
    nodes, later_s = drill.jobs.cluster.nodes, drill.chance.choice((0.0, 0.3, 1.0, 3.0))
    drill.note(f"nodes 0 and 1 killed, {later_s} s apart")
    nodes[0].kill()
    drill.lose(0)
    time.sleep(later_s)
    nodes[1].kill()
    nodes[1].boot()
    others = drill.job.parts[::2]

    def told() -> list[str]:
        return [part.errors for part in others if "takes the part of node 0" in part.errors]

    poll(lambda: told() or all(part.is_over for part in others))
    if not told():
        drill.note("too late for the second one")
        return
    drill.spare = drill.jobs.start_one(
        nodes[1],
        *meeting(told_place(told()[-1])),
        SCRIPT,
        *WORDS,
        nproc=NPROC,
        log_dir=nodes[1].folder / "again",
    )
    drill.lose(1)
    drill.inexact = True  # what node 1's ranks alone had is lost with it


CASES: tuple[Callable[[Drill], None], ...] = (
    *(kill_one, kill_two, kill_one_after_the_other, stop_one, kill_a_node, power_off_a_node),
    *(kill_msrun_of_a_node, kill_a_node_and_a_rank, kill_the_spare_as_well, cut_a_node),
    *(cut_a_node_for_long, stop_an_msrun, lose_packets, stop_gracefully, kill_msrun_of_node_0),
    *(kill_node_0, power_off_node_0, cut_node_0_for_long, kill_both_first_nodes),
)


def told_place(errors: str) -> tuple[str, str]:
    """Where a node that has taken the part of node 0 wants others to come, by the last of its words."""
    return re.findall(r"msrun there with (--master-addr=\S+) (--master-port=\d+)", errors)[-1]


def meeting(
    where: Sequence[str] = ("--master-addr=node0", f"--master-port={PORT}"),
) -> tuple[str, ...]:
    return (f"--nnodes={NODES}", f"--nproc-per-node={NPROC}", *where)


def run(seed: int, case: Callable[[Drill], None], expected: Sequence[str], folder: Path) -> str:
    """One drill.

    Returns:
        What befell the job, and how it went.

    Raises:
        AssertionError: it went wrong.
    """
    folder.mkdir(parents=True)
    with Cluster(NODES + 1, folder) as cluster:
        drill = Drill(NodeJobs(cluster), random.Random(seed))
        job = drill.job = drill.jobs.start(SCRIPT, *WORDS, nodes=range(NODES), nproc=NPROC)
        drill.spare = drill.jobs.start_one(
            cluster.nodes[NODES], "--spare-node", *meeting(), SCRIPT, *WORDS, nproc=NPROC
        )
        try:
            drill.spare.await_error("this node waits as a spare")
            step, later_s = drill.chance.choice(STEPS), drill.chance.uniform(0.0, 0.08)
            drill.note(f"step {step} + {1000 * later_s:.0f} ms")
            job.await_lines(f"begins step {step}\n")
            time.sleep(later_s)
            case(drill)
            how = ended(drill, expected)
            for part in (*job.parts, *filter(None, [drill.spare])):
                part.wait(30)
            for node in cluster.nodes:
                node.init or node.boot()
            check_nothing_left(*cluster.nodes)
        except BaseException as error:
            raise AssertionError(f"{'; '.join(drill.notes)}\n{error}\n{job.told()}") from error
        return f"{'; '.join(drill.notes)}: {how}"


def ended(drill: Drill, expected: Sequence[str]) -> str:
    """Wait for the job's end, or resume it."""
    job, head = drill.job, drill.job.head
    how = "equal"
    if drill.resumes:
        codes = {part.wait(ENDS_S).code for part in job.parts}
        assert codes <= {0, 1, -9, 143}, codes
        nodes = drill.jobs.cluster.nodes
        poll(lambda: not any(node.processes() for node in nodes if node.init))
        for node in nodes:
            node.init or node.boot()
        words = [f"--nnodes={NODES}", f"--nproc-per-node={NPROC}", "--master-addr=node0"]
        parts = [
            drill.jobs.start_one(
                nodes[rank],
                "--resume",
                *(*words, f"--node-rank={rank}", f"--master-port={PORT}", SCRIPT, *WORDS),
                nproc=NPROC,
                log_dir=nodes[rank].folder / "resumed",
            )
            for rank in range(NODES)
        ]
        for rank, part in enumerate(parts):
            part.rank = rank
        again = NodesJob(parts)
        [part.wait(ENDS_S) for part in parts]
        assert [part.wait().code for part in parts] == [0] * NODES, again.told()
        said = "".join(part.errors for part in (*job.parts, *again.parts))
        logs = [*job.logs().values()]
        found = weights(again.logs().values())
    else:
        for part in job.parts:
            part.wait(ENDS_S)
        assert [part.wait().code for part in job.parts] == [0] * NODES
        said, logs = "".join(part.errors for part in job.parts), []
        # a node may have had other ranks before, whose logs are still there
        paths = [path for part in job.parts for path in part.folder.glob("worker_*.log")]
        found = weights(path.read_text() for path in paths)
        lost = re.findall(r"(\d+) steps? (?:is|are) lost|(\d+) steps and", head.errors)
        assert all(int(a or b or 0) == 0 for a, b in lost), head.errors
    if found == expected:
        return how
    is_told = STALE.search(said) or any(STALE.search(log) or "are lost" in log for log in logs)
    assert is_told or drill.inexact, f"other weights, and nothing was said: {found} {expected}"
    return "other weights, as was said"


def undisturbed(folder: Path, ranks: int = RANKS, words: Sequence[str] = WORDS) -> list[str]:
    """The final weights of as many ranks, without msrun."""
    python = WarmPython()
    try:
        return weights(python.train(folder, ranks, SCRIPT, *words))
    finally:
        python.end()


def play(
    cases: Sequence[Callable[..., None]],
    run: Callable[..., str],
    expect: Callable[[Path], list[str]],
    count: int,
    first: int = 0,
    *names: str,
) -> int:
    """Run drills by their seeds, and print what came of each; 1 if one failed."""
    cases = [case for case in cases if case.__name__ in names or not names]
    folder = Path(tempfile.mkdtemp(prefix="node-drills-"))
    expected = expect(folder / "undisturbed")
    assert len({*expected}) == 1, expected
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        case, began = cases[seed % len(cases)], time.monotonic()
        try:
            told = run(seed, case, expected, folder / str(seed))
        except AssertionError as error:
            seen["failed"] += 1
            (folder / f"{seed}.txt").write_text(str(error))
            told = f"FAILED, see {folder}/{seed}.txt: {str(error).splitlines()[0]}"
        else:
            seen[told.rpartition(": ")[2]] += 1
            shutil.rmtree(folder / str(seed), ignore_errors=True)
        print(f"{seed} {case.__name__} ({time.monotonic() - began:.0f} s): {told}", flush=True)
    print(dict(seen))
    return 1 if seen["failed"] else 0


if __name__ == "__main__":
    assert PYTHON
    first = int((sys.argv[2:] or ["0"])[0])
    sys.exit(play(CASES, run, undisturbed, int(sys.argv[1]), first, *sys.argv[3:]))
