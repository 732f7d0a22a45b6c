"""Every rank says that it begins; the rank named by the first argument raises, the others wait."""

import os
import signal
import sys

rank = os.environ["RANK"]
print(f"{rank} begins", flush=True)
if rank == sys.argv[1]:
    raise RuntimeError(f"rank {rank} had enough")
signal.pause()
