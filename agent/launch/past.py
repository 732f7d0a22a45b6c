"""Where a job goes on that nodes have been in before they met."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from agent.nodes.messages import LivingRanks, SurvivedStep
from agent.spec.job_spec import AdoptedJob, JobSpec, NotStartedError
from worker_hooks.storage import manifest

LOST = "its node 0 was lost"


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
