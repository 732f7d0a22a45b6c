"""torch's pipelines, which find out once what their stages send each other.

In its first step a schedule has its stages tell each other the shapes of what they will send, and
makes room for it. The schedule of a new rank does so, and would wait for ever for stages whose
schedules have done it long ago. So those of the survivors begin anew, together with it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

UNKNOWN = (
    "trains with a schedule of torch.distributed.pipelining that msrun cannot start anew in this "
    "version of torch"
)
_FLAGS = (  # of schedules with one stage on each rank, and with several; torch has no public ones
    ("_stage_forward_initialized", "_stage_backward_initialized"),
    ("_stages_forward_initialized", "_stages_backward_initialized"),
)


def are_there() -> bool:
    """Whether there are any: their stages keep the process group that they were made with."""
    return next(_schedules(), None) is not None


def why_not_anew() -> str:
    """Why :func:`begin_anew` cannot be called, as a clause; empty: it can."""
    return "" if all(map(_flags, _schedules())) else UNKNOWN


def begin_anew() -> None:
    """The next step of each schedule is like its first one.

    Raises:
        RuntimeError: that cannot be, for one that was made since :func:`why_not_anew` was asked.
    """
    for schedule in _schedules():
        if not (flags := _flags(schedule)):
            raise RuntimeError(f"the script {UNKNOWN}")
        for flag in flags:
            setattr(schedule, flag, False)


def _schedules() -> Iterator[Any]:
    api = sys.modules.get("torch.distributed.pipelining.schedules")
    kind = getattr(api, "_PipelineSchedule", None)
    if kind is not None:
        # by their class: to look into an object may call code of its own
        yield from (each for each in gc.get_objects() if issubclass(type(each), kind))


def _flags(schedule: Any) -> tuple[str, ...]:
    has = vars(schedule)
    stages = has.get("_stages") or [has.get("_stage")]
    if any(hasattr(each, "inputs_meta") for each in stages):
        return ()  # older ones keep what the first step has found
    return next((flags for flags in _FLAGS if all(each in has for each in flags)), ())
