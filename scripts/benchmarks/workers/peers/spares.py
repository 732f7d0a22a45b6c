"""Starts an NVRx in-process job: the ranks and a spare one, without any launcher above them."""

import os
import socket
import subprocess
import sys

_, nproc, script, *args = sys.argv
count = int(nproc.partition("=")[2])
with socket.socket() as one, socket.socket() as other:
    for free in (one, other):
        free.bind(("127.0.0.1", 0))
    ports = [str(free.getsockname()[1]) for free in (one, other)]
variables = {
    "ACTIVE_RANKS": str(count),
    "WORLD_SIZE": str(count + 1),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": ports[0],
    "DATA_PORT": ports[1],
}
jobs = [
    subprocess.Popen(
        [sys.executable, script, *args], env=os.environ | variables | {"RANK": str(rank)}
    )
    for rank in range(count + 1)
]
ended = [job.wait() for job in jobs]  # one is killed, the others continue
sys.exit(1)
