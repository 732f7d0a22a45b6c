"""Faults of whole nodes, of their cables and of their msruns. Pure data.

A node has no process that could strike it from inside: the drill does so from outside, when a rank
has committed the step before.
"""

from __future__ import annotations

import signal as signals
from enum import Enum
from typing import NamedTuple

from agent.nodes.line import LIMIT_S
from worker_hooks.drill.plan import Fault


class NodeDeed(Enum):
    """What befalls a node."""

    KILL = "kill"  # all its processes; its kernel lives on, and tells their peers
    POWEROFF = "poweroff"  # nobody is told
    CUT = "cut"  # its cable is pulled out, and put back some time later
    KILL_MSRUN = "kill_msrun"  # msrun alone; its ranks find out
    REQUEST = "request"  # a signal to its msrun, that requests a graceful exit of the whole job
    PREEMPT = "preempt"  # SIGTERM to each node's msrun, and SIGKILL to all some time later


OF_JOB = frozenset({NodeDeed.REQUEST, NodeDeed.PREEMPT})
"""What ends the job, and no node in it."""


class NodeFault(NamedTuple):
    """One fault; it strikes once in a job, at ``step`` or the first later step that is seen."""

    node: int  # node 0 has the controller
    step: int
    deed: NodeDeed = NodeDeed.KILL
    delay: float = 0.5  # fraction of a step
    for_s: float = 8.0  # length of a cut
    number: int = signals.SIGTERM  # the signal that requests an exit
    grace_s: float = 30.0  # from a preemption's signal to its SIGKILL

    @property
    def words(self) -> str:
        """As text: ``power off node 1 at step 30 + 0.50``."""
        return f"{self._deed} at step {self.step} + {self.delay:.2f}"

    @property
    def disturbs_nobody(self) -> bool:
        """A cable that is back in time is noticed by nobody."""
        return self.deed is NodeDeed.CUT and self.for_s < LIMIT_S

    @property
    def _deed(self) -> str:
        match self.deed:
            case NodeDeed.KILL:
                return f"kill node {self.node}"
            case NodeDeed.POWEROFF:
                return f"power off node {self.node}"
            case NodeDeed.CUT:
                return f"cut node {self.node} for {self.for_s:g} s"
            case NodeDeed.REQUEST if self.number == signals.SIGTERM:
                return f"graceful exit asked for at node {self.node}"
            case NodeDeed.REQUEST:
                name = signals.Signals(self.number).name
                return f"graceful exit by {name} to node {self.node}"
            case NodeDeed.PREEMPT:
                return f"preemption of all nodes with {self.grace_s:g} s"
            case NodeDeed.KILL_MSRUN:
                who = "the controller" if self.node == 0 else f"msrun of node {self.node}"
                return f"kill -9 {who}"


AnyFault = Fault | NodeFault


class NodesOfDrill(NamedTuple):
    """How many nodes a job has in a drill."""

    nodes: int
    spares: int = 0  # more, which wait
