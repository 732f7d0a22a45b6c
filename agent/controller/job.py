"""The job as the controller remembers it: values without a decision in them. Pure."""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from agent.controller.states import JobState, RankState
from agent.spec.job_spec import JobSpec
from worker_hooks.contract import protocol

NEVER = -1  # the step of what does not exist
_EMPTY: Mapping[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user asked for, as far as decisions need it. Seconds; ``None``: no bound."""

    ranks: tuple[int, ...]
    max_restarts: int
    start_s: float | None
    grace_s: float
    kill_s: float
    freeze_s: float = 15.0  # until every rank says what it holds, its update's grace included
    dump_s: float = 20.0  # a dump without any progress for so long is stuck
    split: bool = False  # every rank that holds the state writes a part of it
    places: int = 2  # folders to try: the script's and the fallback
    stalls: int = 3  # attempts in a row without a new commit end the job
    restarts_explicit: bool = True  # else a failure before the first commit is not retried
    exit_s: float = 30.0  # for a graceful exit that a signal asks for, its dump included
    asked_exit_s: float = 600.0  # the same when nobody kills msrun soon
    dump: bool = (
        True  # after a failure, too, what is whole is saved on disk; at a stop it always is
    )
    replace: bool = True  # only what is lost is started again, where that can be
    can_replace_why: str = ""  # why this job's ranks cannot be replaced; empty: they can
    max_replacements: int = 20  # within the period
    replacement_period_s: float = 3600.0
    deaths: int = 3  # of one rank at one step: no more of them is replaced
    rejoin_s: float = 30.0  # for those that live on to leave the training function
    memory_writers: int = 8  # at most: a core touches 2 GB of memory a second, a GPU has its link
    join_s: float = 600.0  # for all to be in the new group of processes, newcomers too


class DumpProgress(NamedTuple):
    """One attempt to save: who was asked, what each holds, who wrote it where."""

    id: int  # never used again in a job
    asked: tuple[int, ...]
    freeze_s: float = 0.0  # how long answers are awaited
    answers: Mapping[int, protocol.Frozen] = _EMPTY  # the quickest first
    step: int = NEVER  # what is saved
    place: int = 0
    round: int = -1  # of the newest order to write
    writers: tuple[int, ...] = ()  # of that order; none: it failed
    writing: frozenset[int] = frozenset()  # those that have not finished
    digesting: frozenset[int] = frozenset()  # asked for a digest, not answered
    digests: Mapping[int, str] = _EMPTY
    written: Mapping[str, tuple[int, ...]] = _EMPTY  # in this place, by digest
    failed: Mapping[int, str] = _EMPTY  # never asked again; why
    is_slow: bool = False  # a writer was stuck in this place
    full: tuple[str, ...] = ()  # why places could not be written
    is_ordered: bool = False  # everything is written and its commit was ordered
    is_committed: bool = False
    variants: tuple[tuple[int, ...], ...] = ()  # who wrote what is committed
    odd: tuple[int, ...] = ()  # who differs from it
    since: int = 0  # digests of earlier orders are of another kind
    memory: str = ""  # where it is in memory
    remark: str = ""  # about replicas that differ


class ExitProgress(NamedTuple):
    """A graceful exit: all ranks stay at one step, it is saved, and they leave with 0."""

    why: str  # who asked for it
    grace_s: float  # for all to stay at one step and to save it
    standing: Mapping[int, int] = _EMPTY  # rank -> the step at whose end it stays
    step: int = NEVER  # what they agreed on
    is_held: bool = False  # all of them stay there
    spoiled: str = ""  # why they came to no common step
    leaving: frozenset[int] = frozenset()  # were told to leave


class MemoryState(NamedTuple):
    """A checkpoint that is complete, in memory that the agent owns."""

    path: str
    step: int


class Replacement(NamedTuple):
    """Lost ranks are started again, the others live on, and all go on from the memory."""

    why: str  # the failure that began it, in words
    lost: frozenset[int]  # in all rounds
    going: frozenset[int]  # have to be gone before a round begins
    is_killing: bool  # all of those were sent SIGKILL
    sentence: str = ""  # what people are told of the round
    newcomers: frozenset[int] = frozenset()  # of the round; none before the first
    leaving: frozenset[int] = frozenset()  # live on, and are not out of the training function yet
    joined: frozenset[int] = frozenset()  # are in the new group of processes
    doubt: str = ""  # an exception in it, perhaps a consequence of what is not known yet


class Job(NamedTuple):
    """Everything the controller remembers."""

    rules: Policy
    state: JobState = JobState.NEW
    attempt: int = 0  # grows with every restart and every replacement
    restarts: int = 0  # of all ranks
    replaced: int = 0  # ranks, within the period
    replaced_in_all: int = 0  # ranks, since the job began
    ranks: Mapping[int, RankState] = _EMPTY
    asked: str = ""  # the first request to stop, in words; empty: there was none
    requests: int = 0  # to stop by a signal, each less patient
    stop_signal: int | None = None  # the first signal that asked for a stop
    sent_signal: int = signals.SIGTERM  # what ranks that start late are stopped with
    failure: str | None = None  # why the present attempt failed, in words
    is_failure_raised: bool = False  # an exception, perhaps a consequence of what is not known yet
    # --- what ranks with hooks told in the present attempt
    guarded: Mapping[int, int] = _EMPTY  # rank -> its newest commit known
    raised: frozenset[int] = frozenset()  # held at their top
    first_raised: int | None = None
    hung: frozenset[int] = frozenset()  # were killed for it, and may not be gone yet
    unreachable: frozenset[int] = frozenset()
    exit: ExitProgress | None = None
    outcome: str = ""  # what became of the attempt's state, once it is known
    not_replaced: str = ""  # why all ranks are stopped for the failure of some, in words
    # --- since the last restart
    why_fixed: Mapping[int, str] = _EMPTY  # rank -> why it can join no other group; empty: it can
    reached: int = NEVER  # the newest commit before the last replacement
    replacement: Replacement | None = None  # the one under way
    memory: MemoryState | None = None  # what it goes on from
    remembers: bool = False  # the agent has memory for that, complete or not
    refusal: str = ""  # why nothing that was saved can be gone on from, in words
    refused: frozenset[int] = frozenset()  # were told so, and leave by themselves
    # --- what lasts
    dump: DumpProgress | None = None  # the newest
    resume: str | None = None  # the newest checkpoint folder to go on from
    saved_step: int = NEVER  # what it holds; known whenever ``resume`` is
    best_step: int = 0  # the newest commit that an earlier attempt reached; 0: none
    stalled: int = 0  # attempts in a row that reached no newer one
    has_hooks: bool = False  # some rank's state could be saved, ever
    deaths: Mapping[int, tuple[int, int]] = _EMPTY  # rank -> a step, how often it was lost there
    gave_up: str = ""  # why the job ended with restarts left, in words

    def alive(self) -> tuple[int, ...]:
        """Ranks that exist or may come to exist."""
        return tuple(rank for rank, state in self.ranks.items() if state.is_alive)

    def having(self, state: RankState) -> tuple[int, ...]:
        """Ranks in ``state``."""
        return tuple(rank for rank, now in self.ranks.items() if now is state)

    def reachable(self) -> tuple[int, ...]:
        """Ranks that exist and can be asked for their state."""
        return tuple(
            rank
            for rank in self.guarded
            if self.ranks[rank] is RankState.RUNNING
            and rank not in self.unreachable
            and rank not in self.hung
        )

    def with_rank(self, rank: int, state: RankState) -> Job:
        """The job once a rank is in ``state``."""
        return self._replace(ranks={**self.ranks, rank: state})

    def with_step(self, rank: int, step: int) -> Job:
        """The job once a rank with hooks is known to have committed ``step``."""
        known = self.guarded.get(rank, NEVER)
        return self._replace(guarded={**self.guarded, rank: max(step, known)}, has_hooks=True)

    def newest_step(self) -> int:
        """The newest commit that a rank is known to have reached since the last restart."""
        return max((self.reached, *self.guarded.values()))

    def requested(self, why: str, signum: int | None = None) -> Job:
        """The job once one more asked for a stop; only those by a signal are counted."""
        first = signum if self.stop_signal is None else self.stop_signal
        count = self.requests + (signum is not None)
        return self._replace(requests=count, asked=self.asked or why, stop_signal=first)

    def saves(self) -> bool:
        """Whether what is whole is to be saved on disk."""
        return self.rules.dump or bool(self.asked)

    def has_news(self) -> bool:
        """Whether a rank of this attempt is known to have reached what is not saved."""
        return self.newest_step() > max(self.saved_step, 0)

    def left_well(self) -> bool:
        """Whether a graceful exit was one to the end: all left with 0 at one step, it is saved."""
        return (
            self.exit is not None
            and self.exit.is_held
            and self.failure is None
            and self.exit.step <= max(self.saved_step, 0)
            and all(state is RankState.SUCCEEDED for state in self.ranks.values())
        )

    def resuming(self, path: str, step: int) -> Job:
        """The job once a checkpoint that holds ``step`` is known: only newer ones are progress."""
        best = max(self.best_step, step)
        return self._replace(resume=path, saved_step=step, best_step=best)

    def kept(self) -> str:
        """The checkpoint to go on from, in words; empty: there is none."""
        return "" if self.resume is None else f"step {self.saved_step} is saved in {self.resume}"


def first_job(spec: JobSpec) -> Job:
    """The job before anything happened."""
    dump, resume, replace = spec.dump, spec.dump.resume, spec.replace
    rules = Policy(
        ranks=spec.ranks_here,
        max_restarts=spec.max_restarts,
        start_s=spec.timeouts.start_s,
        grace_s=spec.timeouts.grace_s,
        kill_s=spec.timeouts.kill_s,
        freeze_s=dump.freeze_s + dump.update_grace_s,
        dump_s=dump.stall_s,
        split=dump.split,
        restarts_explicit=dump.restarts_explicit,
        exit_s=spec.timeouts.exit_s,
        asked_exit_s=spec.timeouts.asked_exit_s,
        dump=dump.after_failure,
        replace=replace.is_on,
        can_replace_why=replace.why_off,
        max_replacements=replace.most,
        replacement_period_s=replace.period_s,
    )
    if resume is None:
        return Job(rules)
    return Job(rules, resume=str(resume), saved_step=dump.resume_step)
