"""Connects to MASTER_PORT and fails, a little later in every attempt.

`knock.py N`: first leaves N large children in sessions of their own, slow to kill.
"""

import os
import signal
import socket
import sys
import time

import torch  # the forkserver that imports it too answers an order for the store at once

for _ in range(int(sys.argv[1])):
    junk = bytearray(60_000_000)
    if os.fork() == 0:
        os.setsid()
        junk[::4096] = b"x" * len(junk[::4096])
        signal.pause()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
link = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
time.sleep(0.002 * attempt)
os._exit(1 if torch else 2)
