"""`leave.py 0=3 1=-9`: rank 0 exits with 3, rank 1 dies of signal 9, others wait for SIGTERM.

`2=0@1` means: in attempt 1 only. Ranks that are not named leave with 0 if `rest=0` is given.
"""

import os
import signal
import sys

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for word in sys.argv[1:]:
    who, _, what = word.partition("=")
    code, _, when = what.partition("@")
    if who in {rank, "rest"} and when in {"", attempt}:
        number = int(code)
        if number < 0:
            os.kill(os.getpid(), -number)
            signal.pause()
        sys.exit(number)
print("ready")
while True:
    signal.pause()
