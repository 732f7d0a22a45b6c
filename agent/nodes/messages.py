"""What the msrun processes of several nodes say to each other. Pure.

    node that dials -> controller's node    Join, StopGathering, Newer
    controller's node -> the others         Challenge, Refused, Spare, AwaitedNodes, SeekNewer,
                                            Admitted, Begin

From Join to Begin a node waits and says nothing, unless it is asked, or the job is to end; a spare
one may do so for days. What follows is in
``run_messages``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, get_args

from agent.nodes.run_messages import NodeFacts, RunMessage
from agent.nodes.vocabulary import Vocabulary
from agent.spec.spent_budget import ToldBudget

AGAIN = 75  # exit code of who is refused, and comes again once its ranks have saved; EX_TEMPFAIL
ANY_RANK = -1  # a node rank that was not given


class Challenge(NamedTuple):
    """Prove that you belong to this job. ``version``: of msrun."""

    nonce: str
    version: str


class SurvivedStep(NamedTuple):
    """What a node that has lost the controller's node knows: where the job goes on."""

    job: str  # its id
    node_rank: int  # that the node had in it
    path: str  # of a checkpoint, on a file system that all nodes share; empty: there is none
    step: int  # that it holds; 0: there is none
    lineage: tuple[str, ...]  # record ids: the job's, then those of the runs that it resumed
    program: str  # a digest of what its ranks run, with which arguments
    nodes: int = 0  # that the job had, node 0 included; 0: not known
    attempt: int = 0  # the newest that the node knows of: a later one may have its place, if older
    is_haunted: bool = False  # a silent node had its place, which may live, and ask a store, too
    reached: int = 0  # the newest step that was committed, if it is later, and lost


class LivingRanks(NamedTuple):
    """What a node tells whose ranks train on though the controller's process has ended."""

    job: str  # its id
    node_rank: int  # that the node has in it
    attempt: int  # that its ranks are in
    attempt_resume: str  # the checkpoint that they have resumed from; empty: none
    resume: str  # the same of the job's beginning
    resume_step: int
    lineage: tuple[str, ...]  # record ids of the runs that the job resumed
    program: str  # a digest of what its ranks run, with which arguments
    world: int  # ranks of the job
    local_first: int  # the local rank of its first rank


class AskedSize(NamedTuple):
    """How large a job is to be."""

    world: int  # its workers; 0: that is not what is known
    least: int  # nodes with which it may begin; 0: all of them
    nnodes: int  # that it can have


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
    is_spare: bool = False  # it wants no place before another node is lost
    door: int = 0  # the port at which it listens if it has to take node 0's part; 0: it does not
    survived: SurvivedStep | None = None  # None: it comes for the first time
    name: str = ""  # of its worker, which was started by hand; empty: it has none
    living: LivingRanks | None = None  # its ranks train
    resumes: bool = False  # it was told to go on from a checkpoint
    size: AskedSize | None = None  # of the job, as its line says; None: it does not matter
    spent: ToldBudget = ToldBudget()  # of the job that the node was in
    place: int = -1  # among nodes without a rank, as their engine has numbered them; -1: not known


class Refused(NamedTuple):
    """The node cannot take part: its msrun ends with ``exit_code``."""

    why: str
    exit_code: int
    is_of_token: bool = False  # it has not proved that it knows the job's token


class Spare(NamedTuple):
    """The node waits until another one is lost, or the job is over. Said again as nodes change."""

    nodes: tuple[NodeFacts, ...]


class StillThere(NamedTuple):
    """The controller's msrun is not stopped. Said now and then: a stopped one's machine answers."""


class AwaitedNodes(NamedTuple):
    """Who is here and who is missing, as text, now and then while a node waits for the job."""

    text: str


class StopGathering(NamedTuple):
    """Somebody has asked the job to end, on a node that waits: no other one is to wait, either."""

    why: str
    signum: int


class SeekNewer(NamedTuple):
    """Say whether you have a later step of the run that node 0 resumes, on a disk of your own.

    Each node that waits answers with Newer.
    """

    folder: str
    run: str  # the record id that is in what was saved
    step: int


class Newer(NamedTuple):
    """The newest checkpoint of that run on this node, if it is newer."""

    step: int = 0  # 0: there is none
    path: str = ""
    place: dict[str, object] | None = None  # as CheckpointPlace; None: it is not to be had


class Admitted(NamedTuple):
    """The node takes part, as ``node_rank``; Begin follows."""

    node_rank: int
    proof: str  # empty: there is no token


class Begin(NamedTuple):
    """All nodes are here, in the order of their ranks. The same for every node."""

    nodes: tuple[NodeFacts, ...]
    settings: dict[str, object]


class ToldSettings(NamedTuple):
    """What the controller's node says that all nodes must know alike."""

    job_id: str
    run_id: str
    store_port: int
    max_restarts: int
    resume: Path | None
    resume_step: int
    lineage: tuple[str, ...]
    is_late: bool
    silence_s: float

    @staticmethod
    def read(settings: Mapping[str, object]) -> ToldSettings:
        """Read what was said."""
        resume = settings["resume"]
        lineage = settings["lineage"]
        return ToldSettings(
            job_id=str(settings["job_id"]),
            run_id=str(settings["run_id"]),
            store_port=int(str(settings["store_port"])),
            max_restarts=int(str(settings["max_restarts"])),
            resume=None if resume is None else Path(str(resume)),
            resume_step=int(str(settings["resume_step"])),
            lineage=tuple(map(str, lineage)) if isinstance(lineage, list) else (),
            is_late=bool(settings["is_late"]),
            silence_s=float(str(settings["silence_s"])),
        )


# fmt: off
NodeMessage = (
    Challenge | Join | Refused | Spare | StillThere | AwaitedNodes | StopGathering | SeekNewer
    | Newer | Admitted | Begin | RunMessage
)
# fmt: on

_MESSAGES: Vocabulary[NodeMessage] = Vocabulary(get_args(NodeMessage))

pack, unpack = _MESSAGES.pack, _MESSAGES.unpack
"""A message as the JSON object of a frame, and back."""
