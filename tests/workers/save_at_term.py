"""Needs the store once more after SIGTERM, when the file `go` exists: ranks agree that all saved."""

import os
import signal
import sys
import time

from torch.distributed import TCPStore

stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
rank, ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"up {rank}", "1")
print("ready", flush=True)
while not (stops and os.path.exists("go")):
    time.sleep(0.005)
store.set(f"saved {rank}", rank)
saved = sorted(int(store.get(f"saved {other}")) for other in range(ranks))
print("all saved", saved, flush=True)
store.add("done", 1)
while store.add("done", 0) < ranks and os.path.exists("go"):
    time.sleep(0.005)
sys.exit(0)
