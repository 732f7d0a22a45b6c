"""What cannot be had is let go of whole."""

import os
import socket

import pytest

from agent.shadows.shadows import Shadows
from worker_hooks.contract.env import shadows_socket


def descriptors():
    return sorted(map(int, os.listdir("/proc/self/fd")))[:-1]  # without that of the listing


def test_a_name_that_is_taken_costs_no_descriptor():
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken.bind(f"\0{shadows_socket('taken')}")
    before = descriptors()
    with pytest.raises(OSError, match="in use"):
        Shadows("taken", (0,), None)
    assert descriptors() == before
    taken.close()


def test_without_room_for_the_page_the_listener_is_closed(monkeypatch):
    def refuse(*_args):
        raise OSError("no more files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="no more files"):
        Shadows("no room", (0,), None)
    assert descriptors() == before
