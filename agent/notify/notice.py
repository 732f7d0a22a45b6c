"""What is told of a decision: the incidents of a job, not its every event. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agent.accounting.account import Account
from agent.accounting.incident import Answer, FailureKind, Incident
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.job import Job
from worker_hooks.contract.peer_lost import says_peer_lost

DIED, HUNG, FAILED = "died", "hung", "failed"
REPLACED, RESTARTED, SAVED, ENDED = "replaced", "restarted", "saved", "ended"
_FIRST = {FailureKind.HUNG: HUNG, FailureKind.OTHER: FAILED}  # of the others: DIED


class Notice(NamedTuple):
    """One thing that people, or programs of theirs, are to know."""

    event: str
    reason: str
    ranks: tuple[int, ...] = ()
    step: int | None = None  # under way, as people count
    lost_s: float | None = None


def notices(
    before: Job, event: ev.Event, decision: Decision, known: Account, account: Account
) -> Iterator[Notice]:
    """What is to be told, in the order of its happening.

    Args:
        before: the job before the decision.
        known: the account before it.
        account: the one after it.
    """
    job, count = decision.job, account.over - known.over
    over = account.recent[-count:] if count else ()
    yield from _failures(known.present, over, account.present)
    is_new = isinstance(event, ev.DumpCommitted) and job.resume != before.resume
    if isinstance(event, ev.DumpCommitted) and is_new and not event.is_early:
        yield Notice(SAVED, f"saved: {event.path}", step=job.saved_step)
    if isinstance(event, ev.CheckpointWritten) and not event.why_not:
        yield Notice(SAVED, f"saved: {event.path}", step=event.step)
    for incident in over:
        if incident.answer is Answer.REPLACED:
            ranks, step = tuple(sorted(incident.ranks)), incident.step
            yield Notice(REPLACED, incident.cause, ranks, step, incident.lost_s)
    for action in decision.actions:
        match action:
            case do.StartAttempt(attempt=attempt, reason=reason) if attempt > 0:
                yield Notice(RESTARTED, reason, step=_after(job.saved_step))
            case do.Finish(reason=reason, state=state):
                why = f"{state.value}: {reason}" if reason else state.value
                yield Notice(ENDED, why, step=_after(job.newest_step()))
            case _:
                pass


def _failures(
    known: Incident | None, over: Sequence[Incident], present: Incident | None
) -> Iterator[Notice]:
    """Incidents that are new, and ranks that are new in one."""
    for incident in filter(None, (*over, present)):
        was_told = known is not None and known.began_s == incident.began_s and _is_clear(known)
        if incident is present and not _is_clear(incident):
            continue
        news = incident.ranks - (known.ranks if was_told and known is not None else frozenset())
        if news or not was_told:
            what = _FIRST.get(incident.kind, DIED)
            yield Notice(what, incident.cause, tuple(sorted(news)), incident.step)


def _is_clear(incident: Incident) -> bool:
    """Whether it is a cause: a peer may tell that it lost a rank before that one's death shows."""
    return incident.kind is not FailureKind.RAISED or not says_peer_lost(incident.cause)


def _after(step: int) -> int | None:
    """The step that follows a committed one; ``None``: none is known."""
    return step + 1 if step >= 0 else None
