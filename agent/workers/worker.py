"""A worker process, as the supervisor knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agent.controller.states import RankState
from worker_hooks.contract.status_page import Phase

if TYPE_CHECKING:
    from agent.workers.tempo import Tempo
    from worker_hooks.contract.status_page import Heartbeat


AMID: Mapping[Phase, str] = {  # training; a loop that is over leaves the phase IDLE
    Phase.DATA: "in data",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.UPDATE: "in update",
    Phase.UPDATED: "behind the update",
}


class Worker:
    """One rank's process. Times are wall clock, for people."""

    def __init__(self, rank: int, local_rank: int, attempt: int, *, resumes: bool = False) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.attempt = attempt  # grows with every replacement of other ranks that it survives
        self.began = attempt  # the attempt that its process was started in; it names its files
        self.resumes = resumes  # from a checkpoint; it was started with an argument that says so
        self.is_replaced = False
        self.pid = 0
        self.state = RankState.PENDING
        self.exit_code: int | None = None  # 0-255, or negative for a signal
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.order = 0  # in which the workers of the attempt ended
        self.was_stopped = False  # msrun ordered it to stop before it ended
        self.signals: dict[int, str] = {}  # that msrun sent to it -> why
        self.is_released = False  # it was held after an exception and ends because of that
        self.beat: Heartbeat | None = None  # its progress when its page was last read
        self.tempo: Tempo | None = None  # how fast it trains
        self.is_slow = False  # persistently slower than its peers
        self.hung = ""  # why it was killed, if it hung
        self.why = ""  # why it could not be started

    @property
    def is_alive(self) -> bool:
        """Whether it has begun, and has not ended as far as is known."""
        return bool(self.pid) and self.exit_code is None

    @property
    def amid(self) -> str:
        """Where in a step it exited with 0, such as ``in forward of step 14``; empty: nowhere."""
        beat = self.beat
        if self.exit_code != 0 or beat is None or beat.phase not in AMID:
            return ""
        return f"{AMID[beat.phase]} of step {beat.step + 1}"
