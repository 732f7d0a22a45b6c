"""Decides for the job: events in, actions with a reason out.

Pure: no I/O, no clock, no randomness; the job is a value and every decision returns a new one. That
is why a recorded history can be replayed and random schedules simulated. Theory in six lines:

* the first failure is the reason for everything after it; the others are consequences. Only an
  exception is replaced as root cause by a death reported shortly after it: the exception may be its
  consequence;
* after a failure the ranks that hold the state save it, then: stop (signal, grace) -> kill
  (SIGKILL) -> gone; then restart if the budget allows, else fail;
* where possible, the state is saved in memory, and only the lost ranks are started again;
* the first request to stop is polite, the last one means now;
* nothing is ever ordered for a rank that is not alive, and no attempt starts before the last one
  has no rank alive.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple, cast

from agent.controller import actions as do
from agent.controller import dump, graceful_exit, replacement, replication
from agent.controller import events as ev
from agent.controller.attempts import (
    FAILED_EXIT,
    Decision,
    all_gone,
    begin,
    kill,
    leave_s,
    move,
    release,
    signal_ranks,
    stop,
    succeed,
)
from agent.controller.drain import (
    DRAINING,
    absorb_digests,
    absorb_frozen,
    absorb_raised,
    apply,
    give_up,
    gone,
    hear_of_dump,
    interrupt_hold,
    is_stale,
    rank_lost,
)
from agent.controller.job import NEVER, Job
from agent.controller.messages import sentence, tone
from agent.controller.replaceable import (
    blame_left_amid,
    note_lost_node,
    note_own_failure,
    note_raised,
)
from agent.controller.restart_policy import describe_outcome
from agent.controller.states import Condition, JobState, RankState
from agent.controller.stop_requests import exit_requested, is_leaving, stop_requested
from agent.ranks.rank_set import RankSet
from agent.spec.job_spec import CopyMode
from agent.text.tone import Tone
from agent.text.wording import describe_exit, listed, signal_name
from worker_hooks.contract import protocol
from worker_hooks.contract.fingerprint import UNSEEN, is_of_anew, is_of_unseen
from worker_hooks.contract.peer_lost import says_peer_lost, with_consequence

# what the ranks hold may still become another step that is saved
_OPEN = frozenset({JobState.RUNNING, JobState.HOLDING, JobState.FREEZING, JobState.DUMPING})


def decide(job: Job, event: ev.Event) -> Decision:
    """Answer one event.

    Events of a past attempt, about a rank that already ended, or after the end, change nothing.

    Raises:
        KeyError: the event cannot happen in this state; a bug in the caller or in the table.
    """
    if job.state.is_end or _is_stale(job, event):
        return Decision(job)
    if isinstance(event, ev.WorkerExited) and event.fault:
        job = job._replace(devices=job.devices.failed(event.rank, event.fault))
    if isinstance(event, ev.WorkerExited | ev.StartFailed) and event.lost:
        job = note_lost_node(replication.lose_copy(job), event.rank)
    if job.state is JobState.REPLACING and isinstance(event, replacement.Event):
        after = apply(event, replacement.hear(job, event))
    else:
        after = _answer(job, event)
    actions = after.actions
    after_job, freed = replacement.forget(after.job)
    after_job, warmed = _warm_up(job, event, after_job)
    say = sentence(job, after_job, actions)
    tone_of_it = tone(job, after_job, actions) if say else Tone.PLAIN
    return Decision(after_job, freed + actions + warmed, say, tone_of_it)


Answer = (
    protocol.Raised
    | protocol.Frozen
    | protocol.Digested
    | protocol.Rejoining
    | protocol.Registered
    | protocol.Fingerprinted
)
"""What thousands of ranks say one after the other when one of them has died."""


class _Row(NamedTuple):
    """Answers of one kind, about one step."""

    kind: tuple[type[Answer], int | None]
    answers: list[Answer]
    ranks: set[int]


def in_rows(answers: Iterable[Answer]) -> list[Answer]:
    """The same by kinds, but those of each rank in the order in which it gave them.

    Ranks do not wait for each other: one's second answer comes among others' first ones.
    """
    rows: list[_Row] = []
    for one in answers:
        kind, found = (type(one), getattr(one, "step", None)), None
        for row in reversed(rows):
            found = row if row.kind == kind else found
            if one.rank in row.ranks:
                break
        if found is None:
            found = _Row(kind, [], set())
            rows.append(found)
        found.answers.append(one)
        found.ranks.add(one.rank)
    return [one for row in rows for one in row.answers]


def absorb(job: Job, answers: Sequence[Answer]) -> tuple[Job, int]:
    """Take answers of one kind from which nothing follows, because others are awaited.

    For each of them :func:`decide` would do the same, and take a hundred times as long. What it
    would do as well is that a :class:`protocol.Digested` moves the deadline: so the last one of a
    row is for :func:`decide`.

    Returns:
        The job after them, and how many it has taken, from the first one on.
    """
    match answers[0]:
        case protocol.Raised():
            return absorb_raised(job, cast("Sequence[protocol.Raised]", answers))
        case protocol.Fingerprinted():
            return replication.absorb(job, cast("Sequence[protocol.Fingerprinted]", answers))
        case protocol.Frozen():
            return absorb_frozen(job, cast("Sequence[protocol.Frozen]", answers))
        case protocol.Digested():
            return absorb_digests(job, cast("Sequence[protocol.Digested]", answers))
        case protocol.Rejoining():
            return replacement.absorb_rejoining(job, cast("Sequence[protocol.Rejoining]", answers))
        case protocol.Registered():
            return replacement.absorb_registered(
                job, cast("Sequence[protocol.Registered]", answers)
            )


def _warm_up(before: Job, event: ev.Event, job: Job) -> tuple[Job, tuple[do.Action, ...]]:
    """Prepare once for other ranks, as soon as it is known that they may be started."""
    is_started = before.state is JobState.STARTING and job.state is JobState.RUNNING
    if is_started and job.restarts < job.policy.max_restarts:
        reason = "every rank has started, and a restart may follow"
    elif (
        isinstance(event, protocol.Registered)
        and not event.not_replaceable_why
        and job.policy.replace.is_on
    ):
        reason = f"rank {event.rank} can join other ranks, which may be replaced"
    else:
        return job, ()
    if job.since_restart.is_warm:
        return job, ()
    warm = job.since_restart._replace(is_warm=True)
    return job._replace(since_restart=warm), (do.WarmUp(reason),)


def _is_stale(job: Job, event: ev.Event) -> bool:  # noqa: C901, PLR0912  a row for each kind
    """Whether an event is about what is over: an attempt, a rank that ended, another dump."""
    if isinstance(
        event, dump.DumpEvent
    ):  # no two dumps have the same id: it tells the attempt, too
        return is_stale(job, event)
    match event:
        case ev.LaunchRequested() | ev.StopRequested() | ev.SignalReceived() | ev.ReplacementAged():
            return False
        case ev.CheckpointWritten() | ev.FolderApart():
            return False
        case _ if event.attempt != job.attempt:
            return True
        case ev.ExitRequestedByFile():
            return False
        case ev.DeadlinePassed():
            return event.state is not job.state
        case ev.WorkerStarted() | ev.StartFailed():
            return job.ranks[event.rank] is not RankState.PENDING
        case protocol.Raised() if event.rank in job.now.raised:
            return True
        case (
            ev.WorkerExited()
            | ev.RankUnreachable()
            | ev.RankExiting()
            | protocol.Registered()
            | protocol.Fingerprinted()
            | protocol.VoteOpened()
            | protocol.NotesMeasured()
            | protocol.Raised()
            | protocol.ExitRequested()
        ):
            return not job.ranks[event.rank].is_alive
        case ev.RankHung():
            return not _is_suspect(job, event)
        case protocol.Rejoining():
            return not replacement.is_awaited(job, event)
        case ev.CheckpointFound():  # what was saved meanwhile, or is about to be, is newer
            is_older = job.resume is not None and event.step <= job.saved_step
            return is_older or job.state in {*DRAINING, JobState.REPLACING}
        case ev.StartRefused():
            return job.state not in {JobState.STARTING, JobState.RUNNING}
        case ev.ShadowsChanged():
            return False
        case ev.StateCopied():
            return job.state not in _OPEN or not _is_newer_copy(job, event)


def _answer(job: Job, event: ev.Event) -> Decision:  # noqa: C901, PLR0912  as above
    match event:
        case ev.LaunchRequested():
            job = job._replace(best_step=max(job.best_step, job.saved_step))
            return begin(move(job, event, Condition.ALWAYS), "the job begins")
        case ev.WorkerStarted():
            return _worker_started(job, event)
        case ev.StartFailed():
            return _start_failed(job, event)
        case ev.WorkerExited():
            return _worker_exited(job, event)
        case ev.StopRequested():
            return stop_requested(job, event)
        case ev.ExitRequestedByFile() | protocol.ExitRequested():
            return exit_requested(job, event)
        case ev.SignalReceived():
            moved = move(job, event, Condition.ALWAYS)
            why = f"msrun received {signal_name(event.signum)}, which is for the workers"
            return Decision(moved, signal_ranks(moved.having(RankState.RUNNING), event.signum, why))
        case ev.DeadlinePassed():
            return _deadline_passed(job, event)
        case ev.ReplacementAged():
            return Decision(job._replace(replaced=max(job.replaced - 1, 0)))
        case ev.CheckpointFound():
            return Decision(job.resuming(event.path, event.step))
        case ev.CheckpointWritten():
            after = job.with_written(*astuple(event))
            outcome = after.now.outcome.replace(job.kept(), after.kept()) if job.kept() else ""
            return Decision(after._replace(now=after.now._replace(outcome=outcome)))
        case ev.StateCopied():
            return Decision(replication.note_copy(job, event))
        case ev.FolderApart():
            return Decision(job._replace(apart=job.apart or event.why))
        case ev.ShadowsChanged():
            every = event.every or (job.shadows.every if event.step >= 0 else 0)
            shadows = job.shadows._replace(step=event.step, why_not=event.why, every=every)
            was_old = shadows.was_old or (event.step >= 0 and bool(event.why))
            return Decision(job._replace(shadows=shadows._replace(was_old=was_old)))
        case ev.StartRefused():
            return _start_refused(job, event)
        case ev.RankHung():
            return _rank_hung(job, event)
        case ev.RankUnreachable():
            return _rank_unreachable(job, event)
        case ev.RankExiting():
            now = job.now._replace(exiting=job.now.exiting | {event.rank})
            return Decision(job._replace(now=now))
        case protocol.Registered():
            return Decision(replacement.with_registered(job, event))
        case protocol.Fingerprinted():
            return _fingerprinted(job, event)
        case protocol.VoteOpened():
            return Decision(replication.note_vote(job, event))
        case protocol.NotesMeasured():
            return _notes_measured(job, event)
        case protocol.Raised():
            return _rank_raised(job, event)
        case protocol.Rejoining():  # for a replacement that is over
            return Decision(job)
        case _:
            return hear_of_dump(job, event)


def _worker_started(job: Job, event: ev.WorkerStarted) -> Decision:
    job = job.with_rank(event.rank, RankState.RUNNING)
    if job.state is JobState.STARTING:
        awaited = bool(job.having(RankState.PENDING))
        return Decision(
            move(job, event, Condition.RANKS_AWAITED if awaited else Condition.ALL_STARTED)
        )
    moved = move(job, event, Condition.ALWAYS)
    if job.state is JobState.COMMITTING:  # stopped soon, with all others
        return Decision(moved)
    # its start was on the way when the stop was decided
    signum = signals.SIGKILL if job.state is JobState.KILLING else job.now.sent_signal
    why = f"rank {event.rank} came to life while the job is {job.state.value}"
    return Decision(moved, signal_ranks((event.rank,), signum, why))


def _start_failed(job: Job, event: ev.StartFailed) -> Decision:
    job = job.with_rank(event.rank, RankState.FAILED)
    job = job._replace(lost_node=job.lost_node or event.lost)
    if job.state is JobState.COMMITTING:
        return Decision(move(job, event, Condition.ALWAYS))
    if job.state is not JobState.STARTING:
        return _stopped(job, event)
    reason = f"rank {event.rank} could not be started: {event.why}"
    job = job._replace(now=job.now._replace(failure=reason))
    if job.alive():
        return stop(move(job, event, Condition.RANK_FAILED), signals.SIGTERM, reason)
    return all_gone(job, event)


def _worker_exited(job: Job, event: ev.WorkerExited) -> Decision:
    if event.is_over and job.state is JobState.RUNNING:  # nothing of it is missing
        event = replace(event, exit_code=0)
    rank, exit_code = event.rank, event.exit_code
    job = _known_alive(job, rank, event.attempt)
    how = f"rank {rank} {_describe_end(event)}"
    job = job.without_node(event.lost)
    is_stopping = job.state in {JobState.STOPPING, JobState.KILLING}
    is_ordered = is_stopping and rank not in job.now.raised
    if exit_code and is_ordered and job.state is JobState.STOPPING and is_leaving(job, rank):
        is_ordered = False
        failure = job.now.failure or f"{how} when it was ordered to exit"
        job = job._replace(now=job.now._replace(failure=failure))
    job = note_own_failure(job, event)
    ended = RankState.STOPPED if is_ordered else RankState.FAILED
    job = job.with_rank(rank, ended if exit_code else RankState.SUCCEEDED)
    if event.step is not None:
        job = job.with_step(rank, event.step)
    job = _with_remains(job, event)
    match job.state:
        case JobState.STOPPING | JobState.KILLING:
            return _stopped(job, event)
        case JobState.STARTING | JobState.RUNNING if exit_code:
            return _rank_failed(job.with_failure(how), event, how, event.error)
        case JobState.STARTING:
            return Decision(move(job, event, Condition.RANKS_AWAITED))
        case JobState.RUNNING if job.alive():
            return Decision(move(job, event, Condition.RANKS_ALIVE))
        case JobState.RUNNING:
            return succeed(job, event)
        case _:
            return rank_lost(job, event)


def _with_remains(job: Job, event: ev.WorkerExited) -> Job:
    """The job once it is known where a rank ended, and what is left in its memory."""
    now = job.now
    if event.kept:
        now = now._replace(kept=now.kept.set(event.rank, event.kept))
    if event.amid:
        now = now._replace(left_amid=now.left_amid.set(event.rank, event.amid))
    return job._replace(now=now)


def _describe_end(event: ev.WorkerExited) -> str:
    if event.lost:
        return f"is lost: {event.lost}"
    return describe_exit(event.exit_code, event.error)


def _stopped(job: Job, event: ev.WorkerExited | ev.StartFailed) -> Decision:
    """While stopping or killing: one rank less."""
    if job.alive():
        return Decision(move(job, event, Condition.RANKS_ALIVE))
    return gone(job, event)


def _known_alive(job: Job, rank: int, attempt: int) -> Job:
    """The job once a rank exists: it may be heard of before its start is announced."""
    if job.ranks[rank] is RankState.PENDING:
        return _worker_started(job, ev.WorkerStarted(rank, attempt, 0)).job
    return job


def _rank_failed(
    job: Job, event: ev.WorkerExited | protocol.Raised | ev.RankHung, reason: str, error: str
) -> Decision:
    """The first failure: save what the others hold, or stop them.

    ``error``: what the rank said; if it lost a peer that exited with 0 amid a step, that one is
    to blame, although its exit looked like success.
    """
    if job.now.left_amid and says_peer_lost(error):
        job, reason = blame_left_amid(job, reason)
    if job.state is JobState.RUNNING and job.reachable():
        return apply(event, dump.freeze(job, reason))
    if job.state is JobState.RUNNING and job.has_news():
        job = dump.note_lost_step(job)
        if replication.unsaved_copy(job) or replication.kept_state(job):
            return give_up(job, event)
    if job.alive():
        # a rank that goes on from its shadow repeats what it does now: it must not do more of it
        signum = signals.SIGTERM if job.shadows.step == NEVER else signals.SIGKILL
        return stop(move(job, event, Condition.RANK_FAILED), signum, reason)
    return all_gone(job, event)


def _rank_unreachable(job: Job, event: ev.RankUnreachable) -> Decision:
    job = job._replace(now=job.now._replace(unreachable=job.now.unreachable | {event.rank}))
    match job.state:
        case JobState.HOLDING:
            return interrupt_hold(job, event, f"rank {event.rank} let go of its state")
        case JobState.FREEZING:
            return apply(event, dump.choose(job))
        case JobState.DUMPING:
            return apply(event, dump.note_loss(job, event.rank, "let go of its state"))
        case _:
            return Decision(job)


def _rank_raised(job: Job, event: protocol.Raised) -> Decision:
    rank, reason = event.rank, f"rank {event.rank} raised {event.error}"
    if job.state in {JobState.STOPPING, JobState.KILLING}:  # nothing is saved any more
        return Decision(move(job, event, Condition.ALWAYS), release((rank,), reason))
    job = _known_alive(job, rank, event.attempt)
    job = note_raised(job, (event,))
    if job.now.failure is None:
        job = job.with_failure(reason, is_raised=True)
        job = job._replace(now=job.now._replace(first_raised=rank))
    if job.state in DRAINING:
        return Decision(move(job, event, Condition.ALWAYS))
    if job.state is JobState.HOLDING:
        return interrupt_hold(job, event, reason)
    return _rank_failed(job, event, reason, event.error)


def _fingerprinted(job: Job, event: protocol.Fingerprinted) -> Decision:
    if is_of_anew(event.texts):  # which is no matter of what the ranks hold
        return Decision(job._replace(differing=job.differing | event.texts.keys()))
    if is_of_unseen(event.texts):
        until = event.texts.keys() - {UNSEEN}
        others = {each for each in job.differing if until or not each.startswith(UNSEEN)}
        return Decision(job._replace(differing=frozenset(others | until)))
    after = replication.note(job, event)
    if replication.has_just_failed(job, after) and job.state in _OPEN:
        return apply(event, replacement.undo(after))
    return Decision(after)


def _is_newer_copy(job: Job, event: ev.StateCopied) -> bool:
    """Whether it is news: of a copy, or that there will be none."""
    newest = job.since_restart.copies.newest
    return bool(event.why_not) or newest is None or event.step > newest.step


def _notes_measured(job: Job, event: protocol.NotesMeasured) -> Decision:
    """A rank said what its notes of where the state lies take, or why they are of no use.

    If they are too dear, no rank is to make them any more. While a death is under way they go on,
    whatever they cost: they may be all that holds a step.
    """
    since = job.since_restart
    if job.policy.dump.copies is not CopyMode.AUTO:
        return Decision(job)
    why = since.not_kept or event.why_not
    if not event.why_not:
        notes = since.notes.told(event.rank, event.cost_s, event.step_s)
        since = since._replace(notes=notes)
        why = why or notes.why_too_dear(RankSet(job.ranks))
    job = job._replace(since_restart=since._replace(not_kept=why))
    if not why or job.state is not JobState.RUNNING or job.now.kept:
        return Decision(job)
    ranks = job.having(RankState.RUNNING) if since.keeping else (event.rank,)
    told = do.Tell(tuple(ranks), protocol.EndNotes(why), why)
    job = job._replace(since_restart=job.since_restart._replace(keeping=RankSet()))
    return Decision(job, (told,))


def _is_suspect(job: Job, event: ev.RankHung) -> bool:
    """Whether a rank that hangs is in the way: not if it answers, or saves the state."""
    rank = event.rank
    if not job.ranks[rank].is_alive or rank in job.now.hung:
        return False
    if job.state is JobState.FREEZING:
        return rank not in job.present_dump().answers and _has_others(job, rank)
    return job.state in {JobState.STARTING, JobState.RUNNING, JobState.HOLDING}


def _has_others(job: Job, rank: int) -> bool:
    return any(other != rank for other in job.reachable())


def _rank_hung(job: Job, event: ev.RankHung) -> Decision:
    """Kill it, unless no other rank holds the state: then save that first."""
    rank, reason = event.rank, f"rank {event.rank} {event.why}"
    job = _known_alive(job, rank, event.attempt)
    if event.is_mutual:
        job = replication.note_mutual_wait(job)
    killed: tuple[do.Action, ...] = ()
    if _has_others(job, rank) or rank not in job.reachable():
        job = job._replace(now=job.now._replace(hung=job.now.hung | {rank}))
        killed = signal_ranks((rank,), signals.SIGKILL, reason)
    if job.now.failure is None:
        job = job.with_failure(reason)
    elif job.now.is_failure_raised:
        job = job.with_failure(with_consequence(reason, job.now.failure))
    match job.state:
        case JobState.HOLDING:
            after = interrupt_hold(job, event, reason)
        case JobState.FREEZING:
            after = apply(event, dump.choose(job))
        case _:
            after = _rank_failed(job, event, reason, "")
    return Decision(after.job, killed + after.actions)


def _start_refused(job: Job, event: ev.StartRefused) -> Decision:
    """Refuse the ranks that asked, stop the others; a restart would meet the same."""
    for rank in event.ranks:
        if job.ranks[rank].is_alive:
            job = _known_alive(job, rank, event.attempt)
    refused = tuple(rank for rank in event.ranks if job.ranks[rank] is RankState.RUNNING)
    now = job.now._replace(failure=event.why, refusal=event.why, refused=RankSet(refused))
    moved = move(job._replace(now=now), event, Condition.ALWAYS)
    after = stop(moved, signals.SIGTERM, event.why)
    actions = (do.RefuseRanks(refused, event.why),) if refused else ()
    return Decision(after.job, (*actions, *after.actions))


def _deadline_passed(job: Job, event: ev.DeadlinePassed) -> Decision:
    match event.state:
        case JobState.HOLDING:
            return interrupt_hold(job, event, graceful_exit.describe_delay(job))
        case JobState.FREEZING:
            return apply(event, dump.choose(job, is_late=True))
        case JobState.DUMPING:
            return apply(event, dump.blame_stuck(job))
        case JobState.COMMITTING:
            return apply(event, dump.give_up_commit(job))
        case _:
            return _wait_ended(job, event)


def _wait_ended(job: Job, event: ev.DeadlinePassed) -> Decision:
    moved, timeouts = move(job, event, Condition.ALWAYS), job.policy.timeouts
    match event.state:
        case JobState.STARTING:
            late = listed(job.having(RankState.PENDING))
            reason = f"{late} did not start within {timeouts.start_s:g} s (--cluster-time-out)"
            moved = moved._replace(now=moved.now._replace(failure=reason))
            return stop(moved, signals.SIGTERM, reason)
        case JobState.STOPPING:
            return _kill_late(moved)
        case _:
            stuck = f"{listed(job.alive())} cannot be killed (waited {timeouts.kill_s:g} s)"
            failure = stuck if job.now.failure is None else f"{job.now.failure}; {stuck}"
            reason = f"{failure}{describe_outcome(job)}"
            moved = moved._replace(now=moved.now._replace(failure=failure))
            return Decision(moved, (do.Sweep(reason), do.Finish(moved.state, FAILED_EXIT, reason)))


def _kill_late(job: Job) -> Decision:
    """Some ranks did not exit in time; then an exit is not graceful."""
    late, exit_ = listed(job.alive()), job.now.exit
    if exit_ is None or not exit_.leaving:
        grace_s = job.policy.timeouts.grace_s
        return kill(job, f"{late} still alive {grace_s:g} s after the signal")
    reason = f"{late} still alive {leave_s(job):g} s after the order to exit"
    return kill(graceful_exit.mark_interrupted(job, reason), reason)
