"""Says a line on both streams, then waits until the file named by the first argument exists."""

import os
import sys
import time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"hello from {rank} in attempt {attempt}", flush=True)
print(f"trouble in {rank}", file=sys.stderr, flush=True)
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if "fail-first" in sys.argv and rank == "0" and attempt == "0":
    sys.exit(3)
print(f"bye from {rank} in attempt {attempt}", flush=True)
