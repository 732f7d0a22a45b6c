"""What a node knows of the job, and whom it tells what happens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from agent.controller import events as ev
from agent.controller.replication import Groups
from agent.controller.states import JobState
from agent.workers.worker import Worker


class JobView(NamedTuple):
    """The job as of the newest decision."""

    state: JobState = JobState.NEW
    attempt: int = 0
    has_hooks: bool = False  # some rank's state could be saved, ever
    is_asked: bool = False  # somebody has asked it to stop


class Holders(NamedTuple):
    """Which ranks hold the same state."""

    why_none: str = ""  # why not any rank may save the state of any other one; empty: it may
    alike: Groups = ()  # the replica groups; none: nobody knows them
    is_cut: bool = False  # ranks hold different parts of the state
    to_copy: Groups = ()  # the replica groups of which each keeps copies of its part in memory


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
