"""A job of one node pays nothing for what several nodes need: no port, no thread, no module."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from support.jobs import ROOT, WORKERS, Launcher, poll

LISTENS = "0A"
FOR_SEVERAL = ("agent.nodes", "agent.arrivals", "agent.seat", "agent.launch.meeting", "psutil")


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses, as the kernel writes them, and ports at which a process listens."""
    held = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            held.add(os.readlink(path))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in held:
                address, port = words[1].split(":")
                found.append((address, int(port, 16)))
    return found


def test_its_msrun_has_no_thread_and_no_port_for_other_nodes(msrun: Launcher) -> None:
    job = msrun.start("--worker_num=2", "--join=True", WORKERS / "place.py", "wait=go")
    job.await_lines("place ", 2)
    (port,) = {line.split('"MASTER_PORT": "')[1].split('"')[0] for line in job.logs().values()}
    assert listening(job.process.pid) == [("0100007F", int(port))]
    # its own, and the one that shows what ranks print
    assert len(os.listdir(f"/proc/{job.process.pid}/task")) <= 2
    (msrun.tmp / "go").touch()
    assert poll(lambda: job.process.poll() is not None)
    assert job.wait().code == 0


def test_nothing_of_what_several_nodes_need_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from msrun.cli import main\n"
        "try: main(['--no-python', 'true'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", code]
    how = {"cwd": tmp_path, "env": environ, "text": True, "timeout": 90}
    loaded = subprocess.check_output(run, **how).split()
    assert "agent.supervisor.run" in loaded
    assert [name for name in loaded if name.startswith(FOR_SEVERAL)] == []
