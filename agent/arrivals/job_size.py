"""With how many nodes a job of ``--nnodes=MIN:MAX`` goes on, as its controller's node decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from agent.arrivals.leaving import Asked, Departures, farewell
from agent.arrivals.places import LostPlaces
from agent.arrivals.resize import Resize
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.nodes.messages import Join
from agent.nodes.run_messages import Ended, NodeFacts
from agent.text.ranges import format_ranges
from agent.text.wording import ranged, worker_named

NO_STATE = "no rank can save its state yet"
IN_DOUBT = "half of its nodes are silent"
NO_DOORS = "its other nodes have no port at which they would meet without node 0 (--node-wait=0)"


class View(Protocol):
    """The job as of the newest decision."""

    @property
    def state(self) -> JobState:
        """What it does."""

    @property
    def attempt(self) -> int:
        """Its number."""

    @property
    def has_hooks(self) -> bool:
        """Whether some rank's state could be saved, ever."""

    @property
    def is_asked(self) -> bool:
        """Whether somebody has asked for its end."""


class KnownHolders(Protocol):
    """Which ranks hold the same."""

    @property
    def why_none(self) -> str:
        """Why that is not known; empty: it is."""

    @property
    def apart(self) -> str:
        """Why nodes save into different folders; empty: they do not."""

    @property
    def is_cut(self) -> bool:
        """Whether they hold different parts."""


class Ending(Protocol):
    """How a run has ended."""

    @property
    def state(self) -> JobState:
        """Of the job."""

    @property
    def exit_code(self) -> int:
        """Of every node's msrun, unless the job goes on."""

    @property
    def reason(self) -> str:
        """A sentence."""

    @property
    def saved(self) -> str | None:
        """The newest checkpoint."""

    @property
    def lost(self) -> str:
        """Why the newest step is not in it."""

    @property
    def is_to_end(self) -> bool:
        """Whether somebody has asked for that."""

    @property
    def asking(self) -> frozenset[int]:
        """The ranks that have asked to exit."""


class SizeJudge:
    """Judges requests that change it, and knows with how many nodes the job goes on."""

    def __init__(
        self, resize: Resize, places: LostPlaces, say: Callable[[str], object], *, resumes: bool
    ) -> None:
        """Take the parts.

        Args:
            resize: plans the change; it stays the caller's as well.
            places: of lost nodes.
            say: prints one sentence for people.
            resumes: a step was saved before this run.
        """
        self.resize = resize
        self._places = places
        self._say = say
        self._leaving = Departures(resize, say)
        self._resumes = resumes

    def grown(
        self, waiting: Iterable[Join], view: View, holders: KnownHolders, newest: Callable[[], int]
    ) -> ev.ExitRequestedByFile | None:
        """The request to save the step, with which it goes on with the nodes that wait, if it can.

        ``newest``: the newest step that a rank has committed.
        """
        comers = _comers(waiting)
        is_known = not holders.why_none or holders.is_cut
        is_calm = view.state is JobState.RUNNING and not view.is_asked
        if (
            not (comers and is_calm and is_known and newest())
            or self._places.vacant
            or holders.apart  # nodes that meet again look for the step on their own disks
        ):
            return None
        why = self.resize.grow(comers)
        return ev.ExitRequestedByFile(view.attempt, why, goes_on=True) if why else None

    def judged(
        self,
        event: ev.StopRequested,
        nodes: Sequence[NodeFacts],
        there: Collection[int],
        waiting: Iterable[Join],
        view: View,
        holders: KnownHolders,
        *,
        is_to_end: bool,
    ) -> ev.StopRequested | None:
        """The request, of a node that is to leave, on which is to be decided.

        ``None``: no decision follows, and what runs on that node is to end at once.

        Args:
            event: that request.
            nodes: of the job, by their places; node 0 is the controller's.
            there: the places of those that are there.
            waiting: nodes that have come.
            view: the job as it is.
            holders: which ranks hold the same.
            is_to_end: somebody has asked for the end of the job.
        """
        why_not = ""
        if not (view.has_hooks or self._resumes):
            why_not = NO_STATE
        elif holders.apart:
            why_not = holders.apart
        elif self._places.is_in_doubt:
            why_not = IN_DOUBT
        elif not event.node and not all(nodes[rank].door for rank in there if rank):
            why_not = NO_DOORS
        is_holding = view.state is JobState.HOLDING
        stay = len({*there} - self.resize.leaving - {event.node})
        who, comers = _named(nodes[event.node]), len(_comers(waiting))
        asked = Asked(who, stay, comers, why_not, is_to_end, is_holding)
        return self._leaving.judged(event, asked)

    def settle(self, there: Collection[int], waiting: Iterable[Join]) -> None:
        """The run has ended: see who is there by now, and who waits."""
        self.resize.settle(len({*there} - self.resize.leaving), len(_comers(waiting)))

    def goes_on_with(self, ending: Ending, node_of: Callable[[int], int]) -> int:
        """The nodes with which the job goes on as another one; 0: it does not.

        ``node_of``: the place of the node of a rank.
        """
        asking = {node_of(rank) for rank in ending.asking}
        goes_on = self.resize.goes_on(
            is_done=ending.state is JobState.SUCCEEDED,
            is_saved=ending.saved is not None and not ending.lost,
            # who signals all processes of a node means that node
            is_to_end=ending.is_to_end or not asking <= self.resize.leaving,
        )
        return self.resize.expected if goes_on else 0

    def ended(self, ending: Ending, node: int, nodes: int) -> Ended:
        """What another node is told as the run has ended, with which the job goes on or not."""
        leaving, state = self.resize.leaving, ending.state.value
        if nodes and node in leaving:
            return Ended(0, farewell(nodes, ending.saved or ""), state, has_left=True)
        without_first = nodes if 0 in leaving else 0
        return Ended(ending.exit_code, ending.reason, state, bool(nodes), without_first)

    def say_ended(self, ending: Ending, nodes: int, node_of: Callable[[int], int]) -> None:
        """Say why a node has not left that was to; ``nodes``: with which the job goes on."""
        leaving = self.resize.leaving
        if not leaving or nodes or ending.is_to_end or ending.state is JobState.SUCCEEDED:
            return
        asking = [rank for rank in ending.asking if node_of(rank) not in leaving]
        if ending.lost or ending.saved is None:
            why = ending.lost or "no step is saved"
        elif asking:
            why = f"{ranged(asking)} {'has' if len(asking) == 1 else 'have'} asked for its end"
        else:
            why = "no other node is left"
        who = f"node{'s' if len(leaving) > 1 else ''} {format_ranges(sorted(leaving))}"
        self._say(f"the job does not go on without {who}, but stops: {why}")


def _comers(waiting: Iterable[Join]) -> list[str]:
    """The hosts of those that wait to be taken in; a spare one waits for a lost one's place."""
    return [join.host for join in waiting if not join.is_spare]


def _named(node: NodeFacts) -> str:
    return f"{worker_named(node.name) or f'node {node.rank}'} ({node.host})"
