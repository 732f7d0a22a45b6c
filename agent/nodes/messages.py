"""What the msrun processes of several nodes say to each other. Pure.

    node that dials -> controller's node    Join, Fact, Noted, Pulse, NodeReport, Parting
    controller's node -> the others         Challenge, Refused, Admitted, Begin, Order, Noted, Ended

From Join to Begin a node waits and says nothing.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from agent.nodes.vocabulary import Vocabulary

ANY_RANK = -1  # a node rank that was not given


class NodeFacts(NamedTuple):
    """One node of the job."""

    rank: int
    host: str
    address: str  # as the controller's node sees it
    nproc: int
    pid: int  # of its msrun
    torch: str = ""  # its version; empty: not known


class Challenge(NamedTuple):
    """Prove that you belong to this job. ``version``: of msrun."""

    nonce: str
    version: str


class Join(NamedTuple):
    """A node with ``nproc`` workers wants to take part."""

    run_id: str
    record_id: str
    node_rank: int  # ANY_RANK: not given
    nproc: int
    host: str
    pid: int
    version: str
    torch: str  # empty: not known
    nonce: str
    proof: str  # empty: there is no token


class Refused(NamedTuple):
    """The node cannot take part: its msrun ends with ``exit_code``."""

    why: str
    exit_code: int


class Admitted(NamedTuple):
    """The node takes part, as ``node_rank``; Begin follows."""

    node_rank: int
    proof: str  # empty: there is no token


class Begin(NamedTuple):
    """All nodes are here, in the order of their ranks. The same for every node."""

    nodes: tuple[NodeFacts, ...]
    settings: dict[str, object]


class Order(NamedTuple):
    """What the controller decided, for this node's ranks."""

    action: dict[str, object]  # as agent.nodes.codec


class Fact(NamedTuple):
    """What happened on a node."""

    event: dict[str, object]  # as agent.nodes.codec


class Noted(NamedTuple):
    """What is neither decided upon nor ordered."""

    facts: dict[str, object]


class Pulse(NamedTuple):
    """How far a node's ranks are."""

    facts: dict[str, object]


class NodeReport(NamedTuple):
    """What a node found out about a failure, for the one report of the job."""

    text: str
    facts: dict[str, object]


class Ended(NamedTuple):
    """The job is over: every node's msrun ends with ``exit_code``."""

    exit_code: int
    reason: str


class Parting(NamedTuple):
    """A node has nothing left to do or to say."""

    reason: str


# fmt: off
NodeMessage = (
    Challenge | Join | Refused | Admitted | Begin | Order | Fact | Noted | Pulse | NodeReport
    | Ended | Parting
)
# fmt: on

_MESSAGES = Vocabulary(get_args(NodeMessage))


def pack(message: NodeMessage) -> dict[str, object]:
    """A message as the JSON object of a frame."""
    return _MESSAGES.pack(message)


def unpack(packed: object) -> NodeMessage:
    """The message in a frame.

    Raises:
        CodecError: it is none that this version knows.
    """
    message: NodeMessage = _MESSAGES.unpack(packed)
    return message
