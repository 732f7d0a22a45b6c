"""The password of a certificate is asked for at a terminal, and not shown."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.certificates import PASSWORD, authority
from support.free_ports import free_port
from support.jobs import DEADLINE_S, ROOT, WORKERS


@pytest.mark.parametrize("typed", [PASSWORD, "wrong"])
def test_it_is_asked_for_once_and_not_echoed(tmp_path: Path, typed: str) -> None:
    config = authority(tmp_path).config()
    here, there = pty.openpty()
    words = [
        "--nnodes=2",
        "--node-rank=0",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    run = [sys.executable, "-m", "msrun", *words, "--cluster-time-out=1", "--join=True"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = shlex.join(map(str, [*run, f"--tls-config={config}", WORKERS / "place.py"]))
    msrun = subprocess.Popen(
        # a terminal is somebody's once a session opens it
        ["sh", "-c", f"exec <{os.ttyname(there)} && exec {command}"],
        stdin=subprocess.DEVNULL,
        stdout=there,
        stderr=there,
        env=environ,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(there)
    said = b""
    try:
        while b"(MSRUN_SERVER_PASSWORD): " not in said:
            said += os.read(here, 4096)
        os.write(here, f"{typed}\n".encode())
        with contextlib.suppress(OSError):  # it has ended, and all that it said was read
            while more := os.read(here, 4096):
                said += more
        code = msrun.wait(DEADLINE_S)
    finally:
        msrun.kill()
        os.close(here)
    assert typed.encode() not in said
    if typed == PASSWORD:
        assert b"1 of 2 nodes is here" in said
        assert code == 1
    else:
        assert b"cannot be opened" in said
        assert code == 2
