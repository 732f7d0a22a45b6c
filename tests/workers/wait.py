"""Says ready and waits. Words: deaf (ignores SIGTERM), polite (leaves with 0 on any stop signal)."""

import os
import signal
import sys

words = sys.argv[1:]
if "deaf" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "polite" in words:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR1, lambda *_: print("got SIGUSR1"))
signal.signal(signal.SIGUSR2, lambda *_: print("got SIGUSR2"))
print("ready", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
while True:
    signal.pause()
