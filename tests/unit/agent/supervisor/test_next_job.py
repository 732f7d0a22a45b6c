"""What a node has prepared for the job that would have followed."""

import signal
import subprocess
from types import SimpleNamespace

from agent.supervisor.run_controlled import NextJob


def test_of_a_job_that_does_not_follow_no_process_is_left():
    """A forkserver that still imports does not notice the end of its msrun."""
    done = []
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as importing:
        following = NextJob.__new__(NextJob)
        following._early = SimpleNamespace(
            forkserver=SimpleNamespace(pid=importing.pid, forget=lambda: done.append("forgotten")),
            hooks_listener=SimpleNamespace(close=lambda: done.append("closed")),
        )
        following._met = SimpleNamespace(door=None)
        following.call_off()
        assert importing.wait(30) == -signal.SIGKILL
    assert done == ["forgotten", "closed"]
