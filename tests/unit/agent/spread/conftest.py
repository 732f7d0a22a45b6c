"""What all tests of checkpoints on several nodes may need."""

import threading

import pytest


@pytest.fixture
def no_threads(monkeypatch):
    """The system gives no thread any more."""

    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
