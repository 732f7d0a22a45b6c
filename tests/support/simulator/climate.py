"""How bad things are for ranks with hooks in one simulated schedule. Not a test itself."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Climate:
    """How bad things are for ranks with hooks in one schedule: probabilities."""

    hooks: float  # a rank registers its state
    raises: float  # a rank that fails does it with an exception
    chain: float  # a rank dies soon after another one
    gloo: float  # a rank is thrown out of its collective when a peer dies
    apart: float  # a rank has finished a step that its peers have not
    torn: float  # a rank is in the middle of an update, for good
    mute: float  # an order is never answered
    late: float  # an order is answered late, with signs of progress
    cut: float  # a rank's link breaks
    failing: float  # a rank cannot write or digest
    flip: float  # a bit flipped in a replica
    bad: tuple[bool, bool]  # places that cannot be written
    no_commit: float  # a manifest fails, for the place's fault or another
    shaken: float  # something happens to a rank while all come to one step
    last: float  # it is the last step of the training
    astray: float  # a rank stays elsewhere than it was told to
    clumsy: float  # a rank that is to leave fails, or does not
    no_memory: float  # nothing can be written to memory
    hang: float  # a rank does nothing any more
    fixed: str  # why no rank can join another group
    old: str  # what a script that asks by itself to go on finds: nothing, a checkpoint or damage


def climate(rng: Random, seed: int) -> Climate:
    """Most schedules are dominated by one or two kinds of trouble."""
    pick: Any = rng.choice
    return Climate(
        hooks=pick((0.0, 0.8, 1.0, 1.0, 1.0, 1.0)),
        raises=pick((0.0, 0.5, 1.0)),
        chain=pick((0.0, 0.0, 0.0, 0.3, 1.0)),
        gloo=pick((0.0, 0.0, 0.5, 1.0)),
        apart=pick((0.0, 0.0, 0.3)),
        torn=pick((0.0, 0.0, 0.0, 0.3, 1.0)),
        mute=pick((0.0, 0.0, 0.0, 0.2)),
        late=pick((0.0, 0.0, 0.3)),
        cut=pick((0.0, 0.0, 0.0, 0.3)),
        failing=pick((0.0, 0.0, 0.3)),
        flip=pick((0.0, 0.0, 0.3, 0.5)),
        bad=(rng.random() < 0.15, rng.random() < 0.3),
        no_commit=pick((0.0, 0.0, 0.5)),
        shaken=pick((0.0, 0.0, 0.5)),
        last=pick((0.0, 0.0, 0.5)),
        astray=pick((0.0, 0.0, 0.0, 0.1)),
        clumsy=pick((0.0, 0.0, 0.0, 0.3)),
        no_memory=pick((0.0, 0.0, 0.0, 0.3)),
        hang=pick((0.0, 0.0, 0.3)),
        fixed=pick(("", "", "", "", "", "it trains outside run()")),
        old=Random(f"old {seed}").choice((*["nothing"] * 12, "checkpoint", "checkpoint", "damage")),
    )
