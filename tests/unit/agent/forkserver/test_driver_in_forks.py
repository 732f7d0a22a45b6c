"""A process that has called the driver of its accelerators is not forked: no fork could use them."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from agent.forkserver import preload_imports


@pytest.fixture
def built(monkeypatch):
    """A torch that was built for an accelerator, and whose driver was called by process ``pid``."""

    def install(pid: int | None, **built_for: str) -> None:
        cuda = SimpleNamespace(_is_in_bad_fork=lambda: pid is not None and os.getpid() != pid)
        torch = SimpleNamespace(version=SimpleNamespace(**built_for), cuda=cuda)
        monkeypatch.setitem(sys.modules, "torch", torch)

    monkeypatch.setattr(preload_imports, "threads", lambda: 1)
    return install


def test_a_driver_that_was_called_is_found_although_nothing_is_initialized(built):
    built(os.getpid(), cuda="13.0", hip=None)
    assert "driver of the accelerators" in preload_imports.why_not_fork()


def test_a_driver_that_nobody_called_does_not_matter(built):
    built(None, cuda="13.0")
    assert preload_imports.why_not_fork() == ""


def test_a_torch_for_the_host_alone_is_not_asked(built, monkeypatch):
    built(os.getpid(), cuda=None)
    monkeypatch.setattr(os, "fork", None)
    assert preload_imports.why_not_fork() == ""


def test_a_torch_that_fails_to_answer_is_not_trusted(built, monkeypatch):
    built(None, cuda="13.0")
    monkeypatch.setattr(sys.modules["torch"].cuda, "_is_in_bad_fork", lambda: 1 / 0)
    assert "driver of the accelerators" in preload_imports.why_not_fork()
