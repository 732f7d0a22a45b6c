"""What the parts of a node know of the job, and of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.ranks.parts import Groups, Part, Parts
from agent.workers.starter import Starter
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

MOST_ALIKE = 20_000  # ranks that one message names
TOO_MANY = "it has {:,} replicas, more than a message can name"
MOST_NAMED = 16 << 20  # characters about parts that all ranks together are told
MOST_OF_RANK = 64 << 10  # that one rank is: a message is one packet
_DIGITS = 8  # characters of a rank's number in a message, at most, with what is between them

_SAVING = {JobState.FREEZING, JobState.DUMPING, JobState.COMMITTING}  # alike for nodes


def _characters(part: Part) -> int:
    return _DIGITS * len(part.ranks) + sum(map(len, part.without))


class JobView(NamedTuple):
    """The job as of the newest decision."""

    state: JobState = JobState.NEW
    attempt: int = 0
    has_hooks: bool = False  # some rank's state could be saved, ever
    is_asked: bool = False  # somebody has asked it to stop
    is_apart: bool = False  # nodes save into different folders

    def is_news_to(self, known: JobView | None) -> bool:
        """Whether nodes have to know at once; if not, they do with the next order."""
        if known is None or not {self.state, known.state} <= _SAVING:
            return self != known
        return self._replace(state=known.state) != known


class Holders(NamedTuple):
    """Which ranks hold the same state."""

    why_none: str = ""  # why not any rank may save the state of any other one; empty: it may
    alike: Groups = ()  # the replica groups; none: nobody knows them
    apart: str = ""  # why nodes save into different folders; empty: they do not, or unknown
    is_cut: bool = False  # ranks hold different parts of the state
    to_copy: Groups = ()  # the replica groups of which each keeps copies of its part in memory
    parts: Parts = Parts()

    @property
    def why_not_alone(self) -> str:
        """Why the ranks do not save without a controller; empty: they do, each for its group.

        Ranks agree by notes in the folder into which all save.
        """
        return self.apart or ("" if self.alike else self.why_none)

    def told(self) -> dict[int, protocol.Replicated]:
        """What each rank of a group is told of it, and of its parts unless all of that is much."""
        found: dict[int, protocol.Replicated] = {}
        for ranks in self.alike:
            said = protocol.Replicated(self.why_not_alone, list(ranks))
            if len(ranks) > MOST_ALIKE:  # if they are all, it need not be said who they are
                too_many = TOO_MANY.format(len(ranks)) if len(self.alike) > 1 else ""
                said = protocol.Replicated(self.why_not_alone or too_many)
            found |= dict.fromkeys(ranks, said)
        every = self.parts.every
        of_rank: dict[int, list[Part]] = {}
        for part in every:
            for rank in part.ranks:
                of_rank.setdefault(rank, []).append(part)
        of_part = {id(part): _characters(part) for part in every}
        sizes = [sum(of_part[id(part)] for part in parts) for parts in of_rank.values()]
        if sum(sizes) > MOST_NAMED or max(sizes, default=0) > MOST_OF_RANK:
            return found
        for rank in found.keys() & of_rank.keys():
            found[rank] = found[rank]._replace(
                parts=[list(part.ranks) for part in of_rank[rank]],
                without=[list(part.without) for part in of_rank[rank]],
                total=len(every),
            )
        return found


class ControllerPort(Protocol):
    """Who decides, as far as a node needs it."""

    @property
    def view(self) -> JobView:
        """The job, as far as this node knows it."""

    def begin(self) -> None:
        """The node is ready."""

    def post(self, event: ev.Event) -> None:
        """Decide on an event."""

    def ended(self, state: JobState, gone: tuple[Worker, ...]) -> None:
        """These workers are gone for good; what they left can be examined.

        Args:
            state: of the job; ``REPLACING``: others run in their places.
            gone: in the order in which they were started.
        """


# fmt: off
Action = (
    do.Tell | do.HoldRanks | do.FreezeRanks | do.SaveRanks | do.CommitDump | do.AbandonDump
    | do.RefuseRanks | do.ForgetMemory
)
# fmt: on


class RanksPort(Protocol):
    """The processes of ranks, as far as hooks need them."""

    def announce(self) -> None:
        """Take in every start that has happened already."""

    def settle(self) -> None:
        """Take in every start and death that has happened already."""

    def worker(self, rank: int) -> Worker:
        """A rank of the present attempt."""

    def workers(self) -> Sequence[Worker]:
        """All of the present attempt."""

    def protect(self, pid: int) -> None:
        """If the agent dies, this process is to get its time to save."""

    def watch(self, path: str) -> None:
        """A graceful exit may be asked for in this file."""

    def wake(self, rank: int) -> None:
        """Send SIGCONT to a rank."""


class AgentPort(RanksPort, Protocol):
    """The supervisor, as far as the bridge needs it."""

    def post(self, event: ev.Event) -> None:
        """Decide on an event."""


class ControllersNode(RanksPort, Protocol):
    """The controller's own node, as far as it is one of all nodes."""

    loop: asyncio.AbstractEventLoop
    starter: Starter
    """Knows where ranks meet."""

    def act(self, action: do.Action) -> None:
        """Carry out what concerns this node, and the state of all ranks."""

    def decided(self, view: JobView, holders: Holders) -> None:
        """Know what became of the job by the newest decision, which was carried out."""

    def catch_up(self) -> None:
        """Take in what ranks have said by now, and their ends."""

    def refresh_of(self, workers: Mapping[int, Worker]) -> bool:
        """Note in the workers of all nodes how far they are; whether that changes by itself."""

    def next_end(self) -> int:
        """The number of one more worker's end in the attempt."""

    def finish(self) -> None:
        """The job is over."""
