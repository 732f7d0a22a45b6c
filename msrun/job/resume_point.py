"""Where a resumed run starts: the newest complete checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import DumpSpec, UsageError
from agent.text.wording import listed


class ResumeOrigin(NamedTuple):
    """What ``--resume`` may start from."""

    folders: tuple[Path, ...]  # that may hold checkpoints
    lineage: tuple[str, ...] = ()  # record ids: the resumed run, then those before it
    prefers_own: bool = False  # a checkpoint of the lineage comes first, even if another is newer
    resumed_step: int | None = None  # that the resumed run began from, of a run before it


def resume_origin(
    dump: DumpSpec, origin: ResumeOrigin, world_size: int, say: Callable[[str], None]
) -> DumpSpec:
    """Find the newest verified checkpoint; ``say`` what is skipped and what is taken.

    Two runs may have saved into one folder, so a run resumes from a step of its own, if it has any.

    Raises:
        UsageError: there is no complete checkpoint.
    """
    from worker_hooks.storage.find import search  # rarely needed
    from worker_hooks.storage.manifest import past

    lineage = origin.lineage
    found = search(origin.folders, runs=lineage[:1] if origin.prefers_own else None)
    if found.newest is None and origin.prefers_own:  # what the runs before it saved until then
        found = search(origin.folders, runs=lineage, until=origin.resumed_step)
    remarks = found.remarks
    if found.newest is None and found.foreign:
        found = search([each.path for each in found.foreign])  # own ones were verified already
        remarks = tuple(dict.fromkeys((*remarks, *found.remarks)))
    for remark in remarks:
        say(remark)
    if found.newest is None:
        places = ", ".join(str(place) for place in origin.folders)
        raise UsageError(f"there is no complete checkpoint in {places}: nothing was started")
    path, manifest = found.newest
    for other in found.foreign:
        if other.manifest.step > manifest.step:
            say(f"{other.path} is skipped: another run saved it ({other.manifest.record_id})")
    run = lineage[0] if lineage and manifest.record_id in lineage else manifest.record_id
    say(f"resuming step {manifest.step} of run {run} from {path}")
    for ranks, what in (
        (manifest.without_private, "were not saved, and begin anew"),
        (manifest.stale_private, f"are of a step before {manifest.step}"),
    ):
        if ranks:
            say(f"the random numbers and data position of {listed(ranks)} {what}")
    if manifest.world_size != world_size:
        say(
            f"{manifest.world_size} ranks saved it, now there are {world_size}: training "
            "continues, but not bit for bit as it would have"
        )
    before = dict.fromkeys((*lineage[:1], *past(manifest, lineage[1:])))
    return dump._replace(resume=path.absolute(), resume_step=manifest.step, lineage=tuple(before))
