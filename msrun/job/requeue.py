"""A job that Slurm preempts, and that has saved its step, goes into the queue once more.

Slurm takes a job that ends by itself within the time of grace for completed, or failed, and begins
it no more (seen with 22.05); only one that has to be killed is queued again. So msrun asks for it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

_ANSWER_S = 15.0  # for a controller that is busy


def requeue_preempted(job: str, say: Callable[[str], None]) -> None:
    """Queue the job if Slurm ends it for another one; ``say`` what was done, or is to be done.

    Args:
        job: its number.
        say: prints one sentence.
    """
    by_hand = f"scontrol requeue {job}"
    try:
        shown = _scontrol("show", "job", job)
        facts = dict(re.findall(r"(\w+)=(\S+)", shown))
        if not facts.get("PreemptTime", "")[:1].isdecimal() or facts.get("BatchFlag") != "1":
            return
        if facts.get("Requeue") != "1":
            say(f"Slurm has preempted job {job}, which may not be queued again (sbatch --requeue)")
            return
        _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        say(
            f"if Slurm has preempted job {job}, it takes it for completed now, and {by_hand} "
            f"queues it again (Slurm could not be asked: {why})"
        )
        return
    say(f"Slurm has preempted job {job}: it is queued again, and goes on from the step saved")


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_ANSWER_S
    ).stdout
