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
WANTED = [1, 2]


class Rank:
    """A rank whose listener is the test; ``answers``: each is given, in turn, when it has asked."""

    def __init__(self, *answers):
        self.asked, self.is_guarding, self._answers = [], True, list(answers)
        self.far = FarTensors(self._ask, lambda: self.is_guarding, self._look)
        self.dump = SimpleNamespace(inode=INODE, absent=[])
        self.dump.complete = self.dump.absent.append

    def _look(self):
        """No other order has come."""

    def _ask(self, inode, variants):
        self.asked.append((inode, variants))
        if self._answers:
            why_not, *absent = self._answers.pop(0)
            answers = [MemoryBrought(inode, why_not, each) for each in absent or [[]]]
            threading.Thread(target=self._say, args=(answers,)).start()

    def _say(self, answers):
        for answer in answers:
            self.far.hear(answer, self.dump)

    def bring(self):
        return self.far.bring(INODE, WANTED)


def test_no_answer_counts_twice():
    rank = Rank([""], ["no room"])
    assert rank.bring() == []
    assert (rank.asked, rank.dump.absent) == ([(INODE, WANTED)], [[]])
    with pytest.raises(OSError, match="no room"):
        rank.bring()


def test_why_it_cannot_be_brought_is_an_error_and_it_may_be_asked_for_again():
    rank = Rank(["no room"], [""])
    with pytest.raises(OSError, match="to this node: no room"):
        rank.bring()
    assert not rank.dump.absent
    rank.bring()
    assert (rank.asked, rank.dump.absent) == ([(INODE, WANTED)] * 2, [[]])


def test_what_comes_of_other_states_is_noted_and_is_no_answer():
    """Another rank of the node has asked for it."""
    rank = Rank(["", [1, 2, 4], [2, 4], [4]])
    assert rank.bring() == [4]
    assert rank.dump.absent == [[1, 2, 4], [2, 4], [4]]


def test_an_answer_about_an_earlier_dump_completes_no_other():
    rank = Rank([""])
    rank.dump.inode = 78  # another order to rejoin has come meanwhile
    rank.bring()
    assert not rank.dump.absent


def test_nobody_waits_once_msrun_is_gone(monkeypatch):
    monkeypatch.setattr(far_tensors, "LOOK_S", 0.001)
    rank = Rank()
    rank.is_guarding = False
    with pytest.raises(OSError, match="msrun cannot be asked"):
        rank.bring()


def test_another_order_to_rejoin_ends_the_wait(monkeypatch):
    monkeypatch.setattr(far_tensors, "LOOK_S", 0.001)
    rank, ejected = Rank(), iter([False, True])

    def look():
        if next(ejected):
            raise EjectedError

    rank.far._look = look
    with pytest.raises(EjectedError):
        rank.bring()
