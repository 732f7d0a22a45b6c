"""The graceful exit's part of the decisions: stay, agree on one step, stay there, save, exit.

Pure, like the controller. Theory in five lines:

* every rank says at the end of which step it stays, and begins no later one by itself: some rank
  has begun the largest of these steps, so all of them can come to its end;
* that step is saved as after a failure, but it is whole on every rank and no rank is dead;
* only one kind of end is graceful; whatever disturbs it (a death, an exception, a broken link, too
  much time, one more request) makes it an emergency dump of the ranks that are left;
* a rank whose training ends meanwhile is not in the way;
* without a rank that can stay, or with some that cannot, there is no common step to wait for.
"""

from __future__ import annotations

from agent.controller import actions as do
from agent.controller.dump import (
    NOTHING,
    Turn,
    describe_loss,
    freeze,
    new_dump,
    order_all,
)
from agent.controller.job import NEVER, ExitProgress, Job
from agent.controller.replication import why_not_covered
from agent.controller.states import Condition, JobState, RankState
from agent.spec import exit_budget
from agent.text.wording import listed
from worker_hooks.contract import protocol


def can_hold(job: Job) -> bool:
    """Whether every rank that runs can be asked."""
    running = job.having(RankState.RUNNING)
    return bool(running) and running == job.reachable()


def hold(job: Job, why: str, grace_s: float) -> Turn:
    """Begin: every rank stays at the end of the step that is under way.

    Args:
        job: all ranks of which can be asked.
        why: who asked for it.
        grace_s: how long it may take until the step is saved.
    """
    dump = new_dump(job)
    job = job._replace(dump=dump).with_exit(ExitProgress(why, grace_s))
    held = do.HoldRanks(tuple(dump.asked), dump.id, f"graceful exit: {why}")
    return Turn(job, Condition.ALL_GUARDED, (held, _deadline(job)))


def shorten(job: Job, grace_s: float) -> Turn:
    """Somebody asks who waits no longer than ``grace_s``, from now on."""
    exit_ = job.present_exit()
    if grace_s >= exit_.grace_s:
        return Turn(job, Condition.NOTED)
    job = job.with_exit(exit_._replace(grace_s=grace_s))
    return Turn(job, Condition.NOTED, (_deadline(job),))


def note_standing(job: Job, event: protocol.Standing) -> Turn:
    """A rank stays at the end of a step."""
    exit_ = job.present_exit()
    standing = exit_.standing.set(event.rank, event.step)
    return agree(job.with_exit(exit_._replace(standing=standing)))


def agree(job: Job) -> Turn:
    """Once all ranks have said where they stay, they agree on the last of these steps."""
    exit_, dump, ranks = job.present_exit(), job.present_dump(), job.reachable()
    if ranks - exit_.standing.ranks:
        return Turn(job, Condition.ANSWERS_AWAITED)
    if exit_.step == NEVER:
        step = max(exit_.standing[rank] for rank in ranks)
        why = f"step {step} is the last that a rank has begun"
        proceed = do.Tell(tuple(ranks), protocol.Proceed(dump.id, step), why)
        job = job.with_exit(exit_._replace(step=step))
        return Turn(job, Condition.ANSWERS_AWAITED, (proceed,))
    if ranks - dump.answers.ranks:
        return Turn(job, Condition.ANSWERS_AWAITED)
    job = job.with_exit(exit_._replace(is_held=True))
    dump = dump._replace(step=exit_.step)
    if job.is_saved(exit_.step):
        now = job.now._replace(outcome=job.kept() or NOTHING)
        return Turn(job._replace(dump=dump, now=now), Condition.GIVEN_UP)
    if why := why_not_covered(job, dump):
        lost = describe_loss(job, exit_.step, why)
        job = job._replace(dump=dump, now=job.now._replace(outcome=lost))
        exit_ = job.present_exit()._replace(is_held=False, interrupted=why)
        return Turn(job.with_exit(exit_), Condition.GIVEN_UP)
    why = f"every rank stays at the end of step {dump.step}"
    return order_all(job, dump, why)._replace(condition=Condition.WHOLE)


def is_elsewhere(job: Job, event: protocol.Frozen) -> bool:
    """Whether a rank stays at another step than it was ordered to."""
    return not event.is_whole or event.step != job.present_exit().step


def interrupt(job: Job, why: str) -> Turn:
    """There is no common step: freeze all ranks that can be asked at once. There must be one."""
    job = mark_interrupted(job, why)
    exit_ = job.present_exit()
    within_s = exit_budget.hurried_freeze_s(exit_.grace_s, job.policy.dump.answer_s)
    turn = freeze(job, f"graceful exit: {exit_.why}, but {why}", within_s)
    return turn._replace(condition=Condition.DISTURBED)


def mark_interrupted(job: Job, why: str) -> Job:
    """The job once its exit is not graceful any more; the first reason stands."""
    exit_ = job.present_exit()
    return job.with_exit(exit_._replace(interrupted=exit_.interrupted or why))


def describe_delay(job: Job) -> str:
    """For which ranks a graceful exit waited in vain."""
    exit_, dump, ranks = job.present_exit(), job.present_dump(), job.reachable()
    within = f"within {_hold_s(job):.3g} s"
    silent = [rank for rank in ranks if rank not in exit_.standing]
    if silent:
        return f"{listed(silent)} did not say {within} where to stay"
    late = [rank for rank in ranks if rank not in dump.answers]
    return f"{listed(late)} did not come to the end of step {exit_.step} {within}"


def _deadline(job: Job) -> do.SetDeadline:
    return do.SetDeadline(JobState.HOLDING, job.attempt, _hold_s(job))


def _hold_s(job: Job) -> float:
    return exit_budget.hold_s(job.present_exit().grace_s, job.policy.dump.answer_s)
