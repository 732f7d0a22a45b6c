"""A job that Slurm preempts, and that has saved its step, goes into the queue once more.

Slurm takes a job that ends by itself within the time of grace for completed, or failed, and begins
it no more (seen with 22.05); only one that has to be killed is queued again. So msrun asks for it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

_ANSWER_S = 5.0  # what is left of the time of grace, once the step is saved, may be short
_TROUBLE = (OSError, subprocess.SubprocessError)


def requeue_preempted(job: str, say: Callable[[str], None]) -> None:
    """Queue the job if Slurm ends it for another one; ``say`` what was done, or is to be done."""
    by_hand = f"takes it for completed now: scontrol requeue {job} queues it again"
    try:
        shown = _scontrol("show", "job", job)
    except _TROUBLE as error:
        say(f"if Slurm has preempted batch job {job}, it {by_hand} (not asked: {_why(error)})")
        return
    facts: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S+)", shown):
        facts.setdefault(name, value)  # later ones may be within a comment
    if not facts.get("PreemptTime", "")[:1].isdecimal() or facts.get("BatchFlag") != "1":
        return
    if facts.get("Requeue") != "1":
        say(f"Slurm has preempted job {job}, which may not be queued again (sbatch --requeue)")
        return
    try:
        _scontrol("requeue", job)
    except _TROUBLE as error:
        say(f"Slurm has preempted job {job}, and {by_hand} (msrun could not: {_why(error)})")
    else:
        say(f"Slurm has preempted job {job}: it is queued again, and goes on from the step saved")


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip()
    return str(error)


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_ANSWER_S
    ).stdout
