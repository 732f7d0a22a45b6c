"""One node in a virtual clock: it does what the controller orders, and everything that can go wrong does.

A schedule is a seed: `simulate(seed)` plays it to its end and raises `BrokenPromiseError`, which names the
seed, as soon as a promise of the controller does not hold. What the node knows to be true (which processes
really exist) and what the controller was told (messages that arrived) are kept apart; the promises are
checked against both. Not a test itself.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import JobState
from agent.spec.job_spec import Policy
from support.policies import policy
from support.simulator.dice import Dice
from support.simulator.promises import Watch
from support.simulator.replicas import OLD_PATH, OLD_STEP, Replicas
from worker_hooks.contract import protocol

CRASHES = (1, 1, 2, 3, 137, 255, -6, -9, -11)
LONGEST_START_S = 30.0
LONGEST_LIFE_S = 60.0
LONGEST_DELAY_S = 1.0  # of a message
REFERENCE, REFERENCE_EVERY = 3_000, 500  # how often its work is done, and after how many schedules


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad things are in one schedule: probabilities."""

    crash: float  # a worker ends with something else than 0
    no_start: float  # a start fails
    lost: float  # a start is never answered
    slow: float  # a start takes long
    deaf: float  # a worker ignores signals that ask it to stop
    immortal: float  # a worker survives SIGKILL
    noise: float  # a message arrives again, later


@dataclass(slots=True, eq=False)
class Process:
    """What is true about a worker, whatever the controller was told."""

    rank: int
    attempt: int
    announced_at: float
    deaf: bool
    immortal: bool
    alive: bool = True
    # --- with hooks
    has_hooks: bool = False
    is_registered: bool = False
    is_linked: bool = False
    is_held: bool = False  # with an exception, until it is released
    catches: bool = False  # the signal to stop: it says so, and stays
    stays: int | None = None  # the step at whose end it is to stay
    is_done: bool = False  # it has trained to the end
    is_hung: bool = False  # it does nothing any more, and hears only SIGKILL
    knows: int = -1  # the attempt that its hooks write into what they say
    step: int | None = None  # what it holds, once nobody gets any further
    is_torn: bool = False
    flip: int = 0
    busy_until: float = 0.0


@dataclass(slots=True)
class Story:
    """What happened in one schedule."""

    seed: int
    policy: Policy
    events: list[ev.Event] = field(default_factory=list)
    actions: list[do.Action] = field(default_factory=list)
    job: Job | None = None
    ended_at: float | None = None


def simulate(
    seed: int, decide: Callable[[Job, ev.Event], Decision] = decide, *, has_boxes: bool = False
) -> Story:
    """Play one schedule; `has_boxes`: of a job whose ranks hold one tensor with these and another one with those.

    Raises:
        BrokenPromiseError: a promise does not hold; the message names it and the seed.
    """
    node = Node(seed, decide, has_boxes=has_boxes)
    try:
        return node.run()
    finally:
        node.take_apart()


class Node:
    """Performs actions, in a clock that jumps from one happening to the next."""

    def __init__(
        self, seed: int, decide: Callable[[Job, ev.Event], Decision], *, has_boxes: bool = False
    ) -> None:
        self.seed = seed
        self.has_boxes = has_boxes
        self.rng = rng = Dice(seed)
        self.decide = decide
        self.replicas = Replicas(self)
        self.weather = _weather(rng, calm=self.replicas.climate.hooks > 0 and rng.random() < 0.8)
        lost = self.weather.lost > 0
        self.policy = policy(
            ranks=tuple(range(rng.choice((3, 4, 4, 4, 6, 8) if has_boxes else (1, 2, 2, 3, 4, 5)))),
            max_restarts=rng.choice((0, 1, 1, 2, 3)),
            start_s=rng.choice((5.0, 20.0) if lost else (5.0, 20.0, None)),
            grace_s=rng.choice((0.0, 3.0, 30.0)),
            kill_s=rng.choice((0.5, 5.0)),
            update_grace_s=0.0,
            freeze_s=rng.choice((0.5, 2.0)),
            stall_s=rng.choice((1.0, 3.0)),
            split=rng.random() < 0.3,
            places=rng.choice((1, 2, 2)),
            stalls=rng.choice((1, 2, 3)),
            restarts_explicit=rng.random() < 0.7,
            exit_s=rng.choice((3.0, 30.0)),
            asked_exit_s=rng.choice((10.0, 60.0)),
            is_on=rng.random() < 0.7,
            max_replacements=rng.choice((1, 3, 20, 20)) if rng.random() < 0.9 else 0,
            period_s=rng.choice((5.0, 3600.0)),
            deaths=rng.choice((2, 3, 3)) if rng.random() < 0.9 else 1,
            rejoin_s=rng.choice((0.5, 2.0)),
            memory_writers=(1, 2, 8)[seed % 3],
            join_s=rng.choice((3.0, 10.0)),
            copies=self.replicas.copies.mode,
            node_wait_s=600.0,
            restarts_from_memory=self.replicas.copies.are_read_early,
        )
        self.story = Story(seed, self.policy)
        self.job = Job(self.policy)
        if rng.random() < 0.3:
            self.job = Job(self.policy, resume=OLD_PATH, saved_step=OLD_STEP)
        self.watch = Watch(self)
        self.now = 0.0
        self.count = 0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.owed: dict[
            int, int
        ] = {}  # rank -> attempt of a start that is ordered and did not happen
        self.processes: dict[int, Process] = {}
        self.timer = 0

    def run(self) -> Story:
        """To the last happening; many come after the end and must change nothing."""
        self.post(ev.LaunchRequested())
        self.outside()
        while self.queue:
            self.now, _, happens, told = heapq.heappop(self.queue)
            happens(*told)
        self.watch.over()
        self.story.job = self.job
        return self.story

    def take_apart(self) -> None:
        """The parts know each other: they are freed at once, where the collector would search them."""
        watch, replicas = self.watch, self.replicas
        watches = (
            watch.dump,
            watch.stop,
            watch.replacing,
            watch.same,
            watch.copies,
            watch.kept,
            watch,
        )
        parts = replicas.exits, replicas.rejoins, replicas.reports, replicas.copies, replicas
        for part in (*watches, *parts, self):
            vars(part).clear()

    def after(self, delay_s: float, happens: Callable[..., None], *told: Any) -> None:
        """Let something happen later."""
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.count, happens, told))

    def at(self, time_s: float, happens: Callable[..., None], *told: Any) -> None:
        """Let something happen; of two at the same time the one that was foreseen first."""
        self.count += 1
        heapq.heappush(self.queue, (time_s, self.count, happens, told))

    def outside(self) -> None:
        """People and batch systems send signals at any time."""
        rng = self.rng
        if rng.random() < 0.2:
            self.stop_soon((1.0, 5.0, LONGEST_LIFE_S))
        if rng.random() < 0.15:
            self.after(2.0 + 18.0 * rng.random(), self.ask_gracefully)
        if rng.random() < 0.3:
            signum = rng.choice((SIGUSR1, SIGUSR2))
            self.after(rng.random() * LONGEST_LIFE_S, self.post, ev.SignalReceived(signum))

    def stop_soon(self, longest_s: tuple[float, ...]) -> None:
        """Somebody asks, and perhaps is impatient."""
        rng, delay_s = self.rng, 0.0
        for _ in range(rng.choice((1, 1, 2, 3))):
            delay_s += rng.random() * rng.choice(longest_s)
            grace_s = rng.choice((None, None, None, 7.0))
            is_now = rng.random() < 0.05
            signum = rng.choice((SIGTERM, SIGINT, SIGHUP))
            self.after(delay_s, self.post, ev.StopRequested(signum, "", grace_s, True, is_now))

    def ask_gracefully(self) -> None:
        """A file asks, or ranks do: one, or all at once; perhaps people get impatient then."""
        rng = self.rng
        if rng.random() < 0.3:
            self.post(ev.ExitRequestedByFile(self.job.attempt, "a file asks"))
        if rng.random() < 0.3:
            for process in self.alive():
                self.after(rng.random(), self.replicas.exits.asked, process)
        if rng.random() < 0.7:
            self.stop_soon((0.2, 5.0, 30.0))

    def post(self, event: ev.Event) -> None:
        """The controller hears of it; what it orders is done at once."""
        before = self.job
        try:
            decision = self.decide(before, event)
        except KeyError as error:
            self.watch.broken(f"no row for {error} in {before.state}, at {event}")
        self.story.events.append(event)
        self.job = decision.job
        self.watch.heard(before, event, decision.actions)
        for action in decision.actions:
            self.story.actions.append(action)
            self.watch.ordered(action)
            self.perform(action)

    def tell(self, event: ev.Event, arrives_at: float) -> None:
        """A message is on its way, and perhaps arrives once more."""
        self.at(arrives_at, self.post, event)
        if self.rng.random() < self.weather.noise:
            late_s = self.rng.random() * self.rng.choice((1.0, LONGEST_LIFE_S))
            self.at(arrives_at + late_s, self.post, event)

    def perform(self, action: do.Action) -> None:
        match action:
            case do.StartAttempt():
                self.replicas.begin(action)
                for rank in self.policy.ranks:
                    self.start(rank, action.attempt)
            case do.CancelStarts():
                self.call_off()
            case do.SignalRanks():
                for rank in action.ranks:
                    self.signal(self.processes[rank], action.signum)
            case do.SetDeadline():
                self.wind(action)
            case do.Sweep():
                self.timer += 1
            case do.Finish():
                self.story.ended_at = self.now
            case _:
                self.replicas.perform(action)

    def wind(self, action: do.SetDeadline) -> None:
        self.timer += 1
        if action.after_s is not None:
            passed = ev.DeadlinePassed(action.state, action.attempt)
            self.after(action.after_s, self.pass_deadline, passed, self.timer)

    def pass_deadline(self, passed: ev.DeadlinePassed, timer: int) -> None:
        """A timer that was replaced still fires now and then: it was already on its way."""
        if timer == self.timer or self.rng.random() < self.weather.noise:
            self.post(passed)

    def start(self, rank: int, attempt: int) -> None:
        rng, weather = self.rng, self.weather
        self.owed[rank] = attempt
        if rng.random() < weather.lost:
            return
        longest_s = LONGEST_START_S if rng.random() < weather.slow else 0.5
        self.after(rng.random() * longest_s, self.fork, rank, attempt)

    def call_off(self) -> None:
        for rank in list(self.owed):
            if self.rng.random() < 0.7:  # else it is too late
                self.tell(ev.StartFailed(rank, self.owed.pop(rank), "called off"), self.now)

    def fork(self, rank: int, attempt: int) -> None:
        rng, weather = self.rng, self.weather
        if self.owed.get(rank) != attempt:
            return
        del self.owed[rank]
        arrives_at = self.now + rng.random() * LONGEST_DELAY_S
        if rng.random() < weather.no_start:
            self.tell(ev.StartFailed(rank, attempt, "no memory"), arrives_at)
            return
        deaf = rng.random() < weather.deaf
        if rank in self.processes and self.processes[rank].alive:
            self.watch.broken(f"rank {rank} lives twice")
        process = Process(rank, attempt, arrives_at, deaf, rng.random() < weather.immortal)
        process.catches, process.knows = rng.random() < 0.1, attempt
        self.processes[rank] = process
        self.tell(ev.WorkerStarted(rank, attempt, 1000 + rank), arrives_at)
        self.replicas.born(process)
        exit_code = rng.choice(CRASHES) if rng.random() < weather.crash else 0
        if process.has_hooks and exit_code == 0:
            life_s = 20.0 + rng.random()  # trained to the end, all about the same time
        else:
            longest_s = rng.choice((0.1, 5.0, LONGEST_LIFE_S))
            life_s = rng.random() * (20.0 if process.has_hooks else longest_s)
        self.after(life_s, self.replicas.end, process, exit_code)

    def signal(self, process: Process, signum: int) -> None:
        """A worker answers in its own way; a dead one does not answer."""
        if signum == SIGKILL:
            if not process.immortal:
                self.after(self.rng.random() * 0.1, self.die, process, -SIGKILL)
        elif signum in {SIGUSR1, SIGUSR2}:
            if self.rng.random() < 0.1:
                self.after(0.0, self.die, process, -signum)
        elif process.is_hung:
            return
        elif process.catches and process.is_linked:
            self.replicas.exits.asked(process)
        elif not process.deaf:
            exit_code = self.rng.choice((-signum, -signum, 0, 1, 128 + signum))
            self.after(self.rng.random() * 6.0, self.replicas.fail, process, exit_code)

    def die(self, process: Process, exit_code: int) -> None:
        """However many reasons to die, the first counts; the news never overtake its birth's."""
        if process.alive:
            process.alive = False
            arrives_at = self.now + self.rng.random() * self.rng.choice((0.0, LONGEST_DELAY_S))
            self.replicas.died(process, exit_code)
            step = process.step if process.is_registered else None
            self.at(max(arrives_at, process.announced_at), self.exited, process, exit_code, step)

    def exited(self, process: Process, exit_code: int, step: int | None) -> None:
        """The agent hears of it, in the attempt that it counts the process to then."""
        lost = self.replicas.copies.why_lost(exit_code)
        left = () if lost else self.replicas.kept.left(process, exit_code)
        told = process.rank, process.attempt, exit_code, step
        ended = ev.WorkerExited(*told, lost=lost, kept=left)
        self.tell(ended, self.now)

    def alive(self) -> list[Process]:
        """Processes that really exist."""
        return [process for process in self.processes.values() if process.alive]


def _weather(rng: Random, calm: bool) -> Weather:
    """Most schedules are dominated by one or two kinds of trouble; when calm, all ranks start."""
    draw = rng.random
    if calm:
        crash, noise = rng.choice((0.3, 0.5, 0.8)), rng.choice((0.0, 0.4))
        return Weather(
            crash, no_start=0, lost=0, slow=0, deaf=draw() < 0.2, immortal=0, noise=noise
        )
    return Weather(
        crash=rng.choice((0.0, 0.1, 0.5)),
        no_start=rng.choice((0.0, 0.0, 0.3)) * draw(),
        lost=rng.choice((0.0, 0.0, 0.0, 0.1)),
        slow=rng.choice((0.0, 0.3)),
        deaf=rng.choice((0.0, 0.3)),
        immortal=rng.choice((0.0, 0.0, 0.1)),
        noise=rng.choice((0.0, 0.4)),
    )


def census(first: int, count: int, *, has_boxes: bool = False) -> Counter[str]:
    """How many of the schedules came to what, and their cost: how often ``reference_s`` each took.

    A processor that others share is slow for both, so the ratio shows a decision that became slow;
    it is the middle one of all parts, as others do not take the processor at all times.
    """
    seen: Counter[str] = Counter()
    costs: list[float] = []
    with seldom_collecting():
        for part in range(first, first + count, REFERENCE_EVERY):
            seeds = range(part, min(part + REFERENCE_EVERY, first + count))
            reference, began_s = reference_s(), time.process_time()
            for seed in seeds:
                _count(simulate(seed, has_boxes=has_boxes), seen)
            costs.append((time.process_time() - began_s) / len(seeds) / reference)
    seen["cost"] = round(statistics.median(costs))
    return seen


def too_rare(
    seen: Mapping[str, int], wanted: Mapping[int, Sequence[str]], count: int
) -> list[tuple[str, int]]:
    """What ``count`` schedules came to less often than wanted of 12,000, and how often."""
    return [
        (each, seen[each])
        for least, several in wanted.items()
        for each in several
        if seen[each] < least * count / 12_000
    ]


def _count(story: Story, seen: Counter[str]) -> None:
    """Add what one schedule came to."""
    assert story.job is not None
    seen[story.job.state.value] += 1
    seen["restarted"] += story.job.restarts > 0
    named = {do.name_of(each) for each in story.actions}
    seen["replaced"] += "GoOn" in named
    for each in named | {kind.__name__ for kind in set(map(type, story.events))}:
        seen[each] += 1
    for each in story.actions:
        match each:
            case do.SaveRanks(round=number, place=place, parts=parts):
                seen["in several parts"] += bool(parts)
                seen["written again"] += number > 0
                seen["elsewhere"] += place > 0
                seen["to memory"] += place == do.MEMORY
            case do.FreezeRanks(step=step):
                seen["let on"] += step > 0
            case do.Tell(message=protocol.Leave()):
                seen["left"] += 1
            case do.CommitDump(from_memory=True):
                seen["from memory"] += 1
                seen["from a copy"] += each.is_copy
                seen["from dead ranks"] += each.is_kept
            case do.CommitDump(variants=variants, odd=odd):
                seen["no majority"] += len(variants) > 1
                seen["odd"] += bool(odd)
            case do.Finish(exit_code=0, state=JobState.STOPPED):
                seen["gracefully"] += 1
            case do.Finish(reason=reason):
                seen["crash loop"] += "attempts in a row" in reason


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Nothing of a schedule is garbage before its end: collecting within it is in vain."""
    before = gc.get_threshold()
    gc.set_threshold(50_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def reference_s() -> float:
    """The processor time of work like a decision's: small tuples and dicts are made and compared."""
    began_s = time.process_time()
    table: dict[int, tuple[int, int]] = {}
    for number in range(REFERENCE):
        table = {**table, number % 8: (number, -number)}
        sorted(table.values())
    return (time.process_time() - began_s) / REFERENCE
