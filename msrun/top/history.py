"""What a job's events say of its ranks and its end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class EventHistory(NamedTuple):
    """A fold over the events of a job."""

    hung: frozenset[int] = frozenset()  # ranks that are alive without progress
    slow: frozenset[int] = frozenset()  # persistently slower than their peers
    end: str = ""  # why the job ended, as text

    def after(self, event: Mapping[str, Any]) -> EventHistory:
        """The history after one more line of ``events.jsonl``.

        Raises:
            KeyError, TypeError, ValueError: the event is of another version.
        """
        match event["event"]:
            case "WorkerExited":
                return self._replace(hung=self.hung - {event["rank"]})
            case "RankHung":
                return self._replace(hung=self.hung | {event["rank"]})
            case "StragglerNamed":
                return self._replace(slow=self.slow | {event["rank"]})
            case "StragglerEnded":
                return self._replace(slow=self.slow - {event["rank"]})
            case "ReplaceRanks" | "StartAttempt":
                return self._replace(hung=frozenset(), slow=frozenset())
            case "Finish":
                return self._replace(end=str(event["reason"]))
        return self
