"""Starts a program in its own group; at SIGUSR1 ends that with SIGTERM and says what it died of."""

import signal
import subprocess

helper = subprocess.Popen(["sleep", "600"])


def on_usr1(*_):
    helper.terminate()
    print(f"helper died of {signal.Signals(-helper.wait()).name}")


signal.signal(signal.SIGUSR1, on_usr1)
print("ready")
while True:
    signal.pause()
