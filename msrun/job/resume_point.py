"""Where a resumed run starts: the newest complete checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.spec.job_spec import DumpSpec, UsageError
from agent.text.wording import other_world

if TYPE_CHECKING:
    from worker_hooks.storage.find import FoundCheckpoint, SearchResult


class ResumeOrigin(NamedTuple):
    """What ``--resume`` may start from."""

    folders: tuple[Path, ...]  # that may hold checkpoints
    lineage: tuple[str, ...] = ()  # record ids: the resumed run, then those before it
    is_run: bool = False  # a run is resumed: only from what was saved in its lineage
    resumed_step: int | None = None  # that the resumed run began from, of a run before it
    may_begin_anew: bool = False  # if nothing was ever saved
    complete: CompleteCheckpoint | None = None  # that the resumed run is known to have completed


def resume_origin(
    dump: DumpSpec, origin: ResumeOrigin, world_size: int | None, say: Callable[[str], None]
) -> DumpSpec:
    """Find the newest verified checkpoint; ``say`` what is skipped and what is taken.

    Two runs may have saved into one folder, so a run resumes from a step of its own, or of a run
    that it resumed itself: any other one may be of another script, or of other arguments.

    Raises:
        UsageError: there is no such checkpoint.
    """
    from worker_hooks.storage.find import search, search_of_run  # rarely needed
    from worker_hooks.storage.manifest import describe_private, past

    lineage = origin.lineage
    if origin.is_run:
        found = search_of_run(origin.folders, lineage, origin.resumed_step)
    else:
        found = search(origin.folders)
    for remark in found.remarks:
        say(remark)
    step = -1 if found.newest is None else found.newest.manifest.step
    if origin.complete is not None and origin.complete.is_away(step):
        raise UsageError(_why_away(origin.complete, found.newest))
    if found.newest is None:
        say(_why_anew(found, origin))
        return dump
    path, manifest = found.newest
    for other in found.foreign:
        if other.manifest.step > manifest.step:
            say(f"{other.path} is skipped: another run saved it ({other.manifest.record_id})")
    run = lineage[0] if lineage and manifest.record_id in lineage else manifest.record_id
    say(f"resuming step {manifest.step} of run {run} from {path}")
    for sentence in describe_private(manifest):
        say(sentence)
    if world_size not in {None, manifest.world_size}:
        say(other_world(manifest.world_size, world_size))
    before = dict.fromkeys((*lineage[:1], *past(manifest, lineage[1:])))
    return dump._replace(resume=path.absolute(), resume_step=manifest.step, lineage=tuple(before))


def _why_away(known: CompleteCheckpoint, older: FoundCheckpoint | None) -> str:
    """Why nothing is resumed, and what to type to resume all the same."""
    if older is None:
        return known.describe()
    line = f"msrun --resume={shlex.quote(str(older.path))}"
    return f"{known.describe()} To begin from step {older.manifest.step} all the same: {line}"


def _why_anew(found: SearchResult, origin: ResumeOrigin) -> str:
    """The sentence with which the job begins anew.

    Raises:
        UsageError: it may not.
    """
    places = ", ".join(str(place) for place in origin.folders)
    if found.foreign:
        raise UsageError(_of_others(origin.lineage[0], found.foreign[0]))
    if found.remarks or not origin.may_begin_anew:
        raise UsageError(
            f"there is no complete checkpoint in {places}: nothing was started; to begin anew, "
            "give the job's own command"
        )
    return f"no step of run {origin.lineage[0]} was saved in {places}: training begins anew"


def _of_others(run: str, newest: FoundCheckpoint) -> str:
    """Why nothing is resumed although checkpoints are there, and what to type."""
    return (
        f"run {run} has saved no checkpoint: nothing was started. The newest in its folder is of "
        f"another run, step {newest.manifest.step} of {newest.manifest.record_id}; to resume from "
        f"that one: msrun --resume={shlex.quote(str(newest.path))}"
    )
