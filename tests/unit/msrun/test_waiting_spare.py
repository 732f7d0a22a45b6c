"""A spare node waits with everything imported: what it imports later all others would wait for."""

import subprocess
import sys

WAITING = """
import sys

import msrun.cli
from agent.launch import meeting
from agent.spec.job_spec import ClusterSpec, JobSpec, Program, ProgramKind


def waits(*_):
    known = {*sys.modules}
    import socket

    import psutil

    import agent.launch.succession
    import agent.supervisor.all_nodes
    import agent.supervisor.run_controlled
    import msrun.terminal.console

    try:
        socket.getaddrinfo("node1", 1)
    except OSError:
        pass
    print(*sorted({*sys.modules} - known))
    raise SystemExit(0)


meeting.meet = waits
program = Program("train.py", (), ProgramKind.SCRIPT, "python")
msrun.cli._prepared(JobSpec(program, 1, "r", "r", cluster=ClusterSpec(2, is_spare=True)))
"""


def test_a_spare_node_has_imported_what_taking_a_lost_ones_place_takes():
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
