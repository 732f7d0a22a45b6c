"""Waits for the SIGTERM that tells a rank of its peer's death; nothing delays it here."""

import signal

from stamp import stamp

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
stamp("waiting")
if signal.sigtimedwait({signal.SIGTERM}, 60) is not None:
    stamp("signalled")
