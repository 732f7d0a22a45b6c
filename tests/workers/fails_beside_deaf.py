"""Rank 1 raises as soon as rank 0 is deaf to SIGTERM and SIGINT."""

import os
import signal
import time

if os.environ["RANK"] == "0":
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    open("deaf", "x").close()
    while True:
        signal.pause()
while not os.path.exists("deaf"):
    time.sleep(0.005)
raise ValueError("the real root cause")
