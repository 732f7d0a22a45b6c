"""Starts a torchft job: its lighthouse, and a torchrun for each replica group.

replicas.py RANKS_OF_A_GROUP --nproc-per-node=RANKS_IN_ALL SCRIPT ARGUMENTS...
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

_, size, nproc, script, *args = sys.argv
count = int(nproc.partition("=")[2]) // int(size)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
lighthouse = [
    str(Path(sys.executable).with_name("torchft_lighthouse")),
    *("--bind", address, "--min_replicas", "1"),
    *("--quorum_tick_ms", "100", "--join_timeout_ms", "1000"),
]
torchrun = [sys.executable, "-m", "torch.distributed.run"]
torchrun += ["--standalone", f"--nproc-per-node={size}"]
jobs = [subprocess.Popen(lighthouse)]
for replica in range(count):
    environ = {
        "REPLICA_GROUP_ID": str(replica),
        "NUM_REPLICA_GROUPS": str(count),
        "TORCHFT_LIGHTHOUSE": f"http://{address}",
    }
    command = [*torchrun, "--max-restarts=5", script, *args]
    jobs.append(subprocess.Popen(command, env=os.environ | environ))
os.wait()  # the first process to end ends the job; the benchmark ends the others
sys.exit(1)
