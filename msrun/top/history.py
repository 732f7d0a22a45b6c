"""A job's last failure and what was done about it, folded out of its events. Pure.

A failure starts with the first event that breaks a healthy job, and ends with what is done about
it. Events in between (survivors that raise, ranks that are stopped) are its consequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.text.wording import describe_exit, listed
from worker_hooks.contract.layout import DUMP

HEALTHY = frozenset({"new", "starting", "running", "holding", "replacing"})
DUMPING = frozenset({"freezing", "dumping", "committing"})


class Failure(NamedTuple):
    """What failed, and what was done about it; empty while nothing is decided."""

    at: float  # seconds since the epoch
    what: str
    done: str = ""
    is_raised: bool = False  # an exception, perhaps only the consequence of a death


class EventHistory(NamedTuple):
    """What the events of a job say."""

    state: str = "new"
    failure: Failure | None = None  # the last
    hung: frozenset[int] = frozenset()  # ranks that are alive without progress
    slow: frozenset[int] = frozenset()  # persistently slower than their peers
    replacement: str = ""  # the last, as text to show once it is complete
    origin: str = ""  # where the first attempt resumed from, as text; empty: at the beginning
    end: str = ""  # why the job ended, as text

    def after(self, event: Mapping[str, Any]) -> EventHistory:
        """The history after one more line of ``events.jsonl``.

        Raises:
            KeyError, TypeError, ValueError: the event is of another version.
        """
        known = self.with_failure(event).with_answer(event)
        state = event.get("job")
        return known if state is None else known._replace(state=str(state))

    def with_failure(self, event: Mapping[str, Any]) -> EventHistory:
        """The history after an event that says that a rank failed or is slow."""
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

    def with_answer(self, event: Mapping[str, Any]) -> EventHistory:
        """The history after an event that says what is done about a failure."""
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
        """A healthy job breaks; or a death appears that explains why another rank raised."""
        open_ = self.failure if self.failure and not self.failure.done else None
        is_after = is_raised and self.state == "replacing"  # a consequence of the failure
        is_first = open_ is None and self.state in HEALTHY and not is_after
        explains = open_ is not None and open_.is_raised and is_death and self.state in DUMPING
        if not (is_first or explains):
            return self
        at = open_.at if open_ else float(event["time"])
        return self._replace(failure=Failure(at, f"rank {event['rank']} {how}", "", is_raised))

    def solved(self, event: Mapping[str, Any], done: str) -> EventHistory:
        """The history after something was done about the last failure."""
        failure = self.failure or Failure(float(event["time"]), "")
        return self._replace(failure=failure._replace(done=done))


def _origin(resume: str | None) -> str:
    """Where an attempt starts, as text."""
    if not resume:
        return "the beginning"
    name = resume.rstrip("/").rpartition("/")[2]
    return f"step {name.removeprefix(DUMP)}" if name.startswith(DUMP) else name
