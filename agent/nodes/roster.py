"""Who takes part in a job: the nodes in order, and the rules by which they get there. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from agent.nodes.messages import ANY_RANK, AskedSize, Join, LivingRanks, SurvivedStep
from agent.nodes.run_messages import NodeFacts
from agent.seat.records import NO_TERM, NodeShare
from agent.seat.rights import SuccessorRight
from agent.spec.spent_budget import SpentBudget
from agent.text.wording import LISTED

_MOST_WORKERS = 1 << 16  # of one node: more is nonsense
_MOST_PORT = (1 << 16) - 1
_MOST_CHARS = 255  # of a host's name and of the like


class OwnNode(NamedTuple):
    """The node of this process."""

    node_rank: int  # ANY_RANK: not given
    nproc: int
    host: str
    pid: int
    run_id: str
    record_id: str
    version: str  # of msrun
    torch: str = ""
    address: str = ""  # at which others reach it; empty: not known
    is_spare: bool = False  # it wants no place before another node is lost
    door: int = 0  # the port at which it listens if it has to take node 0's part; 0: it does not
    survived: SurvivedStep | None = None  # it was a node of this job before node 0 was lost
    program: str = ""  # a digest of what its ranks run
    name: str = ""  # of its worker, which was started by hand; empty: it has none
    living: LivingRanks | None = None  # its ranks train
    resumes: bool = False  # it was told to go on from a checkpoint
    size: AskedSize | None = None  # of the job, as its line says
    spent: SpentBudget = SpentBudget()  # by the job that it was in
    place: int = -1  # among nodes without a rank, as their engine has numbered them; -1: not known


class WantedNodes(NamedTuple):
    """When a job is complete."""

    nnodes: int
    world: int | None = None  # complete with so many workers, however many nodes they are on
    has_sparse_ranks: bool = False  # of node ranks only the order counts, numbers may be left out
    least: int = 0  # nodes with which it may begin; 0: all
    last_call_s: float = 0.0  # that so many wait for more
    expected: int = 0  # nodes that are known to come: with these it begins at once; 0: all


class Roster:
    """The nodes of a job in the order of their ranks. Workers are numbered through them."""

    def __init__(self, nodes: tuple[NodeFacts, ...]) -> None:
        """``nodes``: at least one; the rank of each is its place."""
        self.nodes = nodes
        self._ends = tuple(accumulate(node.nproc for node in nodes))

    @property
    def world_size(self) -> int:
        """All workers of the job."""
        return self._ends[-1]

    def first_rank(self, node: int) -> int:
        """The lowest rank of a node."""
        return self._ends[node] - self.nodes[node].nproc

    def ranks(self, node: int) -> range:
        """The ranks of a node."""
        return range(self.first_rank(node), self._ends[node])


class NodeZeroBackError(Exception):
    """Somebody listens where node 0 did: the nodes are to meet there."""


class Doors(NamedTuple):
    """What came of knocking at the doors of a job's nodes, by their ranks."""

    gone: frozenset[int] = frozenset()  # nobody listens: the msrun there has ended
    silent: frozenset[int] = frozenset()  # nothing is heard for as long as a line may be silent
    open: frozenset[int] = frozenset()  # somebody listens


class Survivors:
    """Whether the nodes that have lost node 0 may begin the job anew without it. Pure.

    A node that is gone does not count any more. One that does not answer may live, and go on with
    others; so more than half of those that may live have to be here, and no other half can. Half of
    them is enough if a store says so.
    """

    def __init__(self, nodes: int, job: str, right: SuccessorRight | None = None) -> None:
        """Nobody is here yet.

        Args:
            nodes: how many the job had, node 0 included.
            job: its id.
            right: by a store; ``None``: there is none.
        """
        self._nodes = nodes
        self.job = job
        self.right = right or SuccessorRight(NO_TERM)
        self.haunted: set[int] = set()
        """Of those that are here: nodes in the places of silent ones. If these live they count."""

    def standing(self, here: set[int], doors: Doors) -> NodeShare:
        """How many of those that may live these are. ``here``: the ranks that they had."""
        return NodeShare.of(len(here - self.haunted), self._nodes - len(doors.gone - here))

    def may_begin(self, here: set[int], doors: Doors) -> bool:
        """Whether these are enough."""
        return self.right.may_go_on(self.standing(here, doors))

    def why_not(self, here: set[int], doors: Doors) -> str:
        """Why these are not enough, as a clause; empty: they are."""
        if self.may_begin(here, doors):
            return ""
        if why := self.right.why_not(self.standing(here, doors)):
            return why
        away = sorted(set(range(self._nodes)) - here - doors.gone)
        who = f"node{'' if len(away) == 1 else 's'} {', '.join(_cut([str(each) for each in away]))}"
        be = "has not come and may be" if len(away) == 1 else "have not come and may be"
        return f"{who} {be} alive: to begin without takes more than half of the nodes"

    def take_others(self, here: set[int], doors: Doors) -> bool:
        """Whether places are given to nodes that were not in the job: nobody else will come."""
        away = here | doors.gone | doors.silent
        return self.may_begin(here, doors) and len(away) >= self._nodes

    def awaited(self, here: set[int]) -> set[int]:
        """The nodes whose doors are to be knocked at."""
        return set(range(self._nodes)) - here


class NodeKey(NamedTuple):
    """One msrun process, however often it connects."""

    address: str
    host: str
    pid: int
    record_id: str


def key_of(join: Join, address: str) -> NodeKey:
    """The process that said ``join`` from ``address``."""
    return NodeKey(address, join.host, join.pid, join.record_id)


class _Member(NamedTuple):
    """A node that has joined."""

    join: Join
    address: str

    @property
    def who(self) -> str:
        return named(self.join.host, self.address)


class Gathering:
    """The nodes that have come, on the node that waits for them.

    That one is node 0 unless its rank is given. A given rank is kept; the others get the free ones
    in the order of their names, if they have any, then of their engine's numbers, then of their
    addresses, then of their process ids: the same nodes get the same ranks whoever comes first.
    Nodes may have different numbers of workers.
    """

    def __init__(self, own: OwnNode, wanted: WantedNodes) -> None:
        self._own = own
        self._wanted = wanted
        rank = own.node_rank if own.node_rank != ANY_RANK else 0
        join = Join(
            own.run_id,
            own.record_id,
            rank,
            own.nproc,
            own.host,
            own.pid,
            own.version,
            own.torch,
            nonce="",
            proof="",
            door=own.door,
            survived=own.survived,
            name=own.name,
        )
        self.own_key = key_of(join, own.address)
        self._members = {self.own_key: _Member(join, own.address)}
        self._workers = own.nproc

    def add(self, join: Join, address: str) -> str | None:
        """Take a node in; the answer is why it cannot take part, or ``None``.

        A process that joins once more takes its own seat again.
        """
        key, new = key_of(join, address), _Member(join, address)
        others = [each for one, each in self._members.items() if one != key]
        if why := self._why_not(new, others):
            return why
        self.remove(key)
        self._members[key] = new
        self._workers += join.nproc
        return None

    def remove(self, key: NodeKey) -> None:
        """A node has gone before the job began: its seat is free."""
        member = self._members.pop(key, None)
        self._workers -= member.join.nproc if member else 0

    @property
    def is_complete(self) -> bool:
        """Whether the job can begin."""
        if self._wanted.world is None:
            return len(self._members) >= (self._wanted.expected or self._wanted.nnodes)
        return self._workers == self._wanted.world and self._are_alike

    @property
    def is_enough(self) -> bool:
        """Whether the job may begin if nobody else comes."""
        return 0 < self._wanted.least <= len(self._members)

    def has_enough_without(self, join: Join) -> bool:
        """Whether a job that takes in what comes has as many nodes as it can have."""
        here, most = len(self._members), self._wanted.nnodes
        if not self._wanted.least or here < most:
            return False
        is_back = any(one == key_of(join, one.address) for one in self._members)
        return here - is_back >= most

    def missing(self) -> str:
        """Who is here and who is not, as a clause."""
        members = self._by_rank()
        here = ", ".join(_cut([each.join.name or each.join.host for each in members]))
        count = len(members)
        be = "is" if count == 1 else "are"
        if self._wanted.world is not None:
            come = f"{self._workers} of {self._wanted.world} workers are here"
            if not self._own.nproc:
                of_workers = [each.join.name or each.join.host for each in members[1:]]
                return f"{come} ({', '.join(_cut(of_workers)) or 'none'})"
            return f"{come}, on {count} node{'' if count == 1 else 's'} ({here})"
        many = f"{self._wanted.least} to " * bool(self._wanted.least) + str(self._wanted.nnodes)
        text = f"{count} of {many} nodes {be} here ({here})"
        if self._wanted.least:
            return text
        absent = self._absent()
        if any(each.join.node_rank == ANY_RANK for each in self._members.values()) or not absent:
            return text  # who came may yet get any of the free ranks
        numbers = ", ".join(_cut([str(rank) for rank in absent]))
        one = len(absent) == 1
        return f"{text}; node rank{'' if one else 's'} {numbers} {'is' if one else 'are'} missing"

    def roster(self, own_address: str = "") -> Roster:
        """The nodes in order. ``own_address``: of the node that gathers, if it knew none."""
        found: list[NodeFacts] = []
        for rank, each in enumerate(self._by_rank()):
            join, address = each.join, each.address or own_address
            facts = NodeFacts(
                rank, join.host, address, join.nproc, join.pid, join.torch, join.door, join.name
            )
            living = join.living
            first = local_rank(found, facts) if living is None else living.local_first
            found.append(facts._replace(local_first=first))
        return Roster(tuple(found))

    @property
    def is_mixed(self) -> bool:
        """Whether all are here, and some ranks train, and others have to be started."""
        return self._workers == self._wanted.world and not self._are_alike

    @property
    def _are_alike(self) -> bool:
        """Whether the ranks of all nodes train together, or none does."""
        living = [each.join.living for each in self._members.values() if each.join.nproc]
        return len({each and (each.job, each.attempt) for each in living}) == 1

    def past(self) -> SurvivedStep | LivingRanks | None:
        """Where the job goes on, as nodes say that were in it; ``None``: it begins.

        It must be complete.
        """
        living = [each.join.living for each in self._members.values() if each.join.living]
        if living:  # one that came late does not know what the attempt has resumed from
            return max(living, key=lambda each: (each.attempt_resume, len(each.lineage)))
        told = [each.join.survived for each in self._members.values() if each.join.survived]
        if not told:
            return None
        newest = max(told, key=lambda each: (each.step, bool(each.path)))
        return newest._replace(reached=max(each.reached for each in told))

    def survivors(self) -> set[int]:
        """The ranks that nodes which are here had before node 0 was lost."""
        own = self._own.survived
        told = [each.join.survived for each in self._members.values()]
        return _present([each for each in told if each and own and each.job == own.job])

    def haunted(self) -> set[int]:
        """Those of them that are in the places of silent nodes."""
        told = [each.join.survived for each in self._members.values()]
        return {each.node_rank for each in told if each and each.is_haunted}

    def why_too_few(self) -> str:
        """Why fewer nodes than the job wants may not go on, as a clause; empty: they may.

        They have lost node 0, and this one is in its place: it was started again. Of those that
        have not come more than half may have begun without it.
        """
        told = (each.join.survived for each in self._members.values())
        jobs: dict[str, list[SurvivedStep]] = {}
        for survived in filter(None, told):
            jobs.setdefault(survived.job, []).append(survived)
        for told_by in jobs.values():
            here, others = _present(told_by), told_by[0].nodes - 1
            if 2 * len(here) <= others:
                return (
                    f"{len(here)} of the {others} other nodes have come that were in the job: more "
                    "than half of them may go on elsewhere"
                )
        return ""

    def node_ranks(self) -> dict[NodeKey, int]:
        """The rank of each node in that roster."""
        return {key_of(*each): rank for rank, each in enumerate(self._by_rank())}

    def _why_not(self, new: _Member, others: list[_Member]) -> str | None:
        join, nnodes, world = new.join, self._wanted.nnodes, self._wanted.world
        if why := self._why_of_another_job(new) or self._why_of_another_size(new):
            return why
        # a controller without workers is a node more
        if join.node_rank >= (nnodes if world is None else world + (not self._own.nproc)):
            many = f"{nnodes} nodes" if world is None else f"{world} workers"
            return f"{new.who} has node rank {join.node_rank}, but the job has {many}"
        for each in others:
            if join.name and join.name == each.join.name:
                return why_same_name(join.name, new.who, each.who)
            if join.node_rank == each.join.node_rank != ANY_RANK:
                return (
                    f"{new.who} and {each.who} both have node rank {join.node_rank}: "
                    "give each node its own --node-rank"
                )
        if world is None:
            if len(others) >= nnodes:
                here = ", ".join(_cut([each.who for each in others]))
                return (
                    f"{new.who} is one too many: the job has {nnodes} nodes, all are here ({here})"
                )
            return None
        workers = sum(each.join.nproc for each in others) + join.nproc
        if workers > world:
            return (
                f"with the {join.nproc} of {new.who} there are {workers} workers, "
                f"but the job has {world}"
            )
        given = [each.join.node_rank for each in (new, *others)]
        if workers == world and max(given) >= len(given) and not self._wanted.has_sparse_ranks:
            return (
                f"with {new.who} all {world} workers are here, on {len(given)} nodes, but one of "
                f"these has node rank {max(given)}: number the nodes from 0 without a gap"
            )
        return None

    def _why_of_another_job(self, new: _Member) -> str | None:
        join = new.join
        if join.version != self._own.version:
            return why_other_version(new.who, join.version, self._own.version)
        if _is_of_another_job(join.survived, self._own):
            return of_another_program(new.who)
        if join.living is not None and join.living.program != self._own.program:
            return of_another_program(new.who)
        if join.living is not None and join.living.world != self._wanted.world:
            return (
                f"{new.who} takes part in a job of {join.living.world} workers, "
                f"this one has {self._wanted.world}"
            )
        goes_on = self._own.resumes or self._own.survived or join.survived or join.living
        if join.resumes and not (goes_on or join.is_spare):
            return f"{new.who} is to resume, but node 0 begins anew: give it --resume, too"
        if join.run_id != self._own.run_id:
            return why_other_job(new.who, join.run_id, self._own.run_id, "waits")
        return None

    def _why_of_another_size(self, new: _Member) -> str | None:
        """Nodes whose lines disagree would train with whatever node 0 takes for right."""
        told, wanted = new.join.size, self._wanted
        if told is None or new.join.is_spare or bool(told.world) != (wanted.world is not None):
            return None  # one counts nodes, the other one workers
        if wanted.world is not None:
            its, ours, what = str(told.world), str(wanted.world), "workers"
        else:
            its, ours, what = (
                _range(told.least, told.nnodes),
                _range(wanted.least, wanted.nnodes),
                "nodes",
            )
        if its == ours:
            return None
        return (
            f"{new.who} was started for {its} {what}, node 0 for {ours}: give all the same number"
        )

    def _absent(self) -> list[int]:
        taken = {each.join.node_rank for each in self._members.values()}
        return [rank for rank in range(self._wanted.nnodes) if rank not in taken]

    def _by_rank(self) -> list[_Member]:
        """Members in the order of the ranks that they have or, of those here, would get."""
        given = {
            each.join.node_rank: each
            for each in self._members.values()
            if each.join.node_rank != ANY_RANK
        }
        free = iter(
            sorted(
                (each for each in self._members.values() if each.join.node_rank == ANY_RANK),
                key=lambda each: (
                    not each.join.name,
                    natural(each.join.name),
                    each.join.place < 0,
                    each.join.place,
                    natural(each.address),
                    each.join.pid,
                ),
            )
        )
        return list(_seated(given, free))


class Admission:
    """Who gets a place while nodes gather, and when they may begin.

    Nodes that have lost node 0 come before all others, and begin without these only if they are
    enough.
    """

    def __init__(self, gathering: Gathering, survivors: Survivors | None) -> None:
        """``survivors``: of the job that is gathered again; ``None``: it has not lost node 0."""
        self._gathering = gathering
        self._survivors = survivors
        self.doors = Doors()
        """What is known of the nodes that are missing."""

    @property
    def why_not(self) -> str:
        """Why the nodes that have lost node 0 are not enough; empty: they are, or have not."""
        if self._survivors is None:
            is_whole = self._gathering.is_complete
            return "" if is_whole else self._gathering.why_too_few()
        return self._survivors.why_not(self._gathering.survivors(), self.doors)

    @property
    def is_complete(self) -> bool:
        """Whether the job begins."""
        return self._gathering.is_complete and not self.why_not

    @property
    def is_enough(self) -> bool:
        """Whether it may, if nobody else comes."""
        return self._gathering.is_enough and not self.why_not

    def awaited(self) -> set[int]:
        """The nodes of the job before at whose doors is to be knocked."""
        if self._survivors is None:
            return set()
        self._survivors.haunted = self._gathering.haunted()
        return self._survivors.awaited(self._gathering.survivors())

    def is_wanted(self, join: Join) -> bool:
        """Whether a node may have a place yet.

        A job begins without those that are spare, and without one more than it can have.
        """
        if self._survivors is None:
            return not (join.is_spare or self._gathering.has_enough_without(join))
        if join.survived is not None and join.survived.job == self._survivors.job:
            return True
        return self._survivors.take_others(self._gathering.survivors(), self.doors)


def local_rank(others: Iterable[NodeFacts], new: NodeFacts) -> int:
    """The first local rank of a node that others on its machine leave, if they are nodes as well.

    Each has as many workers, of which one follows the other.
    """
    where = new.host, new.address
    there = [each for each in others if (each.host, each.address) == where and each.nproc]
    taken = {each.local_first for each in there}
    firsts = range(0, new.nproc * (len(there) + 1), max(new.nproc, 1))
    return next((first for first in firsts if first not in taken), 0)


def _present(told: list[SurvivedStep]) -> set[int]:
    """The ranks of those nodes that had places when their job lost node 0.

    One that was taken for lost before does not know of the attempts since, in which another node
    has its place.
    """
    newest = max((each.attempt for each in told), default=0)
    return {each.node_rank for each in told if each.attempt == newest}


def _is_of_another_job(survived: SurvivedStep | None, own: OwnNode) -> bool:
    """Whether a node goes on with a job that is not the one that is gathered here."""
    if survived is None or (own.survived is not None and own.survived.job == survived.job):
        return False
    return survived.program != own.program


def _seated(given: dict[int, _Member], free: Iterator[_Member]) -> Iterator[_Member]:
    for rank in range(max(given, default=-1) + 1):
        if member := given.get(rank) or next(free, None):
            yield member
    yield from free


def _range(least: int, most: int) -> str:
    return f"{least}:{most}" if least else str(most)


def named(host: str, address: str) -> str:
    """A node as text: ``mn1 (10.77.0.2)``."""
    return f"{host} ({address})" if address and address != host else host


def of_another_program(who: str) -> str:
    """One sentence about a node that has lost node 0 of a job, which is not the one here."""
    return f"{who} goes on with a job that runs another script or has other arguments"


def why_same_name(name: str, *who: str) -> str:
    """One sentence about two workers of one name."""
    return (
        f"{' and '.join(who)} both have a worker that is named {name!r}: "
        "give each its own MS_NODE_ID"
    )


def why_other_job(who: str, its: str, ours: str, does: str) -> str:
    """One sentence about a node of a job with another id. ``does``: what the one here does."""
    other = f"belongs to the job {its!r}" if its else "names no job"
    mine = repr(ours) if ours else "one without a name"
    return (
        f"{who} {other}, but {mine} {does} here: "
        "give another --master-port, or the same --rdzv-id on all nodes"
    )


def why_other_version(who: str, its: str, ours: str) -> str:
    """One sentence about a node with another msrun."""
    return f"{who} runs msrun {its}, the others {ours}: install the same version on all nodes"


def is_plausible(join: Join) -> bool:
    """Whether its numbers and names can be those of a node, and can be shown to people."""
    texts = (join.run_id, join.record_id, join.host, join.version, join.torch, join.name)
    return (
        min(join.node_rank, join.place) >= ANY_RANK
        and 0 < join.nproc <= _MOST_WORKERS
        and join.pid > 0
        and 0 <= join.door <= _MOST_PORT
        and all(len(text) <= _MOST_CHARS and text.isprintable() for text in texts)
        and bool(join.host)
        and join.spent.is_plausible
    )


def natural(address: str) -> tuple[object, ...]:
    """Sorts addresses by their numbers, before names; and ``node2`` before ``node10``."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        words = re.split(r"(\d+)", address)  # every second one is a number
        return (1, tuple((int(each), "") if at % 2 else (0, each) for at, each in enumerate(words)))
    return (0, number.version, int(number))


def _cut(words: list[str]) -> list[str]:
    return words if len(words) <= LISTED else [*words[:LISTED], "..."]
