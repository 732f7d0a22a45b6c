"""Random drills: how many, of which kinds, and drawing them once the number of steps is known."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from agent.spec.job_spec import UsageError
from worker_hooks.drill.plan import LAUNCHER, Deed, Fault

_KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "kill": {},
        "double": {},  # and another rank in the same step
        "again": {},  # and any rank in the next attempt, before or in the same step
        "hang": {"number": signal.SIGSTOP},  # for ever
        "raise": {"deed": Deed.RAISE, "number": 0},
        "stop": {"deed": Deed.STOP, "number": signal.SIGSTOP},
        "graceful": {"rank": LAUNCHER, "deed": Deed.REQUEST, "number": signal.SIGTERM},
        "preempt": {"rank": LAUNCHER, "deed": Deed.PREEMPT, "number": signal.SIGTERM},
    }
)
KILLS = ("kill",)


class RandomFaults(NamedTuple):
    """So many drills at random moments of random ranks; the same words draw the same."""

    number: int
    seed: int
    kinds: tuple[str, ...] = KILLS


def read_kinds(text: str) -> tuple[str, ...]:
    """Kinds of random drills: ``kill,graceful``. One that is named twice is drawn twice as often.

    Raises:
        UsageError: one is unknown.
    """
    kinds = tuple(word.strip() for word in text.split(","))
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise UsageError(
            f"random drills of {unknown[0]!r} are unknown, choose from {', '.join(_KINDS)}"
        )
    return kinds


def draw(lots: RandomFaults, world_size: int, steps: int) -> tuple[tuple[Fault, ...], ...]:
    """The faults of each drill: any rank, any step but the last, any fraction of it.

    The last step is left out: a moment late in it may be after the end of training.
    """
    chance = random.Random(lots.seed)  # noqa: S311  reproducible is what it must be
    return tuple(_draw(chance, lots.kinds, world_size, steps) for _ in range(lots.number))


def _draw(
    chance: random.Random, kinds: tuple[str, ...], world_size: int, steps: int
) -> tuple[Fault, ...]:
    fault = Fault(
        rank=chance.randrange(world_size),
        step=chance.randint(1, max(1, steps - 1)),
        delay=round(chance.random(), 3),
    )
    if kinds == KILLS:
        return (fault,)  # a seed draws what it always drew
    kind = chance.choice(kinds)
    fault = fault._replace(**_KINDS[kind])
    other = fault._replace(delay=round(chance.random(), 3))
    match kind:
        case "double" if world_size > 1:
            shift = chance.randrange(1, world_size)
            return fault, other._replace(rank=(fault.rank + shift) % world_size)
        case "hang":  # nobody is watched before the first commit
            return (fault._replace(step=max(2, fault.step)),)
        case "again":
            return fault, other._replace(rank=chance.randrange(world_size), attempt=1)
    return (fault,)
