"""The agent's end of a rank's connection, played by a test, and a state without content."""

from __future__ import annotations

import os
import secrets
import socket
import threading

import pytest

from worker_hooks.contract import protocol, wire

LONG_S = 20.0


class Agent:
    """The other end of the rank's line."""

    def __init__(self):
        self.name = f"msrun-test-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self.link = None
        self.hello = None
        self._greeter = threading.Thread(target=self._greet)
        self._greeter.start()

    def _greet(self):
        self.link, _ = self._listener.accept()
        self.link.settimeout(LONG_S)
        self.hello = self.hear()
        self.tell(protocol.Welcome(""))

    def tell(self, message):
        wire.send(self.link, message)

    def hear(self):
        message, fds = wire.receive(self.link)
        for fd in fds:
            os.close(fd)
        return message

    def hears_nothing(self, within_s=0.1):
        self.link.settimeout(within_s)
        with pytest.raises(TimeoutError):
            self.hear()
        self.link.settimeout(LONG_S)

    def close(self):
        self._greeter.join(LONG_S)
        self.link.close()
        self._listener.close()


class Source:
    """A state of which only the step matters."""

    kept = None
    page = None

    def __init__(self):
        self.step, self.changed = 0, ""

    def is_complete(self):
        return False

    def is_copied(self):
        return False

    device = None

    def why_moved(self):
        return ""

    def why_unknown(self):
        return ""

    def why_changed(self):
        return self.changed

    def version(self, _step):
        return 0

    def nbytes(self):
        return 5, 4

    def note(self):
        self.step += 1

    def forget(self):
        pass
