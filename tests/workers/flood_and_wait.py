"""Writes more than a pipe holds, says so, waits for a signal."""

import os
import signal

print(20 * (8000 * "x" + "\n"), flush=True)
print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} flooded", flush=True)
signal.pause()
