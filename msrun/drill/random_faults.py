"""Random drills: their number and kinds, drawn once the number of steps is known.

And the faults of a marathon, which strike one job, so that their steps are counted from one to the
next. What msrun does not promise to survive is not drawn: that of msrun and a rank at once
(docs/user-guide/protecting-state.md), and a hang where msrun does not look for hangs
(docs/user-guide/failures.md); the death of all ranks at once only if it is asked for.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from agent.spec.job_spec import UsageError
from agent.text.ranges import format_ranges
from msrun.trials.node_fault import AnyFault, NodeDeed, NodeFault
from worker_hooks.drill.plan import LAUNCHER, Deed, Fault, Moment

_KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "kill": {},
        "double": {},  # another rank dies in the same step
        "all": {},  # at one moment
        "again": {},  # some rank dies in the next attempt, before or in the same step
        "hang": {"number": signal.SIGSTOP},  # forever
        "raise": {"deed": Deed.RAISE, "number": 0},
        "stop": {"deed": Deed.STOP, "number": signal.SIGSTOP},
        "graceful": {"rank": LAUNCHER, "deed": Deed.REQUEST, "number": signal.SIGTERM},
        "preempt": {"rank": LAUNCHER, "deed": Deed.PREEMPT, "number": signal.SIGTERM},
    }
)
KILLS = ("kill",)
_NODE_KINDS: Mapping[str, NodeDeed] = MappingProxyType(
    {
        "node": NodeDeed.KILL,
        "poweroff": NodeDeed.POWEROFF,
        "cut": NodeDeed.CUT,
        "away": NodeDeed.CUT,  # for so long that the node counts as lost
        "msrun": NodeDeed.KILL_MSRUN,  # of any node, the controller's included
    }
)
_PAIR = "pair"  # two nodes, or a node and a rank of another one, in the same step
_OF_JOB: Mapping[str, NodeDeed] = MappingProxyType(
    {"graceful": NodeDeed.REQUEST, "preempt": NodeDeed.PREEMPT}
)
ON_NODES = ("kill", *_NODE_KINDS, _PAIR, *_OF_JOB)
_CUTS_S: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"cut": (0.5, 8.0), "away": (12.0, 30.0)}
)
_SHARED = 3  # the first step in which all ranks have surely committed one


class RandomFaults(NamedTuple):
    """Drills of random ranks at random moments; equal values draw equal drills."""

    number: int
    seed: int
    kinds: tuple[str, ...] = KILLS


def read_kinds(text: str) -> tuple[str, ...]:
    """Kinds of random drills: ``kill,graceful``. A kind named twice is drawn twice as often.

    Raises:
        UsageError: a kind is unknown.
    """
    kinds = tuple(word.strip() for word in text.split(","))
    known = (*_KINDS, *_NODE_KINDS, _PAIR)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UsageError(
            f"{unknown[0]!r} is an unknown kind of random drill, choose from {', '.join(known)}"
        )
    return kinds


def check_kinds(kinds: Sequence[str], nodes: int) -> None:
    """Refuse kinds of random drills that a job on so many nodes cannot have.

    Raises:
        UsageError: it names the kind.
    """
    for kind in kinds:
        if nodes == 1 and (kind in _NODE_KINDS or kind == _PAIR):
            raise UsageError(f"random drills of the kind {kind} need several nodes: give --nodes")


def draw(
    lots: RandomFaults, world_size: int, steps: int, nodes: int = 1, *, has_shadows: bool = False
) -> tuple[tuple[AnyFault, ...], ...]:
    """The faults of each drill: any rank or node, any step but the last, any fraction of it.

    The last step is left out: a late moment of it may be after the end of training. With shadows
    the first steps are left out, too: a rank that dies before all have a shadow begins anew.
    """
    chance = random.Random(lots.seed)  # noqa: S311  it must be reproducible
    drawn = [_draw(chance, lots.kinds, world_size, steps, nodes) for _ in range(lots.number)]
    if not has_shadows:
        return tuple(drawn)
    return tuple(
        tuple(each._replace(step=max(_SHARED, each.step)) for each in faults) for faults in drawn
    )


def _draw(
    chance: random.Random, kinds: tuple[str, ...], world_size: int, steps: int, nodes: int
) -> tuple[AnyFault, ...]:
    fault = Fault(
        rank=chance.randrange(world_size),
        step=chance.randint(1, max(1, steps - 1)),
        delay=round(chance.random(), 3),
    )
    if kinds == KILLS:
        return (fault,)  # so that a seed draws the same as in earlier versions
    kind = chance.choice(kinds)
    if nodes > 1 and (kind in _NODE_KINDS or kind in _OF_JOB or kind == _PAIR):
        return _draw_on_nodes(chance, kind, fault, world_size, nodes)
    fault = fault._replace(**_KINDS[kind])
    other = fault._replace(delay=round(chance.random(), 3))
    match kind:
        case "double" if world_size > 1:
            shift = chance.randrange(1, world_size)
            return fault, other._replace(rank=(fault.rank + shift) % world_size)
        case "all":
            step = max(_SHARED, fault.step)
            return tuple(fault._replace(rank=rank, step=step) for rank in range(world_size))
        case "hang":  # ranks are not watched before the first commit
            return (fault._replace(step=max(2, fault.step)),)
        case "again":
            return fault, other._replace(rank=chance.randrange(world_size), attempt=1)
    return (fault,)


def _draw_on_nodes(
    chance: random.Random, kind: str, fault: Fault, world_size: int, nodes: int
) -> tuple[AnyFault, ...]:
    """``fault``: of a rank, at the moment that was drawn."""
    step = max(_SHARED, fault.step)  # before, nobody knows what ranks share
    if kind == _PAIR:
        # not node 0: what its ranks alone have lies on the next node, and would be lost with it
        node, deed = chance.randrange(1, nodes), chance.choice((NodeDeed.KILL, NodeDeed.KILL_MSRUN))
        first = NodeFault(node, step, deed, fault.delay)
        others = [each for each in range(1, nodes) if each != node]
        if others and chance.random() < 0.5:  # noqa: PLR2004
            again = NodeFault(chance.choice(others), step, delay=round(chance.random(), 3))
            return first, again
        rank = chance.randrange(max(1, world_size // nodes))  # of node 0
        return fault._replace(rank=rank, step=step), first
    node = chance.randrange(nodes)
    if kind in _OF_JOB:
        return (NodeFault(node, step, _OF_JOB[kind], fault.delay),)
    for_s = round(chance.uniform(*_CUTS_S.get(kind, (8.0, 8.0))), 1)
    return (NodeFault(node, step, _NODE_KINDS[kind], fault.delay, for_s),)


class MarathonFault(NamedTuple):
    """One fault of a marathon."""

    kind: str
    ranks: tuple[int, ...] = ()  # those that it strikes; empty: a process of msrun's
    gap: int = 1  # steps that every rank makes before it
    delay: float = 0.0  # and a fraction of one more
    moment: Moment = Moment.ANY  # in a step, of a fault that strikes from inside
    after_s: float = 0.0  # of a second fault, from the first; of a newcomer's death, from its start
    for_s: float = 0.0  # length of a stop

    @property
    def words(self) -> str:
        """As text: ``several ranks killed: 0,2-3``."""
        what = MARATHON_KINDS[self.kind].words
        if not self.ranks:
            return what
        return f"{what}: {format_ranges(tuple(sorted(self.ranks)))}"


class MarathonKind(NamedTuple):
    """What one kind of fault of a marathon does."""

    words: str
    weight: int  # how often it is drawn
    deed: Deed | None = None  # of a fault that its rank injects from inside; None: from outside
    on_ranks: bool = True
    loses_rank: bool = True  # a rank that it strikes must be replaced
    ends_msrun: bool = False


MARATHON_KINDS: Mapping[str, MarathonKind] = MappingProxyType(
    {
        "rank": MarathonKind("rank killed", 22),
        "several": MarathonKind("several ranks killed", 8),
        "all_but_one": MarathonKind("all ranks but one killed", 6),
        "newcomer": MarathonKind("rank and its newcomer killed", 8),
        "stopped": MarathonKind("rank stopped", 6),
        "exit_0": MarathonKind("rank left with exit code 0", 6, Deed.EXIT),
        "raise": MarathonKind("exception in rank", 6, Deed.RAISE),
        "held": MarathonKind("interpreter held in rank", 2, Deed.HOLD),
        "paused": MarathonKind("rank paused", 5, loses_rank=False),
        "forkserver": MarathonKind("forkserver killed", 6, on_ranks=False),
        "forkserver_stopped": MarathonKind("forkserver stopped", 3, on_ranks=False),
        "store": MarathonKind("store host killed", 6, on_ranks=False),
        "msrun": MarathonKind("msrun killed", 5, on_ranks=False, ends_msrun=True),
        "msrun_paused": MarathonKind("msrun paused", 3, on_ranks=False),
        "graceful": MarathonKind("graceful exit", 4, on_ranks=False, ends_msrun=True),
    }
)
PAIRS = 0.25  # share of the faults that another one follows
PAIR_S = 0.3  # a second fault follows within this time
PAUSES_S = (0.1, 1.0)
GAP = 8.0  # steps from one fault to the next, on average
_WATCHED = (Moment.FORWARD, Moment.BACKWARD)  # a rank may be idle elsewhere
_MOMENTS = (Moment.DATA, *_WATCHED, Moment.COMMIT)


def draw_marathon(
    number: int, seed: int, world_size: int, gap: float = GAP
) -> Iterator[tuple[MarathonFault, ...]]:
    """``number`` faults in order, alone or in pairs; equal values draw equal faults."""
    chance = random.Random(seed)  # noqa: S311  it must be reproducible
    left = number
    while left > 0:
        first = _draw_one(chance, world_size, gap)
        drawn: tuple[MarathonFault, ...] = (first,)
        if left > 1 and first.kind != "msrun" and chance.random() < PAIRS:
            second = _draw_one(chance, world_size, gap)
            while not _is_promised(first, second, world_size):
                second = _draw_one(chance, world_size, gap)
            after_s = round(chance.uniform(0, PAIR_S), 3)
            drawn = (first, second._replace(gap=0, delay=0.0, after_s=after_s))
        left -= len(drawn)
        yield drawn


def _draw_one(chance: random.Random, world_size: int, gap: float) -> MarathonFault:
    kinds = [kind for kind in MARATHON_KINDS if world_size > 1 or not _is_of_many(kind)]
    weights = [MARATHON_KINDS[kind].weight for kind in kinds]
    (kind,) = chance.choices(kinds, weights)
    count = 1
    if kind == "several":
        count = chance.randint(min(2, world_size - 1), world_size - 1)
    elif kind == "all_but_one":
        count = world_size - 1
    ranks = chance.sample(range(world_size), count) if MARATHON_KINDS[kind].on_ranks else ()
    return MarathonFault(
        kind,
        tuple(ranks),
        gap=chance.randint(1, max(1, round(2 * gap) - 1)),
        delay=round(chance.random(), 3),
        moment=chance.choice(_WATCHED if kind == "held" else _MOMENTS),
        after_s=round(chance.uniform(0, PAIR_S), 3) if kind == "newcomer" else 0.0,
        for_s=round(chance.uniform(*PAUSES_S), 3),
    )


def _is_of_many(kind: str) -> bool:
    """Whether only a job of several ranks survives it."""
    return MARATHON_KINDS[kind].on_ranks and MARATHON_KINDS[kind].loses_rank


def _is_promised(first: MarathonFault, second: MarathonFault, world_size: int) -> bool:
    """Whether msrun promises to survive both at once."""
    kinds = MARATHON_KINDS[first.kind], MARATHON_KINDS[second.kind]
    lost = {
        rank
        for fault, kind in zip((first, second), kinds, strict=True)
        for rank in (fault.ranks if kind.loses_rank else ())
    }
    if all(kind.ends_msrun for kind in kinds):
        return False  # msrun is gone when the second one is due
    if "msrun" in {first.kind, second.kind} and lost:
        return False
    if kinds[0].loses_rank and second.kind == "held":
        return False  # a hang in backward is not found before a newcomer's second commit
    if kinds[0].loses_rank and second.kind == "stopped" and {*first.ranks} & {*second.ranks}:
        return False  # nobody watches a newcomer before it has registered
    return len(lost) < world_size  # somebody has to keep the state
