"""`stranger.py N`: fails until attempt N, then starts a child with an environment of its own."""

import os
import signal
import subprocess
import sys

if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[1]):
    sys.exit(1)
child = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"]})
print(f"stranger {child.pid}")
while True:
    signal.pause()
