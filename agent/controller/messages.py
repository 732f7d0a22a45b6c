"""The sentence that people hear after a decision: about restarts, stops and replacements. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from agent.controller import actions as do
from agent.controller.drain import DRAINING
from agent.controller.job import NEVER, Job
from agent.controller.protection import Level, protection
from agent.controller.replication import are_copies_wanted
from agent.controller.states import JobState
from agent.spec import exit_budget
from agent.text.tone import Tone
from agent.text.wording import MINUTE_S, duration, listed, ranged
from worker_hooks.contract.fingerprint import LATE, RESULT, is_buffer

ELAPSED = "\0"
"""Stands for the time since the failure, which the controller does not know: `` after 0.3 s``."""

TONES = {
    Level.UNKNOWN: Tone.PLAIN,
    Level.PROTECTED: Tone.GOOD,
    Level.PARTLY: Tone.PLAIN,
    Level.NOT_PROTECTED: Tone.BAD,
}

_NAMED = 6  # values of the script's own in one sentence
_DIES = "by rank: if a rank dies between its backward and its commit,"
_LOSES = "the step is not saved, and training resumes from the newest"
_LATE = f"{{}} differs {_DIES} {_LOSES} {{}}; change it before backward"
_LATES = f"{{}} differ {_DIES} {_LOSES} {{}}; change them before backward"
_IGNORE = ", or name it in state.ignore(...) if training does not depend on it"
_IGNORES = ", or name those in state.ignore(...) on which training does not depend"
_STALE = (
    "but the result will be another than without the failure: the random numbers, buffers and data "
    "position of {} are of a step before"
)
_COPY, _CHECKPOINT = "copy", "ModelCheckpoint, else from its beginning"
_COPY_OF_NODE = f"{_COPY}, after the loss of a node from the newest {_CHECKPOINT}"
_RESULT = (
    f"{{}} differs {_DIES} it lacks that step, and what training returns may be another; change it "
    "before backward"
)
_RESULTS = _RESULT.replace("differs", "differ").replace("it lacks", "they lack")
_RESULTS = _RESULTS.replace("change it", "change them")


def sentence(before: Job, after: Job, actions: Sequence[do.Action]) -> str:
    """What is new for people, if an event changed what to expect; empty: nothing."""
    return (
        _of_start(actions)
        or _of_stop(before, after)
        or _of_replacement(before, after)
        or "; but ".join(
            filter(None, (_of_protection(before, after), _of_own_values(before, after)))
        )
    )


def tone(before: Job, after: Job, actions: Sequence[do.Action]) -> Tone:
    """Whether that sentence is good or bad news."""
    if _of_start(actions):
        return Tone.BAD
    if before.since_restart.replacement is not None and after.state is JobState.RUNNING:
        return Tone.GOOD
    if _of_protection(before, after):
        return TONES[protection(after).level]
    return Tone.PLAIN


def _of_start(actions: Sequence[do.Action]) -> str:
    """All ranks are started again, or the lost ones only."""
    for action in actions:
        match action:
            case do.StartAttempt(attempt=attempt, reason=reason) if attempt > 0:
                return reason
            case do.ReplaceRanks(reason=reason):
                return reason
            case _:
                pass
    return ""


def _of_stop(before: Job, after: Job) -> str:
    exit_, stop = after.now.exit, after.stop
    if before.state is JobState.HOLDING and exit_ is not None and exit_.interrupted:
        follows = "what is complete is saved at once"
        if after.state not in DRAINING:
            follows = "the job ends at once"
        return f"no graceful exit, {exit_.interrupted}: {follows}{_more_signals(after)}"
    was = before.stop
    if stop._replace(is_to_end=was.is_to_end, ranks=was.ranks) == was:
        return ""
    if after.state is JobState.HOLDING and exit_ is not None:
        within_s = exit_budget.hold_s(exit_.grace_s, after.policy.dump.answer_s)
        bound = duration(within_s) if within_s >= MINUTE_S else f"{within_s:.3g} s"
        return (
            f"graceful exit: {stop.why}; all ranks finish one step, which is then saved (at most "
            f"{bound}); one more signal saves at once"
        )
    if after.state in DRAINING and stop.is_resize:
        return f"{stop.why}, once the state is saved"
    if after.state in DRAINING:
        return f"the state is saved before the stop{_more_signals(after)}"
    if after.state is JobState.STOPPING and exit_ is not None:
        return f"the ranks are exiting{_more_signals(after)}"
    return ""


def _more_signals(job: Job) -> str:
    """How many signals it takes to end the job at once."""
    if job.state in {JobState.KILLING, JobState.STOPPED} or job.stop.is_resize:
        return ""
    count = (2 if job.now.exit is None else 3) - job.stop.signals
    more = "one more signal ends" if count == 1 else f"{count} more signals end"
    return f"; {more} the job without it" if job.state in DRAINING else f"; {more} them"


def _of_replacement(before: Job, after: Job) -> str:
    """A replacement is complete, or has failed."""
    was, now = before.since_restart.replacement, after.since_restart.replacement
    if after.diverged and not before.diverged:
        is_undone = after.state is JobState.COMMITTING and before.state is not after.state
        resumed = ", all resume from the step before" if is_undone else ""
        return f"{after.diverged}; no rank is replaced any more{resumed}"
    if was is not None and after.state is JobState.RUNNING:
        who, are = ranged(was.lost), "is" if len(was.lost) == 1 else "are"
        resumed = f"training resumes at step {after.newest_step() + 1}"
        stale = () if before.memory is None else before.memory.stale
        if stale:
            return f"{who} {are} back{ELAPSED}; {resumed}, {_STALE.format(listed(stale))}"
        return f"{who} {are} back{ELAPSED}; {resumed}, no step is lost"
    if was is not None and now is None and after.state is JobState.COMMITTING:
        return f"not replaced, {after.now.not_replaced}: the state is saved before a restart"
    return ""


def _of_protection(before: Job, after: Job) -> str:
    """It is known now what a rank's death costs, or that it costs more than it did."""
    was, now = protection(before).level, protection(after)
    known = before.since_restart.comparison
    # with groups only their votes were missing
    is_first = was is Level.UNKNOWN and (known.compared == NEVER or bool(known.groups))
    is_new = after.restarts == 0 or after.best_step == 0  # else it was said before the restart
    is_known = is_first and is_new and now.level is not Level.UNKNOWN
    is_lost = now.level is Level.NOT_PROTECTED and was is not Level.NOT_PROTECTED
    is_apart = bool(after.apart) and not before.apart and was is not Level.UNKNOWN
    is_old = after.shadows.was_old and not before.shadows.was_old
    # older ones than the refused ones may be complete only behind the refusal: less is repeated
    is_same_why = bool(after.shadows.why_not) and after.shadows.why_not == before.shadows.why_not
    is_moved = is_same_why and after.shadows.step > before.shadows.step != NEVER
    # an object may begin to differ by rank long after the first steps
    differs = bool(after.since_restart.comparison.difference) and not known.difference
    is_named = now.level is Level.PARTLY and bool(after.differing - before.differing)
    is_less = was is Level.PROTECTED and (differs or is_named)
    return str(now) if is_known or is_lost or is_less or is_apart or is_old or is_moved else ""


def _of_own_values(before: Job, after: Job) -> str:
    """Values of the script's own turned out to differ by rank."""
    news = after.differing - before.differing
    is_copied = are_copies_wanted(after) and not after.since_restart.copies.why_not
    copy = _COPY_OF_NODE if after.policy.replace.has_nodes else _COPY
    newest = copy if is_copied else _CHECKPOINT
    return "; ".join(_of_values(news, newest)) if news else ""


def _of_values(news: Collection[str], newest: str) -> Iterator[str]:
    """What is not known of the script's own values if a rank dies in the last part of its step.

    Args:
        news: the values.
        newest: what training resumes from then.
    """
    for prefix, one, many in ((LATE, _LATE, _LATES), (RESULT, _RESULT, _RESULTS)):
        names = sorted(each.removeprefix(prefix) for each in news if each.startswith(prefix))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        if names:
            text, ignore = (one, _IGNORE) if len(names) == 1 else (many, _IGNORES)
            has_more = prefix == LATE and not all(map(is_buffer, names))
            listed_names = f"{', '.join(names[:_NAMED])}{more}"
            yield text.format(listed_names, newest) + ignore * has_more
