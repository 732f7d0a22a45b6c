"""What the failures of a job cost, in one sentence. Pure."""

from __future__ import annotations

import math

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.text.wording import duration


def percent(share: float) -> str:
    """``98.7 %``; rounded down, so that 100 % is all of it."""
    return f"{math.floor(round(1000 * share, 6)) / 10:.1f} %"


def summary(account: Account, job: Job) -> str:
    """What to say at the end of a job; empty: nothing happened, or the report says all of it."""
    before = account.before
    answers = [
        _counted(job.replaced_in_all, "rank", "replaced", before.replaced),
        _counted(job.restarts, "restart", "", before.restarts),
    ]
    done = ", ".join(filter(None, answers))
    share = account.goodput
    if not account.incidents or (share is None and not done):
        return ""
    wall = duration(account.wall_s)
    if share is None:
        return f"{done} in {wall}; what was lost is not known without a TrainState in every rank"
    cost = lost(account.lost_s, account.lost_steps)
    return f"training was {percent(share)} of {wall}: {', '.join(filter(None, (done, cost)))}"


def lost(seconds: float | None, steps: int | None) -> str:
    """What failures cost, as text; ``None``: not known."""
    known_s = "unknown time" if seconds is None else f"{seconds:.1f} s"
    if steps is None:
        return f"{known_s} lost, and steps that are not saved"
    return f"{steps} step{'' if steps == 1 else 's'} and {known_s} lost"


def _counted(count: int, noun: str, done: str, before: int) -> str:
    """``before``: how many of them were earlier than the time that is told of."""
    earlier = f" ({before} before that)" if before else ""
    said = f"{count} {noun}{'' if count == 1 else 's'} {done}".rstrip()
    return f"{said}{earlier}" if count else ""
