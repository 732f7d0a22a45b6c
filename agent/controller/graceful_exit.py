"""The graceful exit's part of the decisions: stay, agree on one step, stay there, save, leave.

Pure, like the controller. Theory in five lines:

* every rank says at the end of which step it stays, and begins no later one by itself: the
  largest of these steps is begun by somebody, so all of them can come to its end;
* what all hold then is saved as after a failure, but whole on every rank and with nobody dead;
* only one kind of end is graceful; whatever disturbs it (a death, an exception, a broken line, too
  much time, one more request) makes it a power-off dump of the ranks that are left;
* a rank whose training ends meanwhile is not in the way;
* without a rank that can stay, or with some that cannot, there is no common step to wait for.
"""

from __future__ import annotations

from agent.controller import actions as do
from agent.controller import dump as dumping
from agent.controller.dump import Turn, order_all
from agent.controller.job import NEVER, DumpProgress, ExitProgress, Job
from agent.controller.states import Condition, JobState, RankState
from agent.spec import exit_budget
from agent.text.wording import listed
from worker_hooks.contract import protocol


def can_hold(job: Job) -> bool:
    """Whether every rank that runs can be asked."""
    running = job.having(RankState.RUNNING)
    return bool(running) and set(running) == set(job.reachable())


def hold(job: Job, why: str, grace_s: float) -> Turn:
    """Begin: everybody stays at the end of the step that is under way.

    Args:
        job: all ranks of which can be asked.
        why: who wants it, in words.
        grace_s: how long it may take until the step is saved.
    """
    ranks = job.reachable()
    dump = DumpProgress(1 if job.dump is None else job.dump.id + 1, ranks)
    job = job._replace(dump=dump, exit=ExitProgress(why, grace_s))
    held = do.HoldRanks(ranks, dump.id, f"graceful exit: {why}")
    return Turn(job, Condition.ALL_GUARDED, (held, _deadline(job)))


def shorten(job: Job, grace_s: float) -> Turn:
    """Somebody asks who waits no longer than ``grace_s``, from now on."""
    exit_ = _exit(job)
    if grace_s >= exit_.grace_s:
        return Turn(job, Condition.NOTED)
    job = job._replace(exit=exit_._replace(grace_s=grace_s))
    return Turn(job, Condition.NOTED, (_deadline(job),))


def hear_standing(job: Job, event: protocol.Standing) -> Turn:
    """A rank stays at the end of a step."""
    exit_ = _exit(job)
    standing = {**exit_.standing, event.rank: event.step}
    return agree(job._replace(exit=exit_._replace(standing=standing)))


def agree(job: Job) -> Turn:
    """Once all have said where they stay, the last of these steps is agreed on; all come to it."""
    exit_, dump, ranks = _exit(job), _dump(job), job.reachable()
    if any(rank not in exit_.standing for rank in ranks):
        return Turn(job, Condition.ANSWERS_AWAITED)
    if exit_.step == NEVER:
        step = max(exit_.standing[rank] for rank in ranks)
        why = f"step {step} is the last that a rank has begun"
        proceed = do.Tell(ranks, protocol.Proceed(dump.id, step), why)
        return Turn(
            job._replace(exit=exit_._replace(step=step)), Condition.ANSWERS_AWAITED, (proceed,)
        )
    if any(rank not in dump.answers for rank in ranks):
        return Turn(job, Condition.ANSWERS_AWAITED)
    job = job._replace(exit=exit_._replace(is_held=True))
    dump = dump._replace(step=exit_.step)
    if exit_.step <= max(job.saved_step, 0):
        outcome = job.kept() or "no step was committed yet, there is nothing to save"
        return Turn(job._replace(dump=dump, outcome=outcome), Condition.GIVEN_UP)
    why = f"every rank stays at the end of step {dump.step}"
    return order_all(job, dump, why)._replace(condition=Condition.WHOLE)


def is_elsewhere(job: Job, event: protocol.Frozen) -> bool:
    """Whether a rank stays where it was not told to."""
    return not event.is_whole or event.step != _exit(job).step


def interrupt(job: Job, why: str) -> Turn:
    """No common step: who can be asked stands still at once. Somebody must be reachable."""
    job = mark_interrupted(job, why)
    exit_ = _exit(job)
    within_s = exit_budget.hurried_freeze_s(exit_.grace_s, job.rules.freeze_s)
    turn = dumping.freeze(job, f"graceful exit: {exit_.why}, but {why}", within_s)
    return turn._replace(condition=Condition.DISTURBED)


def mark_interrupted(job: Job, why: str) -> Job:
    """The job once its exit is not graceful any more; the first reason stands."""
    exit_ = _exit(job)
    return job._replace(exit=exit_._replace(spoiled=exit_.spoiled or why))


def describe_delay(job: Job) -> str:
    """Whom a graceful exit waited for in vain."""
    exit_, dump, ranks = _exit(job), _dump(job), job.reachable()
    within = f"within {exit_budget.hold_s(exit_.grace_s, job.rules.freeze_s):.3g} s"
    mute = [rank for rank in ranks if rank not in exit_.standing]
    if mute:
        return f"{listed(mute)} did not say {within} where to stay"
    late = [rank for rank in ranks if rank not in dump.answers]
    return f"{listed(late)} did not come to the end of step {exit_.step} {within}"


def _deadline(job: Job) -> do.SetDeadline:
    within_s = exit_budget.hold_s(_exit(job).grace_s, job.rules.freeze_s)
    return do.SetDeadline(JobState.HOLDING, job.attempt, within_s)


def _exit(job: Job) -> ExitProgress:
    assert job.exit is not None
    return job.exit


def _dump(job: Job) -> DumpProgress:
    assert job.dump is not None
    return job.dump
