"""What people are told when ranks are replaced or a stop is asked for, and how that goes. Pure."""

from __future__ import annotations

from agent.controller.drain import DRAINING
from agent.controller.job import Job
from agent.controller.states import JobState
from agent.spec import exit_budget
from agent.text.wording import ranged


def progress_message(before: Job, after: Job) -> str:
    """One sentence about what is under way, if an event changed what to expect of it."""
    return _of_stop(before, after) or _of_replacement(before, after)


def _of_replacement(before: Job, after: Job) -> str:
    was, now = before.replacement, after.replacement
    if now is not None and after.attempt != before.attempt:
        return now.sentence
    if was is not None and after.state is JobState.RUNNING:
        return f"{ranged(was.lost)} replaced: every rank goes on from step {after.newest_step()}"
    if was is not None and now is None and after.state is JobState.COMMITTING:
        return f"not replaced, {after.not_replaced}: the state is saved before a restart"
    return ""


def _of_stop(before: Job, after: Job) -> str:
    exit_ = after.exit
    is_asked = (after.asked, after.requests) != (before.asked, before.requests)
    if before.state is JobState.HOLDING and exit_ is not None and exit_.spoiled:
        follows = "what is whole is saved at once"
        if after.state not in DRAINING:
            follows = "the job ends at once"
        return f"no graceful exit, {exit_.spoiled}: {follows}{_more(after)}"
    if not is_asked:
        return ""
    if after.state is JobState.HOLDING and exit_ is not None:
        within_s = exit_budget.hold_s(exit_.grace_s, after.rules.freeze_s)
        return (
            f"graceful exit: {after.asked}; all ranks come to the end of one step within "
            f"{within_s:.3g} s, save it and leave; one more signal saves at once"
        )
    if after.state in DRAINING:
        return f"the state is saved before the stop{_more(after)}"
    if after.state is JobState.STOPPING and exit_ is not None:
        return f"the ranks are leaving{_more(after)}"
    return ""


def _more(job: Job) -> str:
    """How many signals it takes to end the job at once."""
    if job.state in {JobState.KILLING, JobState.STOPPED}:
        return ""
    count = (2 if job.exit is None else 3) - job.requests
    more = "one more signal ends" if count == 1 else f"{count} more signals end"
    return f"; {more} the job without it" if job.state in DRAINING else f"; {more} them"
