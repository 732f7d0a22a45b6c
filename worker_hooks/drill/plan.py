"""What a drill injects: faults, and the plan that carries them to the ranks. Pure data.

The drill puts the plan of a job into ``MSRUN_DRILL``; restarted attempts read the same plan.
"""

from __future__ import annotations

import json
import signal as signals
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.layout import DrillLayout

LAUNCHER = -1
"""In place of a rank: msrun itself. Rank 0 injects this fault."""


class Moment(Enum):
    """Where in a step a fault strikes."""

    DATA = "data"  # right after a commit, while the next batch is loaded
    FORWARD = "forward"
    BACKWARD = "backward"  # as backward begins
    UPDATE = "update"  # inside an optimizer's step
    COMMIT = "commit"  # between the update and its commit
    DUMP = "dump"  # while the rank writes or digests a dump, whatever the step
    ANY = "any"  # at a fraction of a step after a commit, wherever the rank is by then


class Deed(Enum):
    """What a fault does to its process."""

    SIGNAL = "signal"  # sends itself the real signal
    EXIT = "exit"  # os._exit
    RAISE = "raise"  # an exception in the main thread
    STOP = "stop"  # SIGSTOP, and SIGCONT some time later
    REQUEST = "request"  # a signal that requests a graceful exit of msrun
    PREEMPT = "preempt"  # the same, followed some time later by SIGKILL to the whole job
    HOLD = "hold"  # a C call that keeps the interpreter's lock and never returns


class Fault(NamedTuple):
    """One fault; it strikes once in a job, at ``step`` or the first later step that is reached.

    ``step`` is the step under way: step 50 ends with the commit of step 50.
    """

    rank: int
    step: int
    moment: Moment = Moment.ANY
    deed: Deed = Deed.SIGNAL
    number: int = signals.SIGKILL  # the signal, or the exit code
    attempt: int | None = None  # None: the first attempt that reaches the step
    delay: float = 0.5  # fraction of a step (Moment.ANY) or of an update (Moment.UPDATE)
    for_s: float = 2.0  # length of a stop
    grace_s: float = 30.0  # from a preemption's signal to its SIGKILL

    @property
    def words(self) -> str:
        """As text: ``kill -9 rank 3 at step 50, backward``."""
        return self.words_of("msrun" if self.rank == LAUNCHER else f"rank {self.rank}")

    def words_of(self, target: str) -> str:
        """As text, of another target, or of several: ``kill -9 ranks 0-3 at step 50, backward``."""
        if self.moment is Moment.DUMP:
            where = "in rank 0's dump" if self.rank == LAUNCHER else "in its dump"
        elif self.moment is Moment.ANY:
            where = f"at step {self.step} + {self.delay:.2f}"
        else:
            where = f"at step {self.step}, {self.moment.value}"
        attempt = "" if self.attempt is None else f", attempt {self.attempt}"
        return f"{self._deed(target)} {where}{attempt}"

    def _deed(self, target: str) -> str:
        match self.deed:
            case Deed.SIGNAL if self.number == signals.SIGKILL:
                return f"kill -9 {target}"
            case Deed.SIGNAL:
                return f"{signals.Signals(self.number).name} to {target}"
            case Deed.EXIT:
                return f"exit {self.number} of {target}"
            case Deed.RAISE:
                return f"exception in {target}"
            case Deed.STOP:
                return f"stop {target} for {self.for_s:g} s"
            case Deed.REQUEST if self.number == signals.SIGTERM:
                return "graceful exit"
            case Deed.REQUEST:
                return f"graceful exit by {signals.Signals(self.number).name}"
            case Deed.HOLD:
                return f"interpreter held in {target}"
            case Deed.PREEMPT:
                return f"preemption with {self.grace_s:g} s"


class DrillPlan(NamedTuple):
    """What a drill tells the ranks of one job."""

    folder: str  # where ranks record what they did and computed
    ckpt: str = ""  # replaces every folder that the script saves to; empty: the script's folders
    faults: tuple[Fault, ...] = ()
    takes_orders: bool = False  # each rank looks for an OrderedFault in each phase of its steps

    @property
    def layout(self) -> DrillLayout:
        """The files in the folder."""
        return DrillLayout(Path(self.folder))

    def encode(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps({**self._asdict(), "faults": [*map(_fields, self.faults)]})

    @staticmethod
    def decode(text: str) -> DrillPlan | None:
        """Read the value of ``MSRUN_DRILL``; ``None`` if it is empty.

        Raises:
            ValueError: the text is no plan, or another version's.
        """
        if not text:
            return None
        try:
            fields = json.loads(text)
            faults = tuple(_fault(each) for each in fields.pop("faults", ()))
            return DrillPlan(**fields, faults=faults)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"unreadable drill {text[:80]!r}: {error!r}") from error


class OrderedFault(NamedTuple):
    """A fault that is decided while the job runs; it strikes as soon as its rank has read it."""

    number: int  # of its mark
    fault: Fault

    def encode(self) -> bytes:
        """As the content of a file."""
        return json.dumps({"number": self.number, "fault": _fields(self.fault)}).encode()

    @staticmethod
    def decode(content: bytes) -> OrderedFault:
        """Read a file's content."""
        found = json.loads(content)
        return OrderedFault(found["number"], _fault(found["fault"]))


def _fields(fault: Fault) -> dict[str, Any]:
    return {**fault._asdict(), "moment": fault.moment.value, "deed": fault.deed.value}


def _fault(fields: dict[str, Any]) -> Fault:
    moment, deed = Moment(fields.pop("moment")), Deed(fields.pop("deed"))
    return Fault(moment=moment, deed=deed, **fields)
