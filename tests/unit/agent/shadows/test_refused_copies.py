"""Why there are no newer shadows is said as long as that is so, whichever are the newest."""

from __future__ import annotations

import os
import socket
from itertools import count

import pytest

from agent.controller.events import ShadowsChanged
from agent.shadows.shadows import Shadows
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import shadows_socket

THREAD = "its threads: writer"
NAMES = (f"refused-{os.getpid()}-{number}" for number in count())


class NoLoop:
    """Asks nobody when there is something to read: tests know."""

    def add_reader(self, fd, *_):
        """Nothing is looked at."""

    def remove_reader(self, fd):
        """Nothing was."""


class NoJournal:
    def event(self, what, **fields):
        """Nobody reads it."""


class Node:
    """The shadows of some ranks, and what the controller is told of them."""

    def __init__(self, ranks=(0, 1)):
        self.name = next(NAMES)
        self.shadows = Shadows(self.name, ranks, NoJournal())
        self.attempt = 0
        self.told = []
        self.lines = []
        self.answers = []
        self.shadows.attach(NoLoop(), self.answers.append, self.told.append, lambda: self.attempt)

    def hear(self, message):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(f"\0{shadows_socket(self.name)}")
        self.lines.append(line)
        wire.send(line, message)
        self.shadows.receive()

    def made(self, step, *ranks, begun=1):
        for rank in ranks:
            counts = {"0": begun}  # collectives of a group
            self.hear(protocol.ShadowMade(rank, self.attempt, step, 100 + rank, counts, 0.1))

    def refused(self, rank, step, why=THREAD, attempt=None):
        attempt = self.attempt if attempt is None else attempt
        self.hear(protocol.ShadowRefused(rank, attempt, step, why))

    def wake(self):
        self.attempt += 1
        orders = [protocol.WorkerOrder(rank, ("script",), {}, "", "") for rank in (0, 1)]
        self.shadows.wake(self.attempt, orders, 1)

    def heard(self):
        """What the controller was told since this was asked last: step and reason."""
        told, self.told[:] = [*self.told], []
        assert all(isinstance(each, ShadowsChanged) for each in told)
        return [(each.step, each.why) for each in told]

    def close(self):
        self.shadows.close()
        for line in self.lines:
            line.close()


@pytest.fixture
def node():
    one = Node()
    yield one
    one.close()


def test_a_refusal_that_comes_before_older_copies_are_complete_is_told_with_them(node):
    node.made(1, 0, 1)
    node.made(6, 0)
    node.refused(0, 11)
    node.refused(1, 11)
    assert node.heard() == [(1, ""), (1, f"rank 0: {THREAD}")]
    node.made(6, 1)
    assert node.heard() == [(6, f"rank 0: {THREAD}")]


def test_a_refusal_before_any_copy_is_complete_is_told_with_the_first_that_is(node):
    node.made(1, 0)
    node.refused(0, 6)
    node.made(1, 1)
    assert node.heard() == [(-1, f"rank 0: {THREAD}"), (1, f"rank 0: {THREAD}")]


def test_copies_that_do_not_belong_together_are_told_with_older_ones_that_do():
    node = Node((0, 1, 2))
    node.made(1, 0, 1, 2)
    node.made(6, 0, 1)
    node.made(11, 0)
    node.made(11, 1, begun=2)
    node.made(6, 2)
    node.close()
    (_, first), (step, why), (later, same) = node.heard()
    assert not first
    assert (step, later, same) == (1, 6, why)
    assert "at optimizer step 11 the ranks have not begun the same number" in why


def test_newer_copies_than_the_refused_ones_have_no_reason(node):
    node.made(1, 0, 1)
    node.made(6, 0)
    node.refused(0, 11)
    node.made(6, 1)
    node.heard()
    node.made(16, 0, 1)
    node.made(21, 0, 1)
    assert node.heard() == [(16, ""), (21, "")]


def test_the_newest_refusal_counts(node):
    node.made(1, 0, 1)
    node.refused(0, 16)
    node.refused(1, 6, "memory that other processes share")  # it is behind
    node.heard()
    node.made(11, 0, 1)
    assert node.heard() == [(11, f"rank 0: {THREAD}")]


def test_a_refusal_is_forgotten_with_all_copies(node):
    node.made(1, 0, 1)
    node.refused(0, 11)
    node.shadows.forget()
    node.heard()
    node.made(6, 0, 1)
    assert node.heard() == [(6, "")]


def test_a_new_attempt_is_to_refuse_anew(node):
    node.made(1, 0, 1)
    node.made(6, 0)
    node.refused(0, 11)
    node.heard()
    node.wake()
    node.made(6, 0, 1)
    assert node.heard() == [(6, "")]


def test_a_refusal_of_an_attempt_that_is_over_is_none_of_the_present_one(node):
    node.made(1, 0, 1)
    node.wake()
    node.heard()
    node.refused(1, 11, attempt=0)
    assert not node.heard()
