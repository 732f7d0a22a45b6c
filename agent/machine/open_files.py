"""The limit of open files."""

from __future__ import annotations

import os
import resource

SPARE = 64  # logs, pipes, the forkserver, and files that are open for a moment


def allow_files(count: int) -> None:
    """Raise the soft limit of open files, as far as that is allowed, so that ``count`` more fit.

    Workers keep the limit that msrun was started with: the forkserver has it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + SPARE
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
