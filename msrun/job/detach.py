"""``--join=False``: the job runs without a terminal; the caller gets its name and returns."""

from __future__ import annotations

import os

from agent.launch.prepare import Prepared, abandon
from agent.spec.job_spec import UsageError


def detach(prepared: Prepared) -> bool:
    """Continue in a new session; True in the process that runs the job, False in the caller's.

    Must be called before any thread or loop exists. The caller waits until the job's process leads
    a session of its own, so that a closing terminal cannot reach it.

    Raises:
        UsageError: the process cannot be started, or its log cannot be written.
    """
    ready, done = os.pipe()
    try:
        log = os.open(prepared.layout.scheduler_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        pid = os.fork()
    except OSError as error:
        abandon(prepared)
        raise UsageError(
            f"the job cannot be detached ({error.strerror}): raise the limits (ulimit -u), or name "
            "another --log-dir"
        ) from error
    if pid:
        os.close(done)
        os.read(ready, 1)
        os.close(ready)
        print(
            f"msrun: run {prepared.spec.record_id} started, pid {pid}, "
            f"logs in {prepared.layout.folder}",
            flush=True,
        )
        return False
    os.close(ready)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(log, 2)  # what msrun prints goes to its log now
    for fd in (null, log, done):
        os.close(fd)
    return True
