"""Leaves children everywhere: in its group, in a session of their own, and twice forked away.

`family.py exit` leaves with 0, `family.py die` with SIGKILL (rank 0; others wait), else waits.
"""

import os
import signal
import subprocess
import sys

SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]
subprocess.Popen(SLEEP)
subprocess.Popen(SLEEP, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(SLEEP[0], SLEEP)
    os._exit(0)
os.wait()
print("family")
what = sys.argv[1]
if what == "exit":
    os._exit(0)
if what == "die" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
