"""What each rank did when, folded out of a run's events. Pure.

All ranks begin and end most states together: the job's state decides. A rank differs while it is
started, once it has died, and when its script is at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Doing(Enum):
    """What a rank does, or what msrun does with it."""

    STARTING = "starting"
    RUNNING = "running"  # and whether it trains is not known
    TRAINING = "training"
    FROZEN = "frozen"  # alive, and waits while others are lost
    LOST = "lost"  # dead or hung, until another one trains in its place
    STOPPING = "stopping"
    OVER = ""  # its script has ended


Span = tuple[float, Doing]  # since when, in seconds since the epoch

_STANDING = {"freezing", "dumping", "committing", "replacing"}
_STOPPING = {"holding", "stopping", "killing"}


class Timeline:
    """The ranks of one run; feed it the lines of ``events.jsonl`` in their order."""

    def __init__(self, ranks: int) -> None:
        """``ranks``: how many there are."""
        self.ranks = ranks
        self.began: float | None = None
        self.ended = 0.0
        self.spans: dict[int, list[Span]] = {}
        self.first_start: float | None = None
        self.first_training: float | None = None
        self._state = "new"
        self._joined: set[int] = set()
        self._has_hooks = False

    @property
    def start_s(self) -> float | None:
        """From the first process until all ranks trained for the first time; ``None``: never."""
        if self.first_start is None or self.first_training is None:
            return None
        return self.first_training - self.first_start

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event.

        Raises:
            KeyError, TypeError, ValueError: it is of another version.
        """
        at = float(event["time"])
        self.began = at if self.began is None else self.began
        self.ended = max(self.ended, at)
        before = self._state
        self._state = str(event.get("job", before))
        self._take_rank(event, at, before)
        self._take_job(event, at, before)

    def _take_rank(self, event: Mapping[str, Any], at: float, before: str) -> None:
        match event["event"]:
            case "WorkerStarted":
                rank = int(event["rank"])
                self.first_start = at if self.first_start is None else self.first_start
                if self._now(rank) is not Doing.LOST:
                    self._set(rank, at, Doing.STARTING)
            case "Registered":
                if not self._has_hooks:
                    self._has_hooks = True
                    self._know_better()
                self._joined.add(int(event["rank"]))
            case "RankHung":
                since = at - float(event.get("silent_s", 0.0))
                self._set(int(event["rank"]), since, Doing.LOST)
            case "WorkerExited" | "RankExiting":
                is_over = event.get("exit_code", 0) == 0 or before in _STOPPING
                doing = Doing.OVER if is_over else Doing.LOST
                self._set(int(event["rank"]), at, doing)

    def _take_job(self, event: Mapping[str, Any], at: float, before: str) -> None:
        name, state = event["event"], self._state
        if name == "ReplaceRanks":
            self._joined.clear()
            for rank in event["newcomers"]:
                self._set(int(rank), at, Doing.LOST)
        elif name == "StartAttempt":
            self._joined.clear()
            self._set_all(at, Doing.STARTING, even_dead=True)
        elif name == "Finish":
            self._set_all(at, Doing.OVER, even_dead=True)
        elif state == "running" and (before != "running" or name == "Registered"):
            self._resume(at, is_back=before == "replacing")
        elif state in _STANDING and before not in _STANDING:
            self._set_all(at, Doing.FROZEN)
        elif state in _STOPPING and before not in _STOPPING:
            self._set_all(at, Doing.STOPPING)

    def _resume(self, at: float, *, is_back: bool) -> None:
        """The job runs: all ranks train once all have registered."""
        if self._joined and len(self._joined) == self.ranks:
            if self.first_training is None:
                self.first_training = at
            self._set_all(at, Doing.TRAINING, even_dead=is_back)
        elif not self._has_hooks:
            self._set_all(at, Doing.RUNNING)

    def _know_better(self) -> None:
        """The ranks have hooks: until now they did not run without any, but started."""
        for rank, spans in self.spans.items():
            self.spans[rank] = [span for span in spans if span[1] is not Doing.RUNNING]

    def _now(self, rank: int) -> Doing | None:
        spans = self.spans.get(rank)
        return spans[-1][1] if spans else None

    def _set(self, rank: int, at: float, doing: Doing) -> None:
        spans = self.spans.setdefault(rank, [])
        while spans and spans[-1][0] >= at and len(spans) > 1:  # a hang began earlier
            spans.pop()
        if not spans or spans[-1][1] is not doing:
            spans.append((at, doing))

    def _set_all(self, at: float, doing: Doing, *, even_dead: bool = False) -> None:
        for rank, spans in self.spans.items():
            if even_dead or spans[-1][1] not in {Doing.LOST, Doing.OVER}:
                self._set(rank, at, doing)
