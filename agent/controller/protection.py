"""What a rank's death would cost the running job: known once all ranks have shown what they hold.

Pure. Nothing is promised before that: it depends on the script, and only the running job shows it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from agent.controller.job import NEVER, Job, Shadowed
from agent.controller.replication import (
    are_copies_wanted,
    is_all_kept,
    lone_ranks,
    why_no_holder,
    why_not_held,
)
from agent.spec.job_spec import CopyMode
from agent.text.wording import listed
from worker_hooks.contract.fingerprint import ANEW, LATE, UNSEEN

LOST = "if a rank dies, training resumes from the newest ModelCheckpoint, else from its beginning"

LOST_ALL = "if a rank dies, its training begins anew, or the job ends"
BY_SHADOWS = (
    "each rank has a shadow, a sleeping copy of its process; if a rank dies, the shadows of all go "
    "on from one optimizer step, which loses none (checked: as many collectives in each copy)"
)

NO_SHADOWS = Shadowed()

GROUPS_TOLD = 4
VALUES_TOLD = 3
UNLESS_LATE = ", unless it dies between its backward and its commit"
UNTIL_SEEN = (
    ", but before step {} is complete a death costs the steps since the newest checkpoint or since "
    "training began: a large state on an accelerator is first looked at as it trains (a stop by a "
    "signal saves the step)"
)
KEPT = " as long as msrun lives: what killed ranks leave in their memory is read"
AMID = (
    " (of a state that is too large to be copied at each step only {}, if all that hold a part "
    "are killed amid an update)"
)
NOT_READ = "; what killed ranks leave in their memory is not read: {}"
READ = "what a killed rank leaves in its memory is read, and its death means"

ONE_RANK = "there is one rank only, and no other holds its state"
ONE_RANK_LOST = (
    "if it is killed, training resumes from the newest ModelCheckpoint; a stop by a signal saves "
    "the step"
)
NOTHING_SAVED = "and nothing is saved after a failure (--on-failure)"
HINT = "--protect-memory=auto keeps copies of it in memory"

CURES = (
    ("wraps its model in DDP outside", "move DDP(...) into train(state)"),
    ("does not train inside run", "put the loop into train(state), and call run(train, state)"),
    ("makes process groups", "make them in train(state)"),
    ("shards its model inside", "shard it before run(train, state)"),
    ("runs collectives before run()", "move them into train(state)"),
)
"""What to change in the script, by a part of the reason why no rank is replaced."""


class Level(Enum):
    """How much of the training a rank's death costs."""

    UNKNOWN = "unknown"  # not all ranks have committed their first step
    PROTECTED = "protected"  # nothing
    PARTLY = "partly protected"  # a restart
    NOT_PROTECTED = "not protected"  # the steps since the newest checkpoint


class Protection(NamedTuple):
    """The level, and what it means for this job."""

    level: Level
    why: str = ""

    def __str__(self) -> str:
        """The sentence that people read."""
        return f"{self.level.value}: {self.why}" if self.why else self.level.value


def protection(job: Job) -> Protection:
    """What a rank's death would cost this job now."""
    if job.shadows != NO_SHADOWS:
        return _of_shadows(job.shadows)
    known = job.since_restart.comparison
    if why := known.unprotected or known.uncounted:
        return Protection(Level.NOT_PROTECTED, f"{why}; {LOST}")
    if len(job.ranks) == 1 and job.has_hooks:
        return _of_copies(job, ONE_RANK, ONE_RANK_LOST)
    if known.compared == NEVER or (known.late and not lone_ranks(job)):
        return Protection(Level.UNKNOWN)
    if lone_ranks(job):
        return _of_copies(job, why_no_holder(job), LOST)
    if known.groups and len(known.voting.ranks) < len(job.ranks):
        return Protection(Level.UNKNOWN)  # a death could still leave parts of two steps
    checked = f" (checked: {known.holds})" if known.holds else ""
    if not (why := _why_not_replaced(job)):
        lives = f"{KEPT}{_amid(job)}" if is_all_kept(job) else _of_groups(job)
        less = _of_values(job)
        level = Level.PARTLY if less else Level.PROTECTED
        replaced = f"a rank that dies is replaced, no step is lost{lives}{less}{_not_read(job)}"
        return Protection(level, f"{replaced}{checked}{_of_nodes(job)}{_of_folders(job)}")
    if not job.policy.dump.after_failure:
        return Protection(Level.NOT_PROTECTED, f"{why}, {NOTHING_SAVED}")
    follows = "save and restart"
    if not job.policy.max_restarts:
        follows = "save, and the end of the job (--max-restarts=1 restarts it)"
    cure = cure_of(why)
    cure = f". {cure[0].upper()}{cure[1:]}" if cure else ""
    cost = f"a death means {follows}{checked}{_of_folders(job)}"
    less = f"{_of_anew(job)}{_of_unseen(job)}"
    return Protection(Level.PARTLY, f"{why}; {cost}{less}{cure}")


def _of_values(job: Job) -> str:
    """What a death costs of the script's own values although a rank is replaced."""
    is_late = any(each.startswith(LATE) for each in job.differing)
    unless = UNLESS_LATE if is_late else ""
    return f"{unless}{_of_anew(job)}{_of_unseen(job)}"


def _of_unseen(job: Job) -> str:
    """Until when a death means that nothing is saved, as no rank's state is known to be whole."""
    until = [int(each.removeprefix(UNSEEN)) for each in job.differing if each.startswith(UNSEEN)]
    return UNTIL_SEEN.format(max(until)) if until else ""


def _of_anew(job: Job) -> str:
    """What nothing keeps, so that a death may change the weights."""
    names = sorted(each.removeprefix(ANEW) for each in job.differing if each.startswith(ANEW))
    if not names:
        return ""
    more = f" and {len(names) - VALUES_TOLD} more" if len(names) > VALUES_TOLD else ""
    verb = "begin" if len(names) > 1 else "begins"
    return f", but {', '.join(names[:VALUES_TOLD])}{more} {verb} anew, and weights may differ"


def _of_groups(job: Job) -> str:
    """Who has to live: ranks that die at once may be all that hold a part of the state."""
    groups = [part.ranks for part in job.since_restart.comparison.parts.every]
    if not groups[1:]:
        return " as long as one rank lives"
    more = f"; {len(groups) - GROUPS_TOLD} more groups" if len(groups) > GROUPS_TOLD else ""
    told = "; ".join(map(listed, groups[:GROUPS_TOLD]))
    return f" as long as one of each replica group lives ({told}{more})"


def _of_shadows(shadows: Shadowed) -> Protection:
    """What it costs where scripts are copied as they are."""
    if shadows.step == NEVER:
        why = f"no shadows: {shadows.why_not}; {LOST_ALL}"
        return (
            Protection(Level.NOT_PROTECTED, why) if shadows.why_not else Protection(Level.UNKNOWN)
        )
    if shadows.why_not:
        since = f"a death repeats all that came behind optimizer step {shadows.step}"
        return Protection(
            Level.PARTLY,
            f"no newer shadows are made: {shadows.why_not}; {since}, and loses nothing",
        )
    every = f"; a shadow about every {shadows.every} steps" if shadows.every > 1 else ""
    return Protection(Level.PROTECTED, f"{BY_SHADOWS}{every}")


def _of_copies(job: Job, why: str, lost: str) -> Protection:
    """What it costs if no other rank holds the state, because of ``why``."""
    copies, dump = job.since_restart.copies, job.policy.dump
    if dump.copies is CopyMode.OFF:
        return Protection(Level.NOT_PROTECTED, f"{why}; {lost}; {HINT}")
    if not dump.after_failure:
        return Protection(Level.NOT_PROTECTED, f"{why}, {NOTHING_SAVED}")
    if job.apart:
        no_copy = f"it is not copied, as nodes could not save their parts together: {job.apart}"
        return Protection(Level.NOT_PROTECTED, f"{why}, and {no_copy}; {lost}")
    if copies.why_not:
        return Protection(
            Level.NOT_PROTECTED, f"{why}, and it is not copied: {copies.why_not}; {lost}"
        )
    follows = "a restart from it"
    if not job.policy.max_restarts:
        follows = "the end of the job, once it is saved (--max-restarts=1 restarts it)"
    if is_all_kept(job):
        return Protection(Level.PARTLY, f"{why}; {READ} {follows}{_amid(job)}")
    copied = "once a copy of it is in msrun's memory (the first is on its way),"
    if copies.newest is not None:
        often = "every step" if copies.every == 1 else f"about every {copies.every} steps"
        copied = f"{often} it is copied to msrun's memory, and"
    lost = f"a death means {follows}{_of_its_node(job)}{_not_read(job)}"
    return Protection(Level.PARTLY, f"{why}; {copied} {lost}")


def _amid(job: Job) -> str:
    """What is left of a step whose update has begun on all that hold a part."""
    return AMID.format("a copy" if are_copies_wanted(job) else "the newest checkpoint")


def _not_read(job: Job) -> str:
    """Why the memory of killed ranks is not read although nobody has said that it is not to be."""
    why = job.since_restart.not_kept
    return NOT_READ.format(why) if why else ""


def _of_its_node(job: Job) -> str:
    """What the death of a whole node costs where copies are all that there is."""
    replace = job.policy.replace
    if not replace.has_nodes:
        return ""
    follows = "training resumes from the newest ModelCheckpoint, else from its beginning"
    if not (replace.node_wait_s and job.policy.max_restarts):
        follows = "the job ends, and its steps since the newest ModelCheckpoint are lost"
    who = "a node that dies" if replace.near else "a worker's msrun that dies"
    return f"; {who} takes its copies along, {follows}"


def _of_nodes(job: Job) -> str:
    """What the death of a whole node costs, if there are several."""
    if not job.policy.replace.has_nodes:
        return ""
    if not job.policy.replace.node_wait_s:
        return "; a node that dies ends the job, its step is saved"
    if not job.policy.replace.near:
        return (
            "; likewise a worker's msrun, once it is started again; without the scheduler the "
            "ranks train on"
        )
    return "; likewise a node, once another takes its place"


def _of_folders(job: Job) -> str:
    """What is different where each node saves into a folder of its own."""
    if not job.apart:
        return ""
    head = "node 0" if job.policy.replace.near else "the scheduler"
    return (
        f"; what is saved is on the disk of {head} alone, other nodes copy it as they resume, and "
        f"without it no step is saved ({job.apart})"
    )


def cure_of(why: str) -> str:
    """What to change in the script so that its ranks can be replaced; empty: it is not known."""
    return next((cure for part, cure in CURES if part in why), "")


def _why_not_replaced(job: Job) -> str:
    """Why no lost rank is replaced alone, as far as that is no matter of the moment."""
    replace = job.policy.replace
    if replace.why_off or not replace.is_on:
        return replace.why_off or "replacing is off"
    if job.diverged:
        return job.diverged
    doubts = dict.fromkeys(job.since_restart.comparison.voting.reasons.values())
    said = "".join(f" ({doubt})" for doubt in doubts)
    never = why_not_held(job) or of_script(job)
    if (never or said) and (why := why_no_holder(job)):
        said = f": {never}{said}" if never else said
        return f"{why}, and no rank of such a job is replaced alone{said}"
    return never


def of_script(job: Job) -> str:
    """What the script does that keeps its ranks from being replaced; empty: nothing."""
    said = job.since_restart.rejoining
    alike: dict[str, list[int]] = {}
    for rank in said.reasons.ranks:
        alike.setdefault(said.reasons[rank], []).append(rank)
    if len(alike) == 1 and not said.able:
        return f"the script {next(iter(alike))}"
    return "; ".join(f"{listed(ranks)}: {why}" for why, ranks in alike.items())
