"""A job's last failure and what was done about it, folded out of its events. Pure.

A failure begins with what broke a job that was well, and ends with what was done about it; what
happens in between (survivors that raise, ranks that are stopped) only follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.text.wording import describe_exit, listed
from worker_hooks.contract.layout import DUMP

WELL = frozenset({"new", "starting", "running", "holding", "replacing"})
DRAINED = frozenset({"freezing", "dumping", "committing"})


class Failure(NamedTuple):
    """What broke, and what was done about it; empty while nothing is decided."""

    at: float  # seconds since the epoch
    what: str
    done: str = ""
    is_raised: bool = False  # an exception, perhaps only the consequence of a death


class EventHistory(NamedTuple):
    """A job as its events tell it."""

    state: str = "new"
    failure: Failure | None = None  # the last
    hung: frozenset[int] = frozenset()  # ranks that were found without progress, and live
    slow: frozenset[int] = frozenset()  # persistently slower than their peers
    replacement: str = ""  # the last, in words, as they are right once it has come to its end
    origin: str = ""  # what the first attempt went on from, in words; empty: nothing
    end: str = ""  # why the job ended, in words

    def after(self, event: Mapping[str, Any]) -> EventHistory:
        """The history once one more line of ``events.jsonl`` is known.

        Raises:
            KeyError, TypeError, ValueError: it is no event of this version.
        """
        known = self.troubled(event).answered(event)
        state = event.get("job")
        return known if state is None else known._replace(state=str(state))

    def troubled(self, event: Mapping[str, Any]) -> EventHistory:
        """The history once a rank is in trouble, if this event says so."""
        match event["event"]:
            case "WorkerExited" if event["exit_code"] != 0:
                died = describe_exit(event["exit_code"])
                known = self._replace(hung=self.hung - {event["rank"]})
                return known.broken(event, died, is_death=event["exit_code"] < 0)
            case "StartFailed":
                return self.broken(event, f"did not start: {event['why']}")
            case "Raised":
                return self.broken(event, f"raised {event['error']}", is_raised=True)
            case "RankHung":
                known = self._replace(hung=self.hung | {event["rank"]})
                return known.broken(event, f"hung: {event['why']}")
            case "StragglerNamed":
                return self._replace(slow=self.slow | {event["rank"]})
            case "StragglerEnded":
                return self._replace(slow=self.slow - {event["rank"]})
        return self

    def answered(self, event: Mapping[str, Any]) -> EventHistory:
        """The history once something is done about a failure, if this event says so."""
        match event["event"]:
            case "ReplaceRanks":
                known = self._replace(hung=frozenset(), slow=frozenset())
                who, step = listed(event["newcomers"]), event["step"]
                known = known._replace(replacement=f"{who} replaced at step {step}")
                return known.solved(event, f"{who} starts again, from step {step}")
            case "GoOn" if self.failure is not None:
                took_s = event["time"] - self.failure.at
                return self.solved(event, f"{self.replacement} in {took_s:.2f} s")
            case "StartAttempt" if event["attempt"] == 0:
                return self._replace(origin=(event["resume"] and _origin(event["resume"])) or "")
            case "StartAttempt":
                known = self._replace(hung=frozenset(), slow=frozenset())
                return known.solved(event, f"restarted from {_origin(event['resume'])}")
            case "Finish":
                return self._replace(end=str(event["reason"]))
        return self

    def broken(
        self, event: Mapping[str, Any], how: str, *, is_death: bool = False, is_raised: bool = False
    ) -> EventHistory:
        """A job that was well is no more; or the death shows that made another rank raise."""
        open_ = self.failure if self.failure and not self.failure.done else None
        is_after = is_raised and self.state == "replacing"  # of what is being mended
        is_first = open_ is None and self.state in WELL and not is_after
        explains = open_ is not None and open_.is_raised and is_death and self.state in DRAINED
        if not (is_first or explains):
            return self
        at = open_.at if open_ else float(event["time"])
        return self._replace(failure=Failure(at, f"rank {event['rank']} {how}", "", is_raised))

    def solved(self, event: Mapping[str, Any], done: str) -> EventHistory:
        """Something was done about the last failure."""
        failure = self.failure or Failure(float(event["time"]), "")
        return self._replace(failure=failure._replace(done=done))


def _origin(resume: str | None) -> str:
    """What an attempt goes on from, in words."""
    if not resume:
        return "the beginning"
    name = resume.rstrip("/").rpartition("/")[2]
    return f"step {name.removeprefix(DUMP)}" if name.startswith(DUMP) else name
