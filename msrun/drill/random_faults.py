"""Random drills: their number and kinds, drawn once the number of steps is known."""

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
        "double": {},  # another rank dies in the same step
        "again": {},  # some rank dies in the next attempt, before or in the same step
        "hang": {"number": signal.SIGSTOP},  # forever
        "raise": {"deed": Deed.RAISE, "number": 0},
        "stop": {"deed": Deed.STOP, "number": signal.SIGSTOP},
        "graceful": {"rank": LAUNCHER, "deed": Deed.REQUEST, "number": signal.SIGTERM},
        "preempt": {"rank": LAUNCHER, "deed": Deed.PREEMPT, "number": signal.SIGTERM},
    }
)
KILLS = ("kill",)


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
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise UsageError(
            f"{unknown[0]!r} is an unknown kind of random drill, choose from {', '.join(_KINDS)}"
        )
    return kinds


def draw(lots: RandomFaults, world_size: int, steps: int) -> tuple[tuple[Fault, ...], ...]:
    """The faults of each drill: any rank, any step but the last, any fraction of it.

    The last step is left out: a late moment of it may be after the end of training.
    """
    chance = random.Random(lots.seed)  # noqa: S311  it must be reproducible
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
        return (fault,)  # so that a seed draws the same as in earlier versions
    kind = chance.choice(kinds)
    fault = fault._replace(**_KINDS[kind])
    other = fault._replace(delay=round(chance.random(), 3))
    match kind:
        case "double" if world_size > 1:
            shift = chance.randrange(1, world_size)
            return fault, other._replace(rank=(fault.rank + shift) % world_size)
        case "hang":  # ranks are not watched before the first commit
            return (fault._replace(step=max(2, fault.step)),)
        case "again":
            return fault, other._replace(rank=chance.randrange(world_size), attempt=1)
    return (fault,)
