"""Ignores SIGTERM and never ends by itself."""

import signal
import threading

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
threading.Event().wait()
