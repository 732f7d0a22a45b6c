"""A rank asks for tensors that are on another node, and waits for the answer."""

import threading
from types import SimpleNamespace

import pytest

from worker_hooks.contract.protocol import MemoryBrought
from worker_hooks.guard import far_tensors
from worker_hooks.guard.far_tensors import FarTensors
from worker_hooks.guard.gate import EjectedError

DEADLINE_S = 60
INODE = 77


class Rank:
    """A rank whose listener is the test; each of ``answers`` is given when it has asked."""

    def __init__(self, *answers):
        self.asked, self.is_guarding, self._answers = [], True, list(answers)
        self.far = FarTensors(self._ask, lambda: self.is_guarding, self._look)
        self.dump = SimpleNamespace(inode=INODE, completed=0)
        self.dump.complete = lambda: vars(self.dump).update(completed=1)

    def _look(self):
        """No other order has come."""

    def _ask(self, inode):
        self.asked.append(inode)
        if self._answers:
            answer = MemoryBrought(inode, self._answers.pop(0))
            threading.Thread(target=self.far.hear, args=(answer, self.dump)).start()


def test_no_answer_counts_twice():
    rank = Rank("", "no room")
    rank.far.bring(INODE)
    assert (rank.asked, rank.dump.completed) == ([INODE], 1)
    with pytest.raises(OSError, match="no room"):
        rank.far.bring(INODE)


def test_why_it_cannot_be_brought_is_an_error_and_it_may_be_asked_for_again():
    rank = Rank("no room", "")
    with pytest.raises(OSError, match="from the controller's node: no room"):
        rank.far.bring(INODE)
    assert not rank.dump.completed
    rank.far.bring(INODE)
    assert (rank.asked, rank.dump.completed) == ([INODE] * 2, 1)


def test_an_answer_about_an_earlier_dump_completes_no_other():
    rank = Rank("")
    rank.dump.inode = 78  # another order to rejoin has come meanwhile
    rank.far.bring(INODE)
    assert not rank.dump.completed


def test_nobody_waits_once_msrun_is_gone(monkeypatch):
    monkeypatch.setattr(far_tensors, "LOOK_S", 0.001)
    rank = Rank()
    rank.is_guarding = False
    with pytest.raises(OSError, match="msrun cannot be asked"):
        rank.far.bring(INODE)


def test_another_order_to_rejoin_ends_the_wait(monkeypatch):
    monkeypatch.setattr(far_tensors, "LOOK_S", 0.001)
    rank, ejected = Rank(), iter([False, True])

    def look():
        if next(ejected):
            raise EjectedError

    rank.far._look = look
    with pytest.raises(EjectedError):
        rank.far.bring(INODE)
