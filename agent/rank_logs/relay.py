"""The controller's node hands questions about logs on to the nodes of ranks, and the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from agent.hooks.rank_links import Loop, Timer
from agent.nodes.run_messages import NO_NODE, ForLogs, LogAsked, LogRead
from agent.rank_logs.desk import LogDesk
from agent.rank_logs.reading import LogReader, Told

SILENT_S = 5.0  # longer than a node waits for something new
FORGET_S = 15.0  # after the last question: what is left at the end of an attempt goes to its asker
MOST_ASKERS = 64
HERE = -1  # in place of the node that asks: this one
TOO_MANY = f"{MOST_ASKERS} logs are being read on other nodes"


class RankHome(Protocol):
    """A node that ranks run on."""

    @property
    def name(self) -> str:
        """The node, for people."""

    @property
    def is_there(self) -> bool:
        """Whether it can be told anything."""

    def pass_on(self, message: ForLogs) -> None:
        """Say what others have made for it."""


class _Asker:
    """Whom an answer goes to."""

    def __init__(self, node: int, number: int) -> None:
        self.node = node
        self.number = number  # of his question, as he knows it
        self.asked_s = 0.0
        self.told: Told = lambda _: None
        self.home: RankHome | None = None  # who is to answer; None: this node
        self.timer: Timer | None = None  # until the answer is overdue

    def stop(self) -> None:
        """It is answered, or is not awaited any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class LogRelay:
    """Each asker has a number of this node's; who asks again has it again."""

    def __init__(
        self,
        home: Callable[[int], RankHome | None],
        world: int,
        nodes: Mapping[int, RankHome],
        here: int,
        own: LogReader | None,
    ) -> None:
        """Take the parts.

        Args:
            home: the other node that a rank runs on; ``None``: this one.
            world: ranks of the job.
            nodes: the other ones, by their ranks.
            here: the rank of this one.
            own: reads logs of this node; ``None``: it is one of the others as well.
        """
        self._home = home
        self._world = world
        self._nodes = nodes
        self._here = here
        self._own = own
        self._askers: dict[int, _Asker] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # by the node that asks, and its number
        self._count = 0
        self._desk = None if own is None else LogDesk(own.record_id, self._ask_here)

    def attach(self, loop: Loop) -> None:
        """Work on ``loop``."""
        self._loop = loop
        if self._own is not None:
            self._own.attach(loop)
        if self._desk is not None:
            self._desk.attach(loop)

    def close(self) -> None:
        """The job is over."""
        if self._desk is not None:
            self._desk.close()

    def _ask_here(self, asked: LogAsked) -> None:
        assert self._desk is not None
        self.ask(HERE, asked, self._desk.hear)

    def hear_from(self, node: RankHome, rank: int, message: ForLogs) -> None:
        """A node, which has this rank among all, asks or answers."""
        if isinstance(message, LogAsked):
            self.ask(rank, message, node.pass_on)
        else:
            self.hear(message)

    def ask(self, node: int, asked: LogAsked, told: Told) -> None:
        """Ask for the log of any rank.

        Args:
            node: that asks, or HERE.
            asked: the question.
            told: takes the answers.
        """
        self._forget()
        number = self._numbers.get((node, asked.question))
        if number is None:
            if len(self._askers) >= MOST_ASKERS:
                told(LogRead(asked.question, why_not=TOO_MANY))
                return
            self._count = number = self._count + 1
            self._numbers[node, asked.question] = number
            self._askers[number] = _Asker(node, asked.question)
        asker = self._askers[number]
        asker.stop()
        asker.told, asker.asked_s = told, self._loop.time()
        if asked.node == NO_NODE:
            asker.home = self._home(asked.rank)
        else:
            asker.home = self._nodes.get(asked.node)
        self._pass_on(asker, asked._replace(question=number))

    def _pass_on(self, asker: _Asker, asked: LogAsked) -> None:
        home = asker.home
        if why := self._why_never(asked):
            self.hear(LogRead(asked.question, is_rest=True, why_not=why))
        elif home is None and self._own is not None:
            self._own.ask(asked, self.hear)
        elif home is None or not home.is_there:
            self.hear(LogRead(asked.question, why_not=_lost(home)))
        else:
            asker.timer = self._loop.call_later(SILENT_S, self._give_up, asked.question)
            home.pass_on(asked)

    def _why_never(self, asked: LogAsked) -> str:
        """What is wrong with a question; empty: nothing."""
        if asked.node != NO_NODE:
            known = {*self._nodes, self._here}
            is_known = asked.node in known
            return "" if is_known else f"the job has no such node: its nodes are 0 to {max(known)}"
        last = self._world - 1
        is_known = 0 <= asked.rank <= last
        return "" if is_known else f"the job has no such rank: its ranks are 0 to {last}"

    def hear(self, read: LogRead) -> None:
        """Hand an answer on, if somebody waits for it."""
        asker = self._askers.get(read.question)
        if asker is not None:
            asker.stop()
            asker.told(read._replace(question=asker.number))

    def lose(self, home: RankHome) -> None:
        """A node is lost: who waits for its answer waits no more."""
        for number, asker in tuple(self._askers.items()):
            if asker.home is home and asker.timer is not None:
                self.hear(LogRead(number, why_not=_lost(home)))

    def rest(self) -> None:
        """An attempt is over on this node: see LogReader.rest."""
        if self._own is not None:
            self._own.rest()

    def _give_up(self, number: int) -> None:
        home = self._askers[number].home
        assert home is not None
        self.hear(LogRead(number, why_not=f"it is on {home.name}, which does not answer"))

    def _forget(self) -> None:
        before_s = self._loop.time() - FORGET_S
        for number, asker in tuple(self._askers.items()):
            if asker.asked_s < before_s:
                asker.stop()
                del self._askers[number], self._numbers[asker.node, asker.number]


def _lost(home: RankHome | None) -> str:
    where = "a node" if home is None else home.name
    return f"it is on {where}, which is lost"
