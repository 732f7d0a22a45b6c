"""The job as the controller remembers it: values without a decision in them. Pure.

Each lifetime is a value of its own. A new attempt, by restart or by replacement, begins with
``Attempt()``; a restart also with ``SinceRestart()``; everything else in :class:`Job` lasts.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.controller.states import JobState, RankState
from agent.ranks.note_costs import NoteCosts
from agent.ranks.parts import Groups, Parts
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from agent.ranks.rank_states import RankStates
from agent.ranks.refusals import Refusals
from agent.spec.device_plan import DevicePlan
from agent.spec.job_spec import JobSpec, Policy
from worker_hooks.contract import protocol
from worker_hooks.contract.fingerprint import Fingerprint

NEVER = -1  # the step of what does not exist
_EMPTY: Mapping[Any, Any] = {}


class DumpProgress(NamedTuple):
    """One attempt to save: who was asked, what each holds, who wrote it where."""

    id: int  # never used again in a job
    asked: RankSet
    freeze_s: float = 0.0  # how long answers are awaited
    answers: RankMap[protocol.Frozen] = RankMap()  # the quickest first
    reach: int = NEVER  # that ranks behind it were let go on to, once
    behind: RankSet = RankSet()  # those that have not answered again
    step: int = NEVER  # that is saved
    place: int = 0
    round: int = -1  # of the newest order to write
    # the following are seats: a rank that holds several parts of the state has one for each
    writers: tuple[int, ...] = ()  # of that order; none: it failed
    groups: Groups = ()  # the same by what they share in writing
    writing: RankSet = RankSet()  # those that have not finished
    digesting: RankSet = RankSet()  # asked for a digest, not answered
    digests: RankMap[str] = RankMap()
    written: Groups = ()  # who wrote one state together, to the end, in this place
    failed: RankMap[str] = RankMap()  # ranks that are never asked again; why
    is_slow: bool = False  # a writer was stuck in this place
    stuck: RankSet = RankSet()  # ranks that wrote or read too slowly
    why_no_memory: str = ""  # nothing more is tried there
    has_waited: bool = False  # for the ranks to report why replicas differ
    full: tuple[str, ...] = ()  # why places on disks could not be written
    is_ordered: bool = False  # everything is written and its commit was ordered
    is_committed: bool = False
    variants: Groups = ()  # the seats that wrote what is committed
    sides: Groups = ()  # whose state each of these is; none: there is one, of all ranks
    odd: tuple[int, ...] = ()  # ranks that differ from it
    since: int = 0  # digests of earlier rounds are of another kind
    memory: str = ""  # its path in memory
    is_copy: bool = False  # the newest copy in memory is written, and no rank is asked
    is_kept: bool = False  # what killed ranks have left is written
    remark: str = ""  # about replicas that differ
    is_disputed: bool = False  # they do so without a majority


class ExitProgress(NamedTuple):
    """A graceful exit: all ranks stay at one step, it is saved, and they exit with 0."""

    why: str  # who asked for it
    grace_s: float  # for all to stay at one step and to save it
    standing: RankMap[int] = RankMap()  # rank -> the step at whose end it stays
    step: int = NEVER  # that they agreed on
    is_held: bool = False  # all of them stay there
    interrupted: str = ""  # why they came to no common step
    leaving: RankSet = RankSet()  # were ordered to exit


class MemoryState(NamedTuple):
    """A checkpoint that is complete, in memory that the agent owns."""

    path: str
    step: int
    variants: Groups = ()  # the seats that wrote it
    sides: Groups = ()  # whose state each of these is; none: there is one, of all ranks
    odd: tuple[int, ...] = ()  # ranks that differed from it
    stale: tuple[int, ...] = ()  # ranks of which it holds what they alone had as of a step before


class Unwritten(NamedTuple):
    """The newest checkpoint is in memory, and on its way to its folder."""

    dump_id: int
    before: str | None  # the one before it, on the disk
    before_step: int
    why_not: str = ""  # it cannot be written; empty: it will be


class Copies(NamedTuple):
    """Copies of the state that are taken while training goes on."""

    newest: MemoryState | None = None
    every: int = 0  # steps from one to the next
    why_not: str = ""  # this job's state cannot be copied
    lost: str = ""  # that the newest is, and why, until there is another one


class Comparison(NamedTuple):
    """Which ranks have shown what they hold, and what came of it."""

    awaited: RankSet = RankSet()  # ranks that report what they hold
    reports: Mapping[int, RankMap[Fingerprint]] = _EMPTY  # step -> rank -> until all are there
    late: frozenset[int] = frozenset()  # those steps at which parts of the state came into being
    compared: int = NEVER  # the newest step at which all were compared
    unprotected: str = ""  # why no rank can save the state of another one
    groups: Groups = ()  # ranks that hold the same; none: all do, or unknown
    cuts: Mapping[str, Groups] = _EMPTY  # what not all hold the same -> the ranks that do
    values: frozenset[str] = frozenset()  # the names of what is no tensor there
    parts: Parts = Parts()  # what follows from these
    difference: str = ""  # what they do not hold the same, as text
    voting: Refusals = Refusals()  # who votes on updates, of those that were asked to
    uncounted: str = ""  # why no step is committed; empty again once ranks register their state
    holds: str = ""  # what was compared, as text: ``3 modules, 1 optimizer``


class UnconfirmedReplacement(NamedTuple):
    """A replacement after which the ranks have not shown yet that they hold the same."""

    step: int  # of the checkpoint in memory, to which all can return
    lost: RankSet
    failed: str = ""  # why they have to


class Replacement(NamedTuple):
    """Lost ranks are started again, the survivors live on, and all resume from the memory."""

    why: str  # the failure that began it
    lost: RankSet  # in all rounds
    going: RankSet  # have to be gone before a round begins
    is_killing: bool  # all of those were sent SIGKILL
    newcomers: RankSet = RankSet()  # of the round; none before the first
    leaving: RankSet = RankSet()  # survivors still inside the training function
    joined: RankSet = RankSet()  # are in the new process group
    doubt: str = ""  # an exception in it, perhaps the consequence of a death not known yet


class Repeated(NamedTuple):
    """The newest failure of the script's own, and how often in a row it was met at one step."""

    step: int = NEVER
    failure: str = ""
    times: int = 0


class Attempt(NamedTuple):
    """What is known of the present attempt."""

    failure: str | None = None  # why it failed
    is_failure_raised: bool = False  # by an exception, perhaps the consequence of an unknown death
    registered: RankMap[int] = RankMap()  # rank whose state can be saved -> its newest commit
    raised: RankSet = RankSet()  # ranks that are held at their top
    first_raised: int | None = None
    failures: RankMap[str] = RankMap()  # rank -> its exception, or its exit code and last words
    futile: str = ""  # of those, one that a new rank would meet, too
    hung: RankSet = RankSet()  # were killed for it, and may not be gone yet
    left_amid: RankMap[str] = RankMap()  # rank that exited with 0 amid a step -> where
    unreachable: RankSet = RankSet()
    kept: RankMap[tuple[int, ...]] = RankMap()  # dead rank -> the steps that its memory holds
    is_kept_next: bool = False  # the others are killed so that theirs can be read, too
    exiting: RankSet = RankSet()  # their scripts have ended: they cannot train again
    sent_signal: int = signals.SIGTERM  # stops ranks that start late, too
    exit: ExitProgress | None = None
    outcome: str = ""  # what became of the attempt's state, once it is known
    not_replaced: str = ""  # why all ranks are stopped for the failure of some
    refusal: str = ""  # why no checkpoint can be resumed from
    refused: RankSet = RankSet()  # ranks that got this answer, and exit by themselves


class SinceRestart(NamedTuple):
    """What survives a replacement, but no restart of all ranks."""

    rejoining: Refusals = Refusals()  # who can join a new process group
    rehearses: bool = False  # a newcomer runs its script alone, up to run()
    reached: int = NEVER  # the newest commit before the last replacement, or that is in a copy
    is_warm: bool = False  # the forkserver was ordered to import what others will need
    replacement: Replacement | None = None  # the one under way
    comparison: Comparison = Comparison()
    trial: UnconfirmedReplacement | None = None  # of the last replacement, until it is confirmed
    copies: Copies = Copies()
    keeping: RankSet = RankSet()  # ranks whose memory outlives them
    without_node: RankSet = RankSet()  # ranks lost with their node, until all have joined again
    notes: NoteCosts = NoteCosts()  # where the state lies in it, if nobody has asked for them
    not_kept: str = ""  # why, if nobody has, none is or can be read


class Shadowed(NamedTuple):
    """Sleeping copies of all ranks, of one optimizer step, from which all can go on."""

    step: int = NEVER  # all of them are of this one
    why_not: str = ""  # there are none, or no newer ones
    woken: int = NEVER  # the step from which all went on last
    times: int = 0  # in a row that they did so from there
    every: int = 0  # steps from one to the next, as it was last; 0: not known
    was_old: bool = False  # that there were no newer ones was so once, and said


class StopRequests(NamedTuple):
    """Who asked the job to stop, and how often."""

    why: str = ""  # the first request for its end, else the newest; empty: there was none
    is_resize: bool = False  # that is: the job goes on behind it, with another size
    is_to_end: bool = False  # somebody wants it to end, by a signal or a file
    ranks: RankSet = RankSet()  # that have asked, which is for its end unless their node leaves
    signals: int = 0  # requests by a signal, each less patient; at one node, the most of all
    signum: int | None = None  # the first of those signals
    nodes: tuple[int, ...] = ()  # where each of them came


class Job(NamedTuple):
    """Everything the controller remembers."""

    policy: Policy
    state: JobState = JobState.NEW
    attempt: int = 0  # its number; grows with every restart and every replacement
    ranks: RankStates[RankState] = RankStates({})
    now: Attempt = Attempt()
    since_restart: SinceRestart = SinceRestart()
    stop: StopRequests = StopRequests()
    restarts: int = 0  # of all ranks
    failed: str = ""  # why the attempt before the last restart failed
    replaced: int = 0  # ranks, and lost nodes as one each, within the period
    replaced_in_all: int = 0  # ranks, since the job began
    deaths: RankMap[tuple[int, int]] = RankMap()  # rank -> a step, how often it was lost there
    repeated: Repeated = Repeated()
    dump: DumpProgress | None = None  # the newest
    memory: MemoryState | None = None  # what a replacement resumes from
    remembers: bool = False  # the agent has memory for that, complete or not
    resume: str | None = None  # the newest checkpoint folder
    saved_step: int = NEVER  # that it holds; known whenever ``resume`` is
    is_disputed: bool = False  # replicas disagreed about what it holds, so none resumes from it
    unwritten: Unwritten | None = None  # it is in memory until it is written; None: it is written
    best_step: int = 0  # the newest commit that an earlier attempt reached; 0: none
    stalled: int = 0  # attempts in a row that reached no newer one
    has_hooks: bool = False  # some rank's state could be saved, ever
    gave_up: str = ""  # why the job ended with restarts left
    lost_node: str = ""  # why a node is lost; empty: all are there
    apart: str = ""  # why nodes save into different folders; empty: they do not, or unknown
    diverged: str = ""  # what differed after a replacement; empty: nothing ever did
    differing: frozenset[str] = frozenset()  # values of the script's own, with their prefixes
    devices: DevicePlan = DevicePlan()  # the list for ranks that start now
    shadows: Shadowed = Shadowed()

    def alive(self) -> RankSet:
        """Ranks that exist or may come to exist."""
        return self.ranks.in_state(RankState.PENDING, RankState.RUNNING)

    def having(self, state: RankState) -> RankSet:
        """Ranks in ``state``."""
        return self.ranks.in_state(state)

    def reachable(self) -> RankSet:
        """Ranks that exist and can be asked for their state."""
        now = self.now
        running = self.ranks.in_state(RankState.RUNNING)
        return running & now.registered.ranks - now.unreachable - now.hung

    def without_node(self, why: str) -> Job:
        """The job once a node is gone because of ``why``, if that is not empty."""
        is_final = bool(why) and not self.policy.replace.node_wait_s
        return self._replace(lost_node=self.lost_node or why) if is_final else self

    def with_rank(self, rank: int, state: RankState) -> Job:
        """The job once a rank is in ``state``."""
        return self._replace(ranks=self.ranks.set(rank, state))

    def with_step(self, rank: int, step: int) -> Job:
        """The job once a rank whose state can be saved is known to have committed ``step``."""
        return self.with_steps({rank: step})

    def with_steps(self, steps: Mapping[int, int]) -> Job:
        """The same of several ranks."""
        known = self.now.registered
        news = {
            rank: max(step, NEVER)
            for rank, step in steps.items()
            if (was := known.get(rank)) is None or was < step
        }
        if not news:
            return self
        now, since = self.now._replace(registered=known.with_all(news)), self.since_restart
        if since.comparison.uncounted:
            since = since._replace(comparison=since.comparison._replace(uncounted=""))
        return self._replace(now=now, since_restart=since, has_hooks=True)

    def with_failure(self, why: str, *, is_raised: bool = False) -> Job:
        """The job once this is why the attempt failed."""
        return self._replace(now=self.now._replace(failure=why, is_failure_raised=is_raised))

    def with_own_failure(self, rank: int, what: str) -> Job:
        """The job once a rank is known to have failed in this way, not by a signal or a hang."""
        if rank in self.now.failures:  # the exception, then the exit it leads to
            return self
        return self._replace(now=self.now._replace(failures=self.now.failures.set(rank, what)))

    def with_exit(self, exit_: ExitProgress) -> Job:
        """The job once its graceful exit has come so far."""
        return self._replace(now=self.now._replace(exit=exit_))

    def with_replacement(self, replacement: Replacement | None) -> Job:
        """The job once its replacement has come so far; ``None``: there is none any more."""
        return self._replace(since_restart=self.since_restart._replace(replacement=replacement))

    def requested(
        self, why: str, signum: int | None = None, node: int = 0, *, goes_on: bool = False
    ) -> Job:
        """The job after one more request to stop; only those by a signal are counted.

        A batch system sends its signal to all nodes: that is one request.

        Args:
            why: it is asked for, as text.
            signum: by which; ``None``: by none.
            node: whose msrun got it.
            goes_on: the job does behind it, with another size.
        """
        stop = self.stop
        if stop.is_resize and not goes_on:  # else the exit code would tell of it
            stop = stop._replace(signum=None)
        if stop.is_resize or not stop.why or (goes_on and not stop.is_to_end):
            stop = stop._replace(why=why, is_resize=goes_on)
        stop = stop._replace(is_to_end=stop.is_to_end or not goes_on)
        if signum is not None:
            first = signum if stop.signum is None else stop.signum
            count = stop.signals + (stop.nodes.count(node) >= stop.signals)
            stop = stop._replace(signals=count, signum=first, nodes=(*stop.nodes, node))
        return self._replace(stop=stop)

    def requested_by(self, rank: int, why: str) -> Job:
        """The job after a rank has asked for its end; all may do so at once."""
        stop = self.stop
        stop = stop._replace(why=stop.why or why, ranks=stop.ranks | {rank})
        return self._replace(stop=stop)

    def resuming(self, path: str, step: int) -> Job:
        """The job once a checkpoint that holds ``step`` is known: only newer ones are progress."""
        best = max(self.best_step, step)
        return self._replace(
            resume=path, saved_step=step, is_disputed=False, unwritten=None, best_step=best
        )

    def with_saved(self, dump: DumpProgress, path: str, *, is_early: bool) -> Job:
        """The job once what a dump has saved is the newest checkpoint; ``is_early``: in memory."""
        saved = self._replace(
            resume=path, saved_step=dump.step, is_disputed=dump.is_disputed, unwritten=None
        )
        if not is_early:
            return saved
        known = self.unwritten or Unwritten(dump.id, self.resume, self.saved_step)
        return saved._replace(unwritten=known._replace(dump_id=dump.id, why_not=""))

    def with_written(self, dump_id: int, step: int, path: str, why_not: str) -> Job:
        """The job once a checkpoint that was in memory alone is written, or cannot be."""
        known = self.unwritten
        if known is None:
            return self
        if dump_id != known.dump_id:  # the newest is still on its way
            if why_not or step <= known.before_step:
                return self
            return self._replace(unwritten=known._replace(before=path, before_step=step))
        if why_not:
            return self._replace(unwritten=known._replace(why_not=why_not))
        return self._replace(resume=path, unwritten=None)

    def present_dump(self) -> DumpProgress:
        """The newest dump; there must be one."""
        assert self.dump is not None
        return self.dump

    def present_exit(self) -> ExitProgress:
        """The graceful exit; there must be one."""
        assert self.now.exit is not None
        return self.now.exit

    def present_replacement(self) -> Replacement:
        """The replacement under way; there must be one."""
        assert self.since_restart.replacement is not None
        return self.since_restart.replacement

    def present_memory(self) -> MemoryState:
        """The complete checkpoint in memory; there must be one."""
        assert self.memory is not None
        return self.memory

    def newest_step(self) -> int:
        """The newest commit that a rank is known to have reached since the last restart."""
        return max((self.since_restart.reached, *self.now.registered.values()))

    def is_saved(self, step: int) -> bool:
        """Whether the newest checkpoint holds ``step`` or a newer one; nobody needs step 0."""
        return step <= max(self.saved_step, 0)

    def has_news(self) -> bool:
        """Whether a rank of this attempt is known to have reached what is not saved."""
        return not self.is_saved(self.newest_step())

    def saves(self) -> bool:
        """Whether what is whole is to be saved on disk."""
        return self.policy.dump.after_failure or bool(self.stop.why)

    def left_well(self) -> bool:
        """Whether a graceful exit is complete: all exited with 0 at one step, and it is saved."""
        exit_ = self.now.exit
        return (
            exit_ is not None
            and exit_.is_held
            and self.now.failure is None
            and not self.is_disputed
            and self.is_saved(exit_.step)
            and len(self.having(RankState.SUCCEEDED)) == len(self.ranks)
        )

    def kept(self) -> str:
        """The newest checkpoint as text; empty: there is none."""
        if self.resume is None:
            return ""
        where, unwritten = f"saved in {self.resume}", self.unwritten
        if unwritten is not None:
            where = f"in memory, and is being {where}"
            if unwritten.why_not:
                where = f"in memory only ({unwritten.why_not})"
        return f"step {self.saved_step} is {where}"

    @property
    def on_disk(self) -> str | None:
        """The newest checkpoint that is on the disk, or will be; ``None``: there is none."""
        unwritten = self.unwritten
        is_lost = unwritten is not None and bool(unwritten.why_not)
        return unwritten.before if unwritten is not None and is_lost else self.resume


def first_job(spec: JobSpec) -> Job:
    """The job before anything happened."""
    job, adopted, begun = Job(spec.policy, devices=spec.devices), spec.adopted, spec.dump
    job = job._replace(
        restarts=spec.spent.restarts,
        replaced=len(spec.spent.replaced_at_s),
        replaced_in_all=spec.spent.replaced,
    )
    if adopted is not None:
        job = job._replace(attempt=adopted.attempt)
    if adopted is not None and adopted.resume is not None:
        return job._replace(resume=str(adopted.resume), saved_step=adopted.resume_step)
    if begun.resume is None:
        return job
    return job._replace(resume=str(begun.resume), saved_step=begun.resume_step)
