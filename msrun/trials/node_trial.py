"""One trial of a job on several nodes, which are namespaces of this machine, with a time limit.

Whoever watches a job of several nodes does what a person or an engine would do: a node that is lost
without a spare one is started again with its own command line, and a job that has ended unfinished
is resumed on all of its nodes.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.controller.states import JobState
from msrun.cluster.cluster import Cluster
from msrun.cluster.node import ClusterNode
from msrun.cluster.program import NodeProgram
from msrun.runs.fields import read_object
from msrun.trials.history import DrillExit
from msrun.trials.node_fault import OF_JOB, AnyFault, NodeDeed, NodeFault, NodesOfDrill
from msrun.trials.step_watch import StepWatch
from msrun.trials.trial import FOLDERS, REFUSED_EXIT, Command, TrialEnd
from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.env import DRILL
from worker_hooks.contract.layout import STATUS
from worker_hooks.drill.plan import DrillPlan, Fault

PORT = 29511  # of the namespaces' own ports all are free
LOOK_S = 0.01
HALVES = 2  # nodes: who is cut off is one
LEAVE_S = 20.0  # for what ends with its msrun
PATIENCE_S = 30.0  # of a person, once a part of the job has ended and nothing happens any more


@dataclass(eq=False)
class _NodeMsrun:
    """The msrun of a node."""

    node: ClusterNode
    program: NodeProgram
    is_spare: bool = False
    is_struck: bool = False  # nothing is expected of it any more

    @property
    def code(self) -> int | None:
        """Its exit code; ``None``: it runs."""
        return self.program.process.poll()


def meeting(nodes: int) -> tuple[str, ...]:
    """The options with which the nodes of a drill find each other."""
    return (f"--nnodes={nodes}", "--master-addr=node0", f"--master-port={PORT}")


def job_code(awaited: Sequence[int | None], struck: Sequence[int | None]) -> int | None:
    """The exit code of a job; ``None``: it is not over.

    Args:
        awaited: those of its msruns.
        struck: of nodes of which nothing is expected any more. One that is half of the nodes goes
            on with a spare one once its cable is back, and the other half has ended with 1.
    """
    if None in awaited:
        return None
    failure = next((code for code in awaited if code), 0)
    if not failure or 0 not in awaited:
        return failure
    if None in struck:
        return None
    return 0 if 0 in struck else failure


class NodesTrial:
    """A job on several nodes that trains with faults or without."""

    def __init__(
        self, folder: Path, command: Command, size: NodesOfDrill, faults: Sequence[AnyFault] = ()
    ) -> None:
        """Make the folders. ``faults``: those of ranks first.

        Raises:
            OSError: they cannot be made.
        """
        for name in (*FOLDERS, "cluster"):
            (folder / name).mkdir(parents=True)
        self.folder, self._command, self._size = folder, command, size
        of_ranks = tuple(fault for fault in faults if isinstance(fault, Fault))
        self._plan = DrillPlan(str(folder / "traces"), str(folder / "ckpt"), of_ranks)
        self._due = {
            index: fault for index, fault in enumerate(faults) if isinstance(fault, NodeFault)
        }
        self._may_resume = len(faults)
        self._watch = StepWatch(self._plan.layout)
        self._mends: list[tuple[float, ClusterNode]] = []
        self._parts: list[_NodeMsrun] = []
        self._starts = 0
        self._places: dict[int, int] = {}  # of the job's nodes that a spare one has taken
        self._kill_at = float("inf")  # of a preemption
        self._is_killed = False  # by it
        self._moved = (0, 0, 0.0)  # the newest commit, how many have ended, and since when

    def run(self, environ: Mapping[str, str], within_s: float | None) -> TrialEnd:
        """Run the job to its end; resume it if it ended unfinished.

        Whatever happens, no process of it is left.

        Raises:
            ClusterError: the kernel refuses a cluster.
        """
        began = time.monotonic()
        deadline = None if within_s is None else began + within_s
        own = {**environ, DRILL: self._plan.encode()}
        departures: list[DrillExit] = []
        count = self._size.nodes + self._size.spares
        with Cluster(count, self.folder / "cluster", own) as cluster:
            self._start_all(cluster)
            while (code := self._await_end(cluster, deadline)) is not None:
                departures.append(DrillExit(code, time.monotonic(), self._is_killed))
                is_over = code == 0 and not self._is_stopped()
                if is_over or len(departures) > self._may_resume + 1:
                    break
                self._restore(cluster)
                self._start_all(cluster, *(() if code == REFUSED_EXIT else ("--resume",)))
            self._end_who_was_cut_off()
            left = 0 if code is None else _left(cluster)
        return TrialEnd(code, tuple(departures), left, time.monotonic() - began)

    # --- the msruns -------------------------------------------------------------------------------

    def _start_all(self, cluster: Cluster, *words: str) -> None:
        """As one would by hand; ``words``: options more."""
        self._parts = []
        self._places.clear()
        for node in cluster.nodes:
            if node.index < self._size.nodes:
                self._start(node, f"--node-rank={node.index}", *words)
            elif not words:
                self._start(node, "--spare-node").is_spare = True

    def _start(self, node: ClusterNode, *words: str) -> _NodeMsrun:
        self._starts += 1
        logs = self.folder / "logs" / f"{node.name}_{self._starts}"
        argv = self._command.argv(
            ["--join=True", f"--log-dir={logs}", *meeting(self._size.nodes), *words]
        )
        console = self.folder / f"console_{node.name}.log"
        program = node.run(argv, cwd=Path.cwd(), stdout=console, stderr=console)
        part = _NodeMsrun(node, program)
        self._parts.append(part)
        return part

    def _await_end(self, cluster: Cluster, deadline: float | None) -> int | None:
        """Strike what is due until all have ended; their exit code; ``None``: the time is over."""
        while True:
            self._watch.look()
            self._strike_due(cluster)
            self._mend_due()
            if time.monotonic() >= self._kill_at:
                self._preempt(cluster)
            awaited = [part for part in self._parts if not part.is_struck] or self._parts
            codes = [part.code for part in awaited]
            is_half = self._size.nodes == HALVES
            struck = [part.code for part in self._parts if part.is_struck and is_half]
            if (code := job_code(codes, struck)) is not None:
                return code
            if self._is_stuck(codes):
                for part in awaited:
                    part.program.signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_S)

    def _is_stuck(self, codes: Sequence[int | None]) -> bool:
        """Whether some have ended in vain, and the others wait for them; once in a while."""
        if not any(codes):
            return False
        now, seen = time.monotonic(), (self._watch.step, codes.count(None))
        if self._moved[:2] != seen:
            self._moved = (*seen, now)
        if now - self._moved[2] < PATIENCE_S:
            return False
        self._moved = (*seen, now)
        return True

    def _end_who_was_cut_off(self) -> None:
        """Whoever comes back after the job's end waits for it, minutes long."""
        for part in self._parts:
            if part.is_struck:
                part.program.signal(signal.SIGTERM)

    def _is_stopped(self) -> bool:
        """Whether the job has ended because it was asked to, as its newest status says."""
        found = [*(self.folder / "logs").rglob(STATUS)]
        newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
        return newest is not None and read_object(newest).get("state") == JobState.STOPPED.value

    # --- faults -----------------------------------------------------------------------------------

    def _strike_due(self, cluster: Cluster) -> None:
        for index, fault in tuple(self._due.items()):
            moment = self._watch.moment_in(fault.step, fault.delay)
            if moment is not None and time.monotonic() >= moment:
                del self._due[index]
                node = cluster.nodes[self._places.get(fault.node, fault.node)]
                if node.init is not None:
                    self._strike(index, fault, node)

    def _strike(self, index: int, fault: NodeFault, node: ClusterNode) -> None:
        mark = {
            "time": time.time(),
            "at": time.monotonic(),
            "step": self._watch.step + 1,
            "attempt": self._watch.attempt,
            "pid": 0,
            "fault": fault.words,
        }
        write_atomic(self._plan.layout.struck(index), json.dumps(mark).encode(), durable=False)
        living = [part for part in self._parts if part.code is None]
        struck = [part for part in living if part.node is node]
        if fault.deed in OF_JOB:
            self._ask(fault, living if fault.deed is NodeDeed.PREEMPT else struck)
        else:
            self._disturb(fault, node, struck)

    def _ask(self, fault: NodeFault, parts: Sequence[_NodeMsrun]) -> None:
        """A person asks at one node, a batch system at all of them."""
        for part in parts:
            part.program.signal(fault.number)
        if fault.deed is NodeDeed.PREEMPT:
            self._kill_at = time.monotonic() + fault.grace_s

    def _disturb(self, fault: NodeFault, node: ClusterNode, struck: Sequence[_NodeMsrun]) -> None:
        for part in struck:
            part.is_struck = not fault.disturbs_nobody
        match fault.deed:
            case NodeDeed.KILL:
                node.kill()
            case NodeDeed.POWEROFF:
                node.poweroff()
            case NodeDeed.KILL_MSRUN:
                for part in struck:
                    part.program.signal(signal.SIGKILL)
            case NodeDeed.CUT:
                node.cut()
                self._mends.append((time.monotonic() + fault.for_s, node))
                if not fault.disturbs_nobody:
                    self._has_spare(fault.node)
                return
        if not self._has_spare(fault.node):
            self._start_again(node, fault.node)

    def _preempt(self, cluster: Cluster) -> None:
        """The time of grace is over."""
        self._kill_at, self._is_killed = float("inf"), True
        for node in cluster.nodes:
            if node.init is not None:
                node.kill()

    def _has_spare(self, place: int) -> bool:
        """Whether a spare node takes the place; it is none any more."""
        for part in self._parts:
            if part.is_spare and part.code is None:
                part.is_spare = False
                self._places[place] = part.node.index
                return True
        return False

    def _start_again(self, node: ClusterNode, place: int) -> None:
        if node.init is None:
            node.boot()
        # of two that were lost at once the spare one may have taken this one's place
        is_sure = place == 0 or not self._places.keys() - {place}
        self._start(node, *([f"--node-rank={place}"] if is_sure else []))

    def _mend_due(self) -> None:
        for moment, node in tuple(self._mends):
            if time.monotonic() >= moment:
                self._mends.remove((moment, node))
                if node.init is not None:
                    node.mend()

    def _restore(self, cluster: Cluster) -> None:
        """All nodes are on and have their cables, and nothing runs on them."""
        for _, node in self._mends:
            if node.init is not None:
                node.mend()
        self._mends.clear()
        self._kill_at, self._is_killed = float("inf"), False
        for node in cluster.nodes:
            if node.init is not None:
                node.kill()
            node.boot()


def _left(cluster: Cluster) -> int:
    """How many processes outlive their msruns."""
    deadline = time.monotonic() + LEAVE_S
    while left := sum(len(node.processes()) for node in cluster.nodes):
        if time.monotonic() > deadline:
            return left
        time.sleep(LOOK_S)
    return 0
