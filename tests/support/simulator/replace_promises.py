"""What the controller promises about replacements, checked at every step of a simulated schedule.

Kept in the plainest way: what was told so far, beside which processes really live. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from signal import SIGKILL
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import Job
from agent.controller.states import JobState
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from support.simulator.promises import Watch

Called = ev.StopRequested | ev.ExitRequestedByFile | protocol.ExitRequested | ev.StartFailed
OVER = (JobState.COMMITTING, JobState.STOPPING)  # a replacement that came to nothing


class ReplaceWatch:
    """The promises about who is lost, who lives on, rounds, the memory, and falling."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.node = watch.node
        self.broken = watch.broken
        # --- of the job
        self.replaced = 0
        self.deaths: dict[int, tuple[int, int]] = {}
        self.rounds = 0
        # --- since the last restart
        self.fixed: dict[int, str] = {}
        # --- of a replacement
        self.memory: tuple[str, int] | None = None
        self.is_begun = False  # there may be something in memory
        self.first_raised: int | None = None
        self.hung: set[int] = set()
        self.gone: set[int] = set()  # lost, or called off; of the round to come
        self.newcomers: set[int] = set()
        self.over: set[int] = set()  # their scripts have ended, in this attempt
        self.is_called_off = False
        self.doubt = False  # somebody raised, and nobody is known to be dead
        self.killed: set[int] = set()
        self.released: set[int] = set()

    def begin(self) -> None:
        """All ranks are started anew."""
        self.fixed = {}
        self.over = set()
        self.first_raised = None
        self.forget_round()

    def forget_round(self) -> None:
        self.hung, self.gone, self.newcomers = set(), set(), set()
        self.killed, self.released = set(), set()
        self.is_called_off = self.doubt = False

    @property
    def step(self) -> int:
        return self.watch.dump.step

    # --- who is lost, and whether that can be replaced

    def lost(self) -> set[int]:
        """Dead, hung or mute, else the first that raised; with them whoever cannot train again."""
        watch = self.watch
        mute = watch.dump.reachable() - watch.dump.frozen.keys()
        lost = set(watch.exits) | self.hung | mute
        lost = lost or ({self.first_raised} if self.first_raised is not None else set())
        return lost | (self.over & watch.running) if lost else set()

    def count(self, ranks: Iterable[int], step: int) -> dict[int, tuple[int, int]]:
        known = {rank: self.deaths.get(rank, (-1, 0)) for rank in ranks}
        more = {rank: (step, n + 1 if at == step else 1) for rank, (at, n) in known.items()}
        return {**self.deaths, **more}

    def can(
        self,
        gone: Collection[int],
        step: int,
        deaths: dict[int, tuple[int, int]],
        *,
        is_in_memory: bool = True,
    ) -> bool:
        """Whether a person would have them replaced; nobody has to live on if all is in memory."""
        watch, policy = self.watch, self.node.policy
        staying = watch.running - set(gone)
        able = policy.replace.is_on and set(policy.ranks) <= self.fixed.keys()
        able = able and not any(self.fixed.values()) and not watch.stop.is_asked
        able = able and watch.same.can_replace()
        able = able and 0 not in [code for rank, code in watch.exits.items() if rank not in gone]
        able = (
            able
            and (bool(staying | self.over & watch.running) or is_in_memory)
            and bool(gone)
            and not staying & watch.dump.cut
        )
        died = [deaths.get(rank, (-1, 0)) for rank in gone]
        doomed = any(at == step and count >= policy.replace.deaths for at, count in died)
        is_paid = self.replaced + len(gone) <= policy.replace.max_replacements
        return able and step > 0 and not doomed and is_paid

    def can_begin(self, step: int) -> bool:
        """Before anything is written."""
        if 0 in self.watch.exits.values():
            return False
        lost = self.lost()
        return self.can(lost, step, self.count(lost, step), is_in_memory=False)

    # --- what the controller was told

    def heard(self, before: Job, event: ev.Event, actions: Sequence[do.Action]) -> None:
        match event:
            case ev.RankHung() if before != self.node.job:
                if any(isinstance(each, do.SignalRanks) for each in actions):
                    self.hung.add(event.rank)
            case protocol.Raised() if self.first_raised is None and before != self.node.job:
                if self.node.job.now.first_raised == event.rank:
                    self.first_raised = event.rank
            case protocol.Registered() if event.attempt == self.watch.attempt:
                if event.rank in self.watch.running | self.unheard():
                    self.fixed[event.rank] = event.not_replaceable_why
            case ev.RankExiting() if before != self.node.job:
                self.over.add(event.rank)
            case ev.ReplacementAged() if not before.state.is_end:
                self.replaced = max(0, self.replaced - 1)
        if before.state is JobState.REPLACING:
            self.disturbed(before, event, actions)

    def unheard(self) -> set[int]:
        return set(self.node.policy.ranks) - self.watch.heard_of

    def committed(self, path: str) -> None:
        """The memory is complete: what follows is known."""
        self.memory = path, self.step
        self.gone = self.lost()
        self.deaths = self.count(self.gone, self.step)
        is_due = self.can(self.gone, self.step, self.deaths)
        is_due = is_due and 0 not in self.watch.exits.values()
        if is_due != (self.node.job.state is JobState.REPLACING):
            self.broken(f"{self.node.job.state}, but {sorted(self.gone)} replaced: {is_due}")

    def disturbed(self, before: Job, event: ev.Event, actions: Sequence[do.Action]) -> None:
        """Whoever is lost makes another round, unless there can be none."""
        watch, state = self.watch, self.node.job.state
        self.is_called_off |= any(isinstance(each, do.CancelStarts) for each in actions)
        idle = self.newcomers - watch.dump.registered | self.over & watch.running
        is_known = before == self.node.job
        new, is_fatal = (set(), False) if is_known else self.lose(before, event, actions, idle)
        is_fatal |= isinstance(event, Called)
        if new:
            assert self.memory is not None
            self.deaths = self.count(new, self.memory[1])
            self.gone |= new | idle
            out = self.gone | set(watch.exits)
            zero = isinstance(event, ev.WorkerExited) and event.exit_code == 0
            is_due = self.can(out, self.memory[1], self.deaths) and not zero
            if is_due != (state is JobState.REPLACING):
                self.broken(f"{state}, but {sorted(out)} can be replaced: {is_due}")
        elif state in OVER and not is_fatal:
            self.broken(f"{state} without a reason")
        if state is JobState.REPLACING:
            self.check_progress(actions)

    def lose(
        self, before: Job, event: ev.Event, actions: Sequence[do.Action], idle: set[int]
    ) -> tuple[set[int], bool]:
        """The ranks that ``event`` costs, and whether it may end the replacement."""
        match event:
            case ev.RankExiting(rank=rank) if rank in self.watch.dump.registered:
                pass  # it has joined
            case ev.WorkerExited() | ev.RankUnreachable() | ev.RankExiting():
                return {event.rank} - self.gone, False
            case ev.DeadlinePassed():
                killed = {
                    rank
                    for each in actions
                    if isinstance(each, do.SignalRanks) and each.signum == SIGKILL
                    for rank in each.ranks
                }
                new = killed - self.gone - idle
                if not new and self.memory is not None:  # it gives up at once: nobody is killed
                    late = self.node.job.deaths.items() - before.deaths.items()
                    self.deaths = self.count([rank for rank, _ in late], self.memory[1])
                return new, True
            case protocol.Registered():
                is_astray = self.memory is not None and event.step != self.memory[1]
                is_replacing = self.node.job.state is JobState.REPLACING
                if is_astray and is_replacing and event.rank not in self.gone:
                    self.broken(f"{event} came back elsewhere, and nothing follows")
                return set(), is_astray
            case protocol.Raised():
                self.doubt |= not self.gone
        return set(), False

    def check_progress(self, actions: Sequence[do.Action]) -> None:
        """Nobody waits for what is known."""
        watch = self.watch
        if any(isinstance(each, do.ReplaceRanks) for each in actions):
            return
        going = self.gone & (watch.running | (self.unheard() if self.is_called_off else set()))
        if watch.exits and not going:
            self.broken(f"ranks {sorted(watch.exits)} are gone, and nothing follows")
        everybody = set(self.node.policy.ranks)
        if everybody == watch.dump.registered & watch.running and not (self.gone or self.doubt):
            self.broken("all have joined, and nothing follows")

    # --- what the controller ordered

    def ordered(self, action: do.Action) -> None:
        match action:
            case do.SaveRanks(place=do.MEMORY):
                self.is_begun = True
            case do.PrepareRanks():
                self.prepare(action)
            case do.ReplaceRanks():
                self.replace(action)
            case do.Tell(message=protocol.GoOn(attempt)):
                self.go_on(action, attempt)
            case do.ForgetMemory():
                self.forget(action)
            case do.StartAttempt() | do.Finish() if self.is_begun:
                self.broken(f"{action} while the memory is kept")
            case do.SignalRanks(signum=signum) if signum == SIGKILL:
                self.killed |= set(action.ranks)
            case do.Tell(message=protocol.Release()):
                self.released |= set(action.ranks)

    def prepare(self, action: do.PrepareRanks) -> None:
        """Only for the dead, and for what comes next if nothing comes between."""
        ranks, saves = set(action.ranks), self.watch.dump.orders
        if action.attempt != self.watch.attempt + 1 or not saves or saves[-1].place != do.MEMORY:
            self.broken(f"{action} for another round than the next")
        if not ranks or ranks - self.watch.exits.keys() or ranks & self.watch.running:
            self.broken(f"{action}, but {sorted(self.watch.exits)} are dead")

    def replace(self, action: do.ReplaceRanks) -> None:
        watch, node = self.watch, self.node
        if action.attempt != watch.attempt + 1 or node.job.state is not JobState.REPLACING:
            self.broken(f"{action} in {node.job.state}, after attempt {watch.attempt}")
        alive = [rank for rank in action.newcomers if node.processes[rank].alive]
        if alive or set(action.newcomers) & (watch.running | node.owed.keys()):
            self.broken(f"{action}: an older process of a newcomer's rank may live")
        both = (*action.survivors, *action.newcomers)
        if sorted(both) != list(node.policy.ranks) or set(action.survivors) != watch.running:
            self.broken(f"{action}, but {sorted(watch.running)} are alive")
        if (action.path, action.step) != (node.replicas.disk.memory or self.memory):
            self.broken(f"{action}, but that is not what is in memory")
        if watch.stop.is_asked or not action.newcomers:
            self.broken(f"{action} after a stop was asked for, or for nobody")
        worst = max(self.deaths.get(rank, (-1, 0))[1] for rank in action.newcomers)
        if worst >= node.policy.replace.deaths:
            self.broken(f"{action}: a rank died {worst} times at this step")
        self.replaced += len(action.newcomers)
        reminders = [each for each in watch.actions if isinstance(each, do.RemindReplaced)]
        if self.replaced > node.policy.replace.max_replacements or len(reminders) != len(
            action.newcomers
        ):
            self.broken(f"{action}: the budget of replacements is exceeded")
        self.rounds += 1
        watch.begin_round(action)
        self.over = set()
        self.first_raised = None
        self.forget_round()
        self.newcomers = set(action.newcomers)

    def go_on(self, action: do.Tell, attempt: int) -> None:
        watch, everybody = self.watch, set(self.node.policy.ranks)
        if self.node.job.state is not JobState.RUNNING or attempt != watch.attempt:
            self.broken(f"{action} in {self.node.job.state}")
        joined = watch.dump.registered & watch.running
        if set(action.ranks) != everybody or joined != everybody or self.doubt:
            self.broken(f"{action}, but others than {sorted(joined)} have not joined")
        self.watch.went_on()
        self.forget_round()

    def forget(self, action: do.ForgetMemory) -> None:
        state = self.node.job.state
        is_needed = self.watch.same.keeps_memory() or (
            self.memory is not None and state in {JobState.COMMITTING, JobState.REPLACING}
        )
        if not self.is_begun or is_needed or state is JobState.DUMPING:
            self.broken(f"{action} while {state}")
        self.memory, self.is_begun = None, False
