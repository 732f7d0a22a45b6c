"""Every rank says that it begins; when all have, the rank named by the first argument raises, the others wait."""

import os
import signal
import sys
import time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"{rank} begins", flush=True)
open(f"{rank}.begun_{attempt}", "x").close()
if rank == sys.argv[1]:
    while sum(name.endswith(f".begun_{attempt}") for name in os.listdir()) < int(
        os.environ["WORLD_SIZE"]
    ):
        time.sleep(0.005)
    raise RuntimeError(f"rank {rank} had enough")
signal.pause()
