"""What the controller promises about graceful exits, checked at every step of a simulated schedule.

Kept in the plainest way: what was told so far, beside where ranks really stay. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import Job
from agent.controller.states import JobState
from support.simulator.kinds import is_order
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.promises import Watch

ExitEvent = ev.ExitRequestedByFile | protocol.ExitRequested
ENDING = (JobState.STOPPING, JobState.KILLING)
SAVING = (JobState.FREEZING, JobState.DUMPING, JobState.COMMITTING)


class ExitWatch:
    """The promises about staying, agreeing, leaving, and being asked more than once."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.node = watch.node
        self.broken = watch.broken
        # --- of the job
        self.is_asked = False
        self.requests = 0  # by signals
        self.signum: int | None = None  # the first
        self.is_now = False  # no patience is left
        # --- of an attempt
        self.begin()

    def begin(self) -> None:
        self.hold: do.HoldRanks | None = None
        self.grace_s = 0.0
        self.hold_since = 0.0
        self.standing: dict[int, int] = {}
        self.frozen: dict[int, int] = {}
        self.step: int | None = None  # agreed on
        self.leave: do.Tell | None = None
        self.has_failed = False
        self.was_disturbed = False

    # --- what the controller was told

    def heard(self, before: Job, event: ev.Event, actions: Sequence[do.Action]) -> None:
        """Before the actions are looked at one by one."""
        match event:
            case ev.StopRequested():
                self.stop_asked(before, event)
            case ev.ExitRequestedByFile() | protocol.ExitRequested() if self.is_present(event):
                self.exit_asked(before, event, actions)
            case protocol.Standing() if self.is_awaited(before, event.dump_id):
                self.standing.setdefault(event.rank, event.step)
            case protocol.Frozen() if self.is_awaited(before, event.dump_id):
                if event.rank not in self.frozen:
                    self.frozen[event.rank] = event.step
                    self.was_disturbed |= event.step != self.step
            case ev.WorkerExited() | protocol.Raised() | ev.RankUnreachable() | ev.RankHung():
                self.lost(before, event)
        self.check_hold(before, event)
        self.check_progress(actions)

    def stop_asked(self, before: Job, event: ev.StopRequested) -> None:
        state = self.node.job.state
        self.requests += 1
        self.is_asked = True
        self.signum = self.signum or event.signum
        patience = 2 if self.hold is None else 3
        busy = before.state in SAVING or before.state in ENDING
        self.is_now = self.is_now or event.is_now or (busy and self.requests >= patience)
        if self.is_now and not (state.is_end or state is JobState.KILLING):
            self.broken(f"{event} is not heard while {state}")
        if not self.is_now:
            self.asked(before, event.grace_s or self.node.policy.timeouts.exit_s)
        if before.state is state is JobState.HOLDING:
            if self.requests > 1:
                self.broken("the second request changes nothing")
            grace_s = event.grace_s or self.node.policy.timeouts.exit_s
            if grace_s < self.grace_s:
                self.grace_s, self.hold_since = grace_s, self.node.now

    def exit_asked(self, before: Job, event: ExitEvent, actions: Sequence[do.Action]) -> None:
        rank = event.rank if isinstance(event, protocol.ExitRequested) else None
        is_own = self.dismissed(before, event, rank, actions)
        if not is_own and (rank is None or rank not in self.watch.exits):
            self.is_asked = True
            self.asked(before, self.node.policy.timeouts.asked_exit_s)

    def check_progress(self, actions: Sequence[do.Action]) -> None:
        """Nobody waits for what is known."""
        if self.node.job.state is not JobState.HOLDING:
            return
        alive = self.watch.running
        is_told = self.step is not None or any(is_order(a, protocol.Proceed) for a in actions)
        if alive <= self.standing.keys() and not is_told:
            self.broken("all have said where they stay, and are told nothing")
        if self.step is not None and alive <= self.frozen.keys():
            self.broken("all stay at one step, and nothing follows")

    def is_awaited(self, before: Job, dump_id: int) -> bool:
        return (
            before.state is JobState.HOLDING
            and self.hold is not None
            and dump_id == self.hold.dump_id
        )

    def lost(
        self,
        before: Job,
        event: ev.WorkerExited | protocol.Raised | ev.RankUnreachable | ev.RankHung,
    ) -> None:
        if before == self.node.job:
            return
        is_end = isinstance(event, ev.WorkerExited)
        if is_end and event.exit_code == 0:
            return
        if not isinstance(event, ev.RankUnreachable):
            self.has_failed = True
        if before.state is JobState.HOLDING:
            self.was_disturbed = True

    def asked(self, before: Job, grace_s: float) -> None:
        """What ranks hold is not given away by a stop."""
        state, reachable = self.node.job.state, self.watch.dump.reachable()
        if before.state is JobState.RUNNING and reachable:
            expected = JobState.HOLDING if reachable == self.watch.running else JobState.FREEZING
            if state is not expected:
                self.broken(f"{state} instead of {expected}")
            self.grace_s = grace_s

    def is_present(self, event: ExitEvent) -> bool:
        return event.attempt == self.watch.attempt

    def dismissed(
        self, before: Job, event: ExitEvent, rank: int | None, actions: Sequence[do.Action]
    ) -> bool:
        """Whether what the rank caught is the signal that msrun stops it with."""
        leaving = () if self.leave is None else self.leave.ranks
        own = rank in self.watch.dump.held or rank in leaving
        is_due = before.state in ENDING and rank in self.watch.running and not own
        is_done = any(is_order(each, protocol.Dismiss) for each in actions)
        if is_due != is_done:
            self.broken(f"{event} while {before.state}: dismissed {is_done}")
        return is_due

    def check_hold(self, before: Job, event: ev.Event) -> None:
        """Out of it only by agreement, by the end of all, or for a reason; and never late."""
        now = self.node.job.state
        if before.state is not JobState.HOLDING or now is JobState.HOLDING:
            return
        waited_s, held_s = (self.node.now - t for t in (self.hold_since, self.watch.state_since))
        room_s = min(self.node.policy.dump.answer_s, self.grace_s / 3)
        is_late = isinstance(event, ev.DeadlinePassed)
        if waited_s > self.grace_s - room_s + 1e-6 or (is_late and held_s < self.grace_s / 2):
            self.broken(f"held for {waited_s} s of {self.grace_s} s")
        self.was_disturbed |= is_late or self.requests >= 2 or self.is_now
        is_agreed = self.step is not None and self.watch.running <= self.frozen.keys()
        is_over = now is JobState.SUCCEEDED and not any(self.watch.exits.values())
        if not (is_agreed or is_over or self.was_disturbed):
            self.broken(f"{now} by {event}, but not all ranks stay at step {self.step}")

    # --- what the controller ordered

    def ordered(self, action: do.Action) -> None:
        match action:
            case do.StartAttempt():
                self.begin()
            case do.HoldRanks():
                self.check_hold_of(action)
            case do.Tell(message=protocol.Proceed(_, step)):
                self.proceed(action, step)
            case do.Tell(message=protocol.Leave(_, step)):
                self.check_leave(action, step)
            case do.SaveRanks():
                self.check_save(action)
            case do.Tell(message=protocol.Dismiss()):
                if set(action.ranks) - self.watch.running or self.node.job.state not in ENDING:
                    self.broken(f"{action}: they are not stopped")
            case do.SignalRanks():
                self.check_stop(action)

    def check_hold_of(self, action: do.HoldRanks) -> None:
        ranks, dump = set(action.ranks), self.watch.dump
        if not self.is_asked or self.hold is not None or action.dump_id <= dump.last_id:
            self.broken(f"{action}: nobody asked, or twice")
        if ranks != self.watch.running or ranks != dump.reachable():
            self.broken(f"{action}, but {sorted(self.watch.running)} are alive")
        self.hold, self.hold_since = action, self.node.now
        dump.hold(action.dump_id)

    def check_save(self, action: do.SaveRanks) -> None:
        if self.hold is None or action.dump_id != self.hold.dump_id:
            return
        missing = self.watch.running - self.frozen.keys() if action.round == 0 else set()
        if action.step != self.step or missing:
            self.broken(f"{action}, but they agreed on {self.step}")

    def check_stop(self, action: do.SignalRanks) -> None:
        leaving = set() if self.leave is None else set(self.leave.ranks)
        if action.signum not in {SIGKILL, SIGUSR1, SIGUSR2} and leaving & set(action.ranks):
            self.broken(f"{action} to ranks that were told to leave")

    def proceed(self, action: do.Tell, step: int) -> None:
        alive = self.watch.running
        said = [each for rank, each in self.standing.items() if rank in alive]
        if self.step is not None or set(action.ranks) != alive or alive - self.standing.keys():
            self.broken(f"{action}, but they said {self.standing}")
        if step != max(said):
            self.broken(f"{action}: the last step begun is {max(said)}")
        self.step = step

    def check_leave(self, action: do.Tell, step: int) -> None:
        """All of them really stay at the one step that was saved, or given up for a reason."""
        if self.leave is not None or self.was_disturbed or step != self.step:
            self.broken(f"{action}: there was no agreement on it")
        if self.watch.dump.open:
            self.broken(f"{action} while it is saved")
        if step > max(self.watch.dump.saved, 0) and not self.watch.dump.orders:
            self.broken(f"{action}, but that is not saved yet")
        for rank in action.ranks:
            process = self.node.processes[rank]
            if (process.step, process.stays) != (self.step, self.step):
                self.broken(f"{action}, but rank {rank} stays at {process.step}")
        expected = self.watch.dump.reachable() - self.watch.dump.held
        if set(action.ranks) != expected or not action.ranks:
            self.broken(f"{action}, but {sorted(expected)} can be told")
        self.leave = action

    # --- the end

    @property
    def patience_s(self) -> float:
        """Seconds until somebody may be killed."""
        return (
            self.node.policy.timeouts.grace_s
            if self.leave is None
            else max(self.node.policy.timeouts.grace_s, self.grace_s)
        )

    def exit_code(self) -> int:
        """Of a job that was asked to stop, and did."""
        gracefully = self.hold is not None and not self.was_disturbed and self.step is not None
        is_saved = self.step is not None and self.step <= max(self.watch.dump.saved, 0)
        is_saved = is_saved and not self.watch.dump.is_disputed
        left = len(self.watch.exits) == len(self.node.policy.ranks) and not any(
            self.watch.exits.values()
        )
        if gracefully and is_saved and left and not self.has_failed and self.signum != SIGINT:
            return 0
        return 128 + (SIGTERM if self.signum is None else self.signum)
