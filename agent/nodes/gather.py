"""The node of the controller waits here for the others, before anything of the job starts."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from agent.nodes.guest import ANSWER_S, WRONG, Guest, StrangerError
from agent.nodes.line import LIMIT_S, Line, bytes_of, plain_address, set_options
from agent.nodes.messages import (
    AGAIN,
    Admitted,
    AwaitedNodes,
    Begin,
    Join,
    LivingRanks,
    Newer,
    Refused,
    SeekNewer,
    StopGathering,
    SurvivedStep,
)
from agent.nodes.roster import (
    Admission,
    Doors,
    Gathering,
    NodeKey,
    NodeZeroBackError,
    OwnNode,
    Roster,
    Survivors,
    WantedNodes,
    key_of,
    named,
)
from agent.nodes.tls import PLAIN, Security
from agent.spec.job_spec import LeftEarlyError, StoppedEarlyError, UsageError
from agent.spec.spent_budget import SpentBudget, newer_of
from agent.text.wording import duration

FIRST_WORD_S = 2.0  # until people hear that nodes are missing
NEXT_WORD_S = 10.0
MOST_UNKNOWN = 256  # guests that still have to say who they are
PATIENCE_S = 1.0  # that a guest has in any case, however many others knock
MOST_REFUSALS = 8  # that people hear of
RETRY_S = 0.2  # after descriptors ran out
SEEK_S = 30.0  # for nodes to say what they have saved: a disk may be slow
KNOCK_S = 0.5  # between two looks at what came of knocking
MIXED = "another worker has no rank any more, so all of them start again from the same step"
MISSING = 1  # the exit code of every node if some never came

Progress = Callable[[str], object]
Past = SurvivedStep | LivingRanks | None
"""Where the job goes on; ``None``: it begins."""

Settings = Callable[[Roster, Past, SpentBudget], dict[str, object]]


class MissingNodesError(Exception):
    """The job cannot begin: one sentence that names who came and who is missing."""


class Succession(NamedTuple):
    """How this node takes the part of node 0, which is lost."""

    survivors: Survivors
    knock: Callable[[set[int]], Doors]  # at the doors of these nodes; raises NodeZeroBackError


class KeptNewer(NamedTuple):
    """A node that waits has a newer checkpoint than the one that node 0 is to resume from."""

    host: str
    address: str
    newer: Newer


class Resuming(NamedTuple):
    """The job resumes, and perhaps not from what node 0 has found on its disk."""

    asks: SeekNewer
    found: Callable[[list[KeptNewer]], object]  # takes what other nodes have, if they have any


class GatheredNodes(NamedTuple):
    """The nodes that have met; each knows that all are here."""

    roster: Roster
    node_rank: int  # of this node
    lines: dict[int, Line]  # node rank -> the connection to it, without this node's
    strangers: int  # how many connections were none of the job's


def gather(
    listener: socket.socket,
    own: OwnNode,
    wanted: WantedNodes,
    token: bytes,
    timeout_s: float | None,
    progress: Progress,
    settings: Settings,
    limit_s: float = LIMIT_S,
    security: Security = PLAIN,
    succession: Succession | None = None,
    shows: Progress = lambda _: None,
    resuming: Resuming | None = None,
) -> GatheredNodes:
    """Wait until all nodes have joined, and tell them to begin.

    If it fails, by whatever exception, those that wait are told to end.

    Args:
        listener: listens already; it stays the caller's and does not block afterwards.
        own: this node.
        wanted: when the job is complete.
        token: the job's; empty: none.
        timeout_s: how long to wait; ``None``: for ever.
        progress: takes a line for people now and then.
        settings: makes JSON for the other nodes of who is here, and of where the job goes on if
            they were in it before, with what it had used up.
        limit_s: of a line's silence.
        security: of the connections.
        succession: node 0 is lost, and this node takes its part; ``None``: this is node 0.
        shows: takes who is missing now and then; all nodes that wait are told, too.
        resuming: all of them are asked for newer checkpoints before they begin.

    Raises:
        MissingNodesError: not all came in time.
        StoppedEarlyError: a node that waits was asked to end the job.
        NodeZeroBackError: the nodes meet at node 0 after all.
    """
    door = _Door(listener, own, wanted, token, progress, limit_s, security, succession, shows)
    try:
        door.wait(timeout_s)
        while resuming is not None and not door.has_asked(resuming):
            door.wait(timeout_s)
        return door.begin(settings)
    except MissingNodesError as error:
        door.turn_away(Refused(str(error), MISSING))
        raise
    except (LeftEarlyError, NodeZeroBackError):  # those that have joined see the line end
        raise
    except BaseException as error:
        who, code = named(own.host, own.address), MISSING
        why = f"msrun on {who} ended before all nodes were here"
        if isinstance(error, StoppedEarlyError):
            why, code = str(error), error.exit_code
        elif isinstance(error, UsageError):  # what is wrong here is wrong for all
            why, code = f"{who}: {error}", error.exit_code
        door.turn_away(Refused(why, code))
        raise
    finally:
        door.close()


class _Door:
    """The listener, and all who came through it."""

    def __init__(
        self,
        listener: socket.socket,
        own: OwnNode,
        wanted: WantedNodes,
        token: bytes,
        progress: Progress,
        limit_s: float,
        security: Security,
        succession: Succession | None,
        shows: Progress,
    ) -> None:
        self._security = security
        self._shows = shows
        self._listener = listener
        self._own = own
        self._succession = succession
        self._gathering = Gathering(own, wanted)
        survivors = None if succession is None else succession.survivors
        self._admission = Admission(self._gathering, survivors)
        self._token = token
        self._progress = progress
        self._limit_s = limit_s
        self._last_call_s = wanted.last_call_s
        self._newer: dict[Guest, Newer] = {}  # what those have said that were asked
        self._spent = own.spent  # as far as anyone knows that has come
        self._guests: dict[Guest, None] = {}  # who has not joined, those that wait longest first
        self._joined: dict[NodeKey, Guest] = {}
        self._strangers = 0
        self._refusals: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._opens_at: float | None = None  # while nobody is let in
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, timeout_s: float | None) -> None:
        """Let guests in until all nodes are here, or enough of them have waited for the others."""
        begin = time.monotonic()
        end = float("inf") if timeout_s is None else begin + timeout_s
        word = begin + FIRST_WORD_S
        enough_at: float | None = None  # since then there are as many as needed
        while True:
            self._knock()
            now = time.monotonic()
            enough_at = (enough_at or now) if self._admission.is_enough else None
            due = end if enough_at is None else min(end, enough_at + self._last_call_s)
            is_over = enough_at is not None and now >= due
            if self._admission.is_complete or is_over:
                self._turn(0.0)  # has one of them gone meanwhile?
                if self._admission.is_complete or (is_over and self._admission.is_enough):
                    return
                continue
            if now >= due:
                raise MissingNodesError(self._why_late(now - begin))
            if now >= word:
                text = f"waiting for nodes: {self._gathering.missing()}"
                self._show(text)
                if enough_at is not None:
                    text += f"; the job begins without others in {duration(due - now)}"
                if why := self._admission.why_not:
                    text += f"; {why}"
                self._progress(text)
                word = now + NEXT_WORD_S
            self._turn(self._pause_s(now, min(word, due)))

    def has_asked(self, resuming: Resuming) -> bool:
        """Ask all that have joined for newer checkpoints; whether they are all still there then."""
        if self._gathering.past() is not None:  # known by who was in the job
            return True
        asked, until_s = {*self._joined.values()}, time.monotonic() + SEEK_S
        self._newer.clear()
        for guest in asked:
            guest.say(bytes_of(resuming.asks))
        while silent := asked - self._newer.keys():
            if asked != {*self._joined.values()}:
                return False
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            self._turn(left_s)
        for guest in silent:
            who = "" if guest.join is None else named(guest.join.host, guest.address)
            self._progress(f"{who} has not said within {duration(SEEK_S)} what it has saved")
        found = [
            KeptNewer(guest.join.host, guest.address, newer)
            for guest, newer in self._newer.items()
            if newer.step > resuming.asks.step and guest.join is not None
        ]
        if found:
            resuming.found(found)
        return asked == {*self._joined.values()}

    def begin(self, settings: Settings) -> GatheredNodes:
        """Tell every node who takes part; the connections are the caller's from now on."""
        reached_at = [guest.connection.getsockname()[0] for guest in self._joined.values()]
        roster = self._gathering.roster(plain_address(reached_at[0]) if reached_at else "")
        ranks = self._gathering.node_ranks()
        about = settings(roster, self._gathering.past(), self._spent)
        begin = bytes_of(Begin(roster.nodes, about), is_deflated=True)
        for key, guest in self._joined.items():
            guest.say(bytes_of(Admitted(ranks[key], guest.proof(self._token))) + begin)
        lines = {ranks[key]: guest.line() for key, guest in self._joined.items()}
        self._joined.clear()
        return GatheredNodes(roster, ranks[self._gathering.own_key], lines, self._strangers)

    def turn_away(self, refused: Refused) -> None:
        """Tell all who wait that the job does not begin."""
        for guest in self._joined.values():
            guest.refuse(refused)

    def close(self) -> None:
        """Close what is left."""
        self._selector.close()
        for guest in (*self._guests, *self._joined.values()):
            guest.close()

    def _show(self, text: str) -> None:
        """Who asks on another node hears the same."""
        self._shows(text)
        told = bytes_of(AwaitedNodes(text))
        for guest in self._joined.values():
            guest.say(told)

    def _knock(self) -> None:
        """See which of the nodes that are missing may still come."""
        if self._succession is not None:
            self._admission.doors = self._succession.knock(self._admission.awaited())

    def _turn(self, timeout_s: float) -> bool:
        """Wait for something to happen, and see to it; whether there was anything."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._let_in()
            elif key.data.fileno() >= 0:  # not closed by what happened just before
                self._hear(key.data)
        self._tidy()
        return bool(ready)

    def _pause_s(self, now: float, word: float) -> float:
        """Until something has to be done though nothing happens."""
        due = [word]
        if self._succession is not None:
            due.append(now + KNOCK_S)
        if self._opens_at is not None:
            due.append(self._opens_at)
        due += [guest.since + ANSWER_S for guest in islice(self._guests, 1)]
        return max(0.0, min(due) - now)

    def _let_in(self) -> None:
        if len(self._guests) >= MOST_UNKNOWN:
            oldest = next(iter(self._guests))
            if time.monotonic() < oldest.since + PATIENCE_S:
                self._shut(oldest.since + PATIENCE_S)
                return
            self._drop(oldest)
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return  # whoever it was has gone
        except OSError:  # no descriptor is left, or the like
            self._shut(time.monotonic() + RETRY_S)
            return
        try:
            set_options(connection, self._limit_s)
            connection = self._security.accepted(connection)
            guest = Guest(connection, address[0], self._own.version)
            self._selector.register(connection, selectors.EVENT_READ, guest)
        except OSError:
            connection.close()
            return
        self._guests[guest] = None

    def _shut(self, until: float) -> None:
        self._selector.unregister(self._listener)
        self._opens_at = until

    def _hear(self, guest: Guest) -> None:
        try:
            said = guest.hear(self._token)
        except StrangerError:
            self._drop(guest)
            return
        if isinstance(said, Refused):
            self._refuse(guest, said)
        elif isinstance(said, StopGathering):
            self._stop(guest, said)
        elif isinstance(said, Newer):
            self._newer[guest] = said
        elif said is not None:
            self._seat(guest, said)

    def _stop(self, guest: Guest, asked: StopGathering) -> None:
        """Only that node goes if it has nothing to lose, and the others have."""
        is_of_these = guest.join is not None and not guest.join.is_spare
        self._drop(guest)
        if is_of_these and self._succession is None:
            raise StoppedEarlyError(asked.why, asked.signum)

    def _seat(self, guest: Guest, join: Join) -> None:
        if not self._admission.is_wanted(join):  # it dials again
            del self._guests[guest]
            self._forget(guest)
            return
        if why := self._gathering.add(join, guest.address):
            self._refuse(guest, Refused(why, WRONG))
            return
        self._spent = newer_of(self._spent, join.spent.heard(time.monotonic()))
        key = key_of(join, guest.address)
        if earlier := self._joined.pop(key, None):
            self._forget(earlier)  # its process has lost that connection, and made this one
        del self._guests[guest]
        self._joined[key] = guest
        if self._gathering.is_mixed:
            self._turn_back_living()

    def _turn_back_living(self) -> None:
        """Some ranks have to be started: those that train save what they hold, and come again."""
        for key, guest in tuple(self._joined.items()):
            if guest.join is not None and guest.join.living is not None:
                guest.refuse(Refused(MIXED, AGAIN))
                self._gathering.remove(key)
                del self._joined[key]
                self._guests[guest] = None

    def _refuse(self, guest: Guest, refused: Refused) -> None:
        guest.refuse(refused)
        del self._guests[guest]
        self._guests[guest] = None  # the last: its time begins anew
        if (why := refused.why) not in self._refusals and len(self._refusals) < MOST_REFUSALS:
            self._refusals.append(why)
            self._progress(f"a node was refused: {why}")

    def _drop(self, guest: Guest) -> None:
        if guest.join is not None:
            key = key_of(guest.join, guest.address)
            self._gathering.remove(key)
            del self._joined[key]
        else:
            self._strangers += guest.is_unknown
            del self._guests[guest]
        self._forget(guest)

    def _forget(self, guest: Guest) -> None:
        self._selector.unregister(guest.connection)
        guest.close()

    def _tidy(self) -> None:
        """Close guests that had their time, and listen again."""
        now = time.monotonic()
        for guest in [each for each in self._guests if now >= each.since + ANSWER_S]:
            self._drop(guest)
        if self._opens_at is not None and now >= self._opens_at:
            self._opens_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _why_late(self, waited_s: float) -> str:
        why = f"not all nodes came within {duration(waited_s)}: {self._gathering.missing()}"
        if why_not := self._admission.why_not:
            why += f"; {why_not}"
        if self._refusals:
            why += f"; refused was: {self._refusals[-1]}"
        return why
