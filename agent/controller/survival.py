"""What a survivor takes with it into a new attempt. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from agent.controller import events as ev


def renewed(event: ev.Event, attempt: int, survivors: Collection[int]) -> ev.Event:
    """What happened to a survivor before, and was not decided on yet, in the new ``attempt``.

    That it died or cannot be reached, is as true then; all else it said for the old one.
    """
    match event:
        case ev.WorkerExited(rank=rank, attempt=old) | ev.RankUnreachable(rank=rank, attempt=old):
            if rank in survivors and old == attempt - 1:
                return replace(event, attempt=attempt)
        case _:
            pass
    return event
