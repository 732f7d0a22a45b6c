"""What the user asked for, as far as the controller's decisions need it."""

from __future__ import annotations

from agent.controller.job import Job, Rules
from agent.spec.job_spec import JobSpec


def first_job(spec: JobSpec) -> Job:
    """The job before anything happened."""
    dump, resume, replace = spec.dump, spec.dump.resume, spec.replace
    rules = Rules(
        ranks=spec.ranks_here,
        max_restarts=spec.max_restarts,
        start_s=spec.timeouts.start_s,
        grace_s=spec.timeouts.grace_s,
        kill_s=spec.timeouts.kill_s,
        freeze_s=dump.freeze_s + dump.update_grace_s,
        dump_s=dump.stall_s,
        split=dump.split,
        restarts_explicit=dump.restarts_explicit,
        exit_s=spec.timeouts.exit_s,
        asked_exit_s=spec.timeouts.asked_exit_s,
        dump=dump.after_failure,
        replace=replace.is_on,
        can_replace_why=replace.why_off,
        max_replacements=replace.most,
        replacement_period_s=replace.period_s,
    )
    if resume is None:
        return Job(rules)
    return Job(rules, resume=str(resume), saved_step=dump.resume_step)
