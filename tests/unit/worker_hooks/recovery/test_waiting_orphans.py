"""The controller's node is gone while ranks wait for its clearance: nobody will give one any more."""

from __future__ import annotations

import os
import threading
import time

import pytest
from support.gates import LONG_S, until
from support.played_agent import Source

from worker_hooks.contract import clearance_board
from worker_hooks.contract.clearance_board import ClearanceBoard
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.left_pages import ALONE, TAKEN, claim, claimed
from worker_hooks.guard.guard import Guard, StartupOptions
from worker_hooks.guard.update_clearance import UpdateClearance
from worker_hooks.recovery import agent_lost, attempt_claim
from worker_hooks.recovery.peer_notes import PeerNotes

STEP = 4


class Committed(Source):
    """A state as of step 4, and what its next commit does."""

    def __init__(self):
        super().__init__()
        self.step = STEP

    def go_on(self):
        self.step += 1


class Orphan:
    """A rank on a node of its own, which waits in front of the update of step 5."""

    def __init__(self, rank, folder):
        told = RankEnv(rank, world_size=3, attempt=0, record_id="run", hooks="", drill="", nodes=3)
        self.source = Committed()
        self.guard = Guard(
            told,
            self.source,
            StartupOptions(str(folder)),
            before_dump=lambda: None,
            when_agent_died=lambda _: None,
        )
        fd = clearance_board.create()
        self.board = ClearanceBoard(fd)
        os.close(fd)
        self.board.begin(1)
        self.guard.gate.vote = UpdateClearance(
            self.board, rank, lambda _: None, lambda _: None, is_cut=False
        )
        self.notes = PeerNotes(folder, rank)
        self.main = threading.Thread(target=self._train, daemon=True)
        self.main.start()
        until(lambda: self.guard.gate.vote.is_waiting)

    def _train(self):
        gate = self.guard.gate
        gate.begin_update()
        gate.end_update()
        gate.commit(self.source.go_on)
        gate.pause()

    def settle(self):
        """What the listener does once it has heard that nobody decides any more."""
        self.guard.gate.hold()
        self.notes.tell(step=self.source.step)
        listener = threading.Thread(
            target=agent_lost._settle, args=(self.guard, self.notes, 1e3), daemon=True
        )
        listener.start()
        return listener


@pytest.fixture
def orphans(tmp_path):
    found = [Orphan(rank, tmp_path) for rank in range(3)]
    yield found
    for each in found:
        each.guard.gate.exit()
        each.board.begin(0)
        each.main.join(LONG_S)
        each.board.close()


def test_all_that_wait_for_it_end_their_step_before(orphans):
    """They stood until the grace of an update was over, as each took the others to be busy."""
    listeners = [each.settle() for each in orphans]
    for each in listeners:
        each.join(LONG_S)
        assert not each.is_alive()
    notes = orphans[0].notes.read()
    assert {(note.step, note.is_settled, note.is_whole) for note in notes.values()} == {
        (STEP, True, True)
    }


def test_they_follow_one_that_was_cleared(orphans):
    """Its node had heard of the clearance; that it is on its way they hear from its note."""
    orphans[2].board.clear(STEP + 1)
    listeners = [each.settle() for each in orphans]
    for each in listeners:
        each.join(LONG_S)
        assert not each.is_alive()
    notes = orphans[0].notes.read()
    assert {(note.step, note.is_settled, note.is_whole) for note in notes.values()} == {
        (STEP + 1, True, True)
    }


def test_one_that_has_told_nothing_may_be_making_its_update(orphans):
    listeners = [each.settle() for each in orphans[:2]]
    until(lambda: all(note.is_waiting for note in orphans[0].notes.read().values()))
    listeners[0].join(0.1)
    assert all(each.is_alive() for each in listeners)
    orphans[2].board.clear(STEP + 1)
    listeners.append(orphans[2].settle())
    for each in listeners:
        each.join(LONG_S)
    assert {note.step for note in orphans[0].notes.read().values()} == {STEP + 1}


def test_who_is_held_goes_on_without_a_clearance_no_more(orphans):
    """It may have been about to: then its note says nothing yet, and afterwards not that it waits."""
    one = orphans[0].guard.gate.vote
    is_seen = []

    def held():
        is_seen.append(one.waits_for_msrun)
        return True

    assert one.waits_for_msrun
    one._go_on_without(STEP + 1, 1.0, held)
    assert (is_seen, one.waits_for_msrun) == ([False], True)
    one._go_on_without(STEP + 1, 1.0, lambda: False)
    assert not one.waits_for_msrun


def test_who_has_a_copy_of_a_page_says_so_to_all(orphans):
    """Ranks on a third node waited five times as long for the same notes."""
    late_s = agent_lost._late_s(orphans[2].guard, {0}, orphans[2].notes.read())
    assert late_s == agent_lost.LATE_S
    orphans[1].notes.tell(step=STEP, copied=[0])
    told = orphans[2].notes.read()
    assert agent_lost._late_s(orphans[2].guard, {0}, told) == agent_lost.LATE_COPIED_S
    assert agent_lost._late_s(orphans[2].guard, {0, 1}, told) == agent_lost.LATE_S
    assert agent_lost._late_s(orphans[2].guard, {0, 1}, told, {1}) == agent_lost.LATE_COPIED_S


@pytest.fixture
def unheard(orphans):
    """Ranks 1 and 2, which node 0 was silent to for the whole limit; rank 1 has a copy of its page."""
    for each in orphans[1:]:
        each.guard.is_forsaken = True
    orphans[1].notes.tell(step=STEP, copied=[0])
    return orphans[1:]


def test_a_note_of_a_silent_node_is_awaited_shortly_if_a_page_is_there(unheard):
    """They waited a second for what ten seconds had not brought: a job stood for it."""
    _, last = unheard
    told = last.notes.read()
    assert agent_lost._late_s(last.guard, {0}, told) == agent_lost.LATE_UNHEARD_S
    assert agent_lost._late_s(last.guard, {0, 1}, told) == agent_lost.LATE_SILENT_S


def test_who_is_a_commit_behind_follows_though_nobody_else_is_awaited(unheard, monkeypatch):
    monkeypatch.setattr(agent_lost, "LATE_UNHEARD_S", 0.0)
    monkeypatch.setattr(agent_lost, "LATE_COPIED_S", LONG_S)
    behind, cleared = unheard
    cleared.board.clear(STEP + 1)
    until(lambda: cleared.source.step == STEP + 1)
    listeners = [each.settle() for each in (cleared, behind)]
    for each in listeners:
        each.join(LONG_S)
        assert not each.is_alive()
    notes = behind.notes.read()
    assert {(note.step, note.is_settled, note.is_whole) for note in notes.values()} == {
        (STEP + 1, True, True)
    }


class Clock:
    """The time of a listener, which stands; it counts the looks."""

    def __init__(self):
        self.now_s = 0.0
        self.looks = 0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.looks += 1
        time.sleep(seconds)

    def let_it_look(self):
        """Until it has read what was told before."""
        seen = self.looks
        until(lambda: self.looks >= seen + 2)


def test_a_peer_that_has_just_told_may_be_about_to_go_on(unheard, monkeypatch):
    """Nodes notice a silence at different times: who was first waits for who is last."""
    clock = Clock()
    monkeypatch.setattr(agent_lost, "time", clock)
    first, last = unheard
    listener = first.settle()
    clock.let_it_look()
    clock.now_s += 2 * agent_lost.LATE_UNHEARD_S
    clock.let_it_look()  # rank 2 is on a node that lives: it is awaited for longer
    last.notes.tell(step=STEP)
    clock.let_it_look()
    clock.now_s += agent_lost.LATE_UNHEARD_S / 2
    clock.let_it_look()
    assert listener.is_alive()
    clock.now_s += agent_lost.LATE_UNHEARD_S
    listener.join(LONG_S)
    assert (first.notes.mine.step, first.notes.mine.is_settled) == (STEP, True)


# --- ranks of node 0 whose msrun alone was killed ---------------------------------------------------


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A rank of node 0, which may be saved by others."""
    monkeypatch.setattr(attempt_claim, "TAKEN_S", 0.05)
    told = RankEnv(0, world_size=3, attempt=2, record_id="run", hooks="", drill="", nodes=3)
    return Guard(
        told,
        Committed(),
        StartupOptions(str(tmp_path)),
        before_dump=lambda: None,
        when_agent_died=lambda _: None,
    )


def test_they_save_if_no_other_node_takes_their_part(alone, tmp_path):
    assert attempt_claim.is_left(alone)
    assert claimed(tmp_path, "run", 2) == ALONE
    assert attempt_claim.is_left(alone)  # as its peers


def test_they_end_if_one_does(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_claim, "TAKEN_S", LONG_S)
    claim(tmp_path, "run", 2, TAKEN)
    assert not attempt_claim.is_left(alone)


def test_they_wait_no_longer_once_ranks_of_others_save(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_claim, "TAKEN_S", LONG_S)
    agent_lost.notes_folder(str(tmp_path), "run").mkdir()
    assert attempt_claim.is_left(alone)


def test_what_is_no_folder_is_claimed_by_nobody(alone, tmp_path):
    (tmp_path / "file").touch()
    alone.options = StartupOptions(str(tmp_path / "file"))
    assert attempt_claim.is_left(alone)
