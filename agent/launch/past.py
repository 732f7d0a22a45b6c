"""Where a job goes on that nodes have been in before they met."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from agent.nodes.checkpoint_copy import CheckpointPlace, have_checkpoint
from agent.nodes.gather import KeptNewer
from agent.nodes.messages import LivingRanks, SeekNewer, SurvivedStep
from agent.nodes.tls import Security
from agent.spec.job_spec import AdoptedJob, JobSpec, NotStartedError, UsageError
from worker_hooks.storage import manifest

LOST = "its node 0 was lost"
NOT_TO_BE_HAD = (
    "{kept.host} ({kept.address}) has saved step {newer.step} of this run on a disk of its own, "
    "this node step {step} alone, and with --tls-config no other node sends it: start {kept.host} "
    "as node 0 (--node-rank=0 --master-addr={kept.address} --resume), the others with that address"
)


def lost_steps(saved: SurvivedStep) -> str:
    """What was trained, and is to be trained again, as a clause; empty: nothing."""
    count = saved.reached - saved.step
    if count <= 0:
        return ""
    which = f" after step {saved.step}" if saved.path else ""
    return f"{count} step{which} is lost" if count == 1 else f"{count} steps{which} are lost"


def begins_anew(saved: SurvivedStep) -> str:
    """A sentence for people: nothing is there from which the job could go on."""
    lost = lost_steps(saved) or "it had made no step"
    return f"nothing of run {saved.job} is saved: the job begins anew, {lost}"


def going_on(
    spec: JobSpec, saved: SurvivedStep | None, say: Callable[[str], None], why: str
) -> JobSpec:
    """The job, from the step at which nodes have saved it.

    ``saved``: what they know; ``None``: nothing.

    Raises:
        NotStartedError: that checkpoint is not whole.
    """
    if saved is None or (spec.dump.resume is not None and saved.step <= spec.dump.resume_step):
        return spec
    if not saved.path:
        say(begins_anew(saved))
        return spec
    path = Path(saved.path)
    try:
        found = manifest.read(path)
        damages = manifest.verify(path, found)
    except (ValueError, OSError) as error:
        raise NotStartedError(f"the checkpoint {path} cannot be read here ({error})") from error
    if damages:
        raise NotStartedError(f"the checkpoint {path} is damaged: {damages[0]}")
    lost = f"; {each}" if (each := lost_steps(saved)) else ""
    say(f"resuming step {saved.step} of run {saved.job} from {path}: {why}{lost}")
    for sentence in manifest.describe_private(found):
        say(sentence)
    dump = spec.dump._replace(resume=path.absolute(), resume_step=saved.step, lineage=saved.lineage)
    return spec._replace(dump=dump)


def adopting(spec: JobSpec, living: LivingRanks, say: Callable[[str], None]) -> JobSpec:
    """The job whose ranks train already."""
    say("the workers train, without a scheduler: this one controls them from now on")
    dump = spec.dump._replace(
        resume=Path(living.resume) if living.resume else None,
        resume_step=living.resume_step,
        lineage=living.lineage,
    )
    return spec._replace(dump=dump, adopted=adopted_job(living))


def adopted_job(living: LivingRanks) -> AdoptedJob:
    """What a controller has to know of ranks that train already, as nodes tell it."""
    adopted = AdoptedJob(living.job, living.attempt)
    if living.attempt_resume:
        path = Path(living.attempt_resume)
        with contextlib.suppress(ValueError):  # it is not seen here: a restart finds none
            adopted = adopted._replace(resume=path, resume_step=manifest.read(path).step)
    return adopted


def resuming_from(spec: JobSpec) -> SeekNewer | None:
    """What the other nodes are asked, each of which may have a disk of its own; ``None``: no one.

    ``spec``: the job, with the newest step of the run on this node, if it resumes one.
    """
    dump, cluster = spec.dump, spec.cluster
    if dump.resume is None or not dump.lineage or cluster is None or not cluster.seeks_newer:
        return None
    return SeekNewer(str(dump.resume.parent), dump.lineage[0], dump.resume_step)


def from_newer(
    spec: JobSpec, found: list[KeptNewer], security: Security, say: Callable[[str], None]
) -> JobSpec:
    """The job, from a later step of the run than this node has: it is copied to this one.

    Args:
        spec: the job, from the newest step that this node has.
        found: what other nodes have.
        security: of the connections.
        say: prints one sentence for people.

    Raises:
        UsageError: that is not to be had.
    """
    dump = spec.dump
    for kept in sorted(found, key=lambda each: -each.newer.step):
        newer, place = kept.newer, CheckpointPlace.read(kept.newer.place)
        if place is None:
            raise UsageError(NOT_TO_BE_HAD.format(kept=kept, newer=newer, step=dump.resume_step))
        if place.is_here():
            continue  # this node has looked at it, and passed it over
        have_checkpoint(place, kept.address, security, say, 0.0, dump.keep, kept.host)
        saved = SurvivedStep(dump.lineage[0], 0, newer.path, newer.step, dump.lineage, "")
        return going_on(spec, saved, say, f"{kept.host} has saved it on a disk of its own")
    return spec
