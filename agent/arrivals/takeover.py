"""A node takes the part of a lost node 0, or finds the one that does, while its ranks live on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from agent.arrivals.late import LateGuests, Loop, NodePlace
from agent.arrivals.successors import LONGEST_S, PATIENCE_S, Successors, Takeover
from agent.launch.doors import Address, DoorWatch
from agent.machine.file_thread import FileThread
from agent.machine.loop_calls import until_closed
from agent.nodes.join import (
    AwaitedLine,
    JoinedNode,
    NeverBegunError,
    NobodyThereError,
    RefusedError,
)
from agent.nodes.line import Line
from agent.nodes.messages import AGAIN, Begin, Join, Refused, Spare
from agent.spec.spent_budget import ToldBudget
from worker_hooks.contract.left_pages import TAKEN, claim

LOOK_S = 0.02  # between two looks at what came of knocking
NOT_YET = "no node has taken the part of node 0"
OTHER = "this node takes the part of node 0 of another job, or of another attempt"

Dial = Callable[[Address, Callable[[socket.socket], object]], JoinedNode]
"""Goes to a node and waits until it decides; takes what takes the connection, and raises as
:func:`agent.nodes.join.join`."""


class SuccessorWatch:
    """Looks for the node that takes the part of the lost one, which may be this one."""

    def __init__(
        self,
        rule: Successors,
        own: int,
        doors: Mapping[int, Address],
        dial: Dial,
        lead: Callable[[], TakeoverDoor | None],
        loop: Loop,
        found: Callable[[JoinedNode], object],
        too_late: Callable[[str, bool], object],
    ) -> None:
        """Begin.

        Args:
            rule: whom to go to.
            own: this node's place.
            doors: of all nodes, by their places.
            dial: goes to one of them.
            lead: has this node wait for the others, before it is gone to as well; ``None``: it
                cannot.
            loop: on which the others are called.
            found: takes the line to the one that decides from now on.
            too_late: takes why there is none, and that this is certain.
        """
        self._rule = rule
        self._own = own
        self._doors = doors
        self._dial = dial
        self._lead = lead
        self._loop = loop
        self._found = found
        self._too_late = too_late
        self._awaited = AwaitedLine()
        self._door: TakeoverDoor | None = None  # of this node
        self._knocks = DoorWatch({rank: doors[rank] for rank in rule.doors})
        self._timer = loop.call_soon(self._look)
        self._end = loop.call_later(LONGEST_S, self._give_up, NOT_YET)

    def close(self) -> None:
        """It is not wanted any more, or is found."""
        self._awaited.close()
        if self._door is not None:
            self._door.close()
        self._timer.cancel()
        self._end.cancel()
        self._knocks.close()

    def _look(self) -> None:
        node = self._rule.look(self._knocks.look(self._rule.doors))
        if node is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)
            return
        self._knocks.close()
        if node == self._own:
            self._door = self._lead()
        if not self._awaited.is_over.is_set():
            address = self._doors[node]
            threading.Thread(
                target=self._go, args=(address,), name="msrun-successor", daemon=True
            ).start()

    def _give_up(self, why: str) -> None:
        if not self._awaited.is_over.is_set():
            self._too_late(why, True)

    # --- in a thread ----------------------------------------------------------------------------

    def _go(self, address: Address) -> None:
        try:
            joined = self._dial(address, self._awaited.opened)
        except (NobodyThereError, RefusedError, NeverBegunError) as error:
            self._call(self._give_up, str(error))
        else:
            self._call(self._take, joined)

    def _call(self, call: Callable[..., object], about: object) -> None:
        until_closed(self._loop.call_soon_threadsafe)(call, about)

    def _take(self, joined: JoinedNode) -> None:
        if self._awaited.is_wanted(joined):
            self._found(joined)


class AttemptClaim(NamedTuple):
    """What is claimed before a node decides: ranks of the lost one may be about to save."""

    job: str
    attempt: int
    places: tuple[str, ...]  # where ranks save


class TakeoverDoor:
    """Waits on this node until all others have come, and nothing is in the way."""

    def __init__(
        self,
        rule: Takeover,
        guests: LateGuests,
        begin: Begin,
        doors: Mapping[int, Address],
        claim: AttemptClaim,
        files: FileThread,
        loop: Loop,
        decides: Callable[[LateGuests, Mapping[int, Line]], object],
        gives_up: Callable[[], object],
        spent: Callable[[ToldBudget], object] = lambda _: None,
    ) -> None:
        """Begin.

        Args:
            rule: whether this node may decide.
            guests: answers whoever comes.
            begin: what all nodes are told.
            doors: of all nodes, by their places.
            claim: of the present attempt.
            files: does file work.
            loop: on which the others are called.
            decides: this node decides from now on; takes those that wait, and the lines to the
                nodes that have come, by their places.
            gives_up: it does not, and needs no more of what it was given for that.
            spent: takes what each node knows that the job has used up of its budgets.
        """
        self._rule = rule
        self._guests = guests
        self._begin = begin
        self._claim = claim
        self._files = files
        self._loop = loop
        self._decides = decides
        self._gives_up = gives_up
        self._spent = spent
        self._is_over = self._has_begun = False
        self._lines: dict[int, Line] = {}
        self._knocks = DoorWatch(doors)
        self._deadline_s = loop.time() + PATIENCE_S
        guests.attach(loop, self._judge, self._lines.__setitem__)
        self._timer = loop.call_soon(self._look)

    def close(self) -> None:
        """Nobody decides here; unless this node does already, who has come sees the line end."""
        if not self._is_over:
            self._is_over = True
            self._timer.cancel()
            self._knocks.close()
            self._guests.close(None)
            self._files.close(0.0)
            self._gives_up()

    def _judge(self, join: Join, _address: str) -> NodePlace | Spare | Refused:
        if join.living is None:  # it comes for a place, or has saved: later
            return Spare(self._begin.nodes if join.survived is None else ())
        if not self._rule.is_member(join):
            return Refused(OTHER, AGAIN)
        self._spent(join.spent)
        if not self._has_begun:
            return Spare(())  # it has its ranks, and no other place to go to
        return NodePlace(join.node_rank, self._begin)

    def _look(self) -> None:
        here = self._guests.waiting
        doors = self._knocks.look(self._rule.awaited(here))
        if self._rule.may_begin(here, doors):
            self._files.do(self._claimed, self._on_claimed)
        elif self._rule.is_in_vain(here, doors) or self._loop.time() > self._deadline_s:
            self.close()
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _claimed(self) -> bool:
        """Whether no rank of the lost node saves by itself, and none will; in a thread."""
        job, attempt, places = self._claim
        return all(claim(Path(place), job, attempt, TAKEN) for place in places)

    def _on_claimed(self, is_ours: bool | Exception) -> None:
        if self._is_over:
            return
        if is_ours is not True:
            self.close()
            return
        self._has_begun = self._is_over = True
        self._knocks.close()
        self._guests.seat()
        self._files.close(0.0)
        self._decides(self._guests, self._lines)
