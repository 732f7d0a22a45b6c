"""What the kernel lets this process have."""

from __future__ import annotations

import os
import resource

SPARE = 64  # logs, pipes, the forkserver, and what is open for moments


def allow_files(count: int) -> None:
    """Raise the soft limit of open files, as far as that is allowed, so that ``count`` more fit.

    Workers keep the limit that msrun was given: the forkserver began with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + SPARE
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
