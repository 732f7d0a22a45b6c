"""``--join=False``: the job goes on without a terminal; the caller gets its name and is free."""

from __future__ import annotations

import os

from agent.launch.prepare import Prepared, abandon
from agent.spec.job_spec import UsageError


def detach(prepared: Prepared) -> bool:
    """Go on in a new session; True in the process that runs the job, False in the caller's.

    Called before any thread or loop exists. The caller leaves only when the job's process leads
    its own session, so a closing terminal cannot reach it.

    Raises:
        UsageError: no process can be started, or its log cannot be written.
    """
    ready, told = os.pipe()
    try:
        log = os.open(prepared.layout.scheduler_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        pid = os.fork()
    except OSError as error:
        abandon(prepared)
        raise UsageError(
            f"the job cannot be detached ({error.strerror}): raise the limits (ulimit -u), or name "
            "another --log_dir"
        ) from error
    if pid:
        os.close(told)
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
    os.dup2(log, 2)  # what msrun says to people belongs into its log now
    for fd in (null, log, told):
        os.close(fd)
    return True
