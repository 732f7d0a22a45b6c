"""Private states of ranks that write none, for a leader on another node: their pages are left."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from support.status_pages import make, write

from worker_hooks.recovery import unaided_dump
from worker_hooks.recovery.peer_notes import PeerNotes
from worker_hooks.storage.private_records import record

STEP, ATTEMPT = 7, 0
WORLD = 6  # two a node


class Peers(SimpleNamespace):
    """What a rank knows of the others of its node, and of copies."""

    def __iter__(self):
        return iter(self.near)

    @property
    def copied(self):
        return set(self.far)

    def pages(self):
        return self.near | self.far


@pytest.fixture
def pages():
    """Rank 5 was stuck in the step's backward, all others have committed."""
    made = {rank: make(rank, ATTEMPT) for rank in range(WORLD)}
    for rank, (_, page) in made.items():
        write(page, STEP, STEP, is_commit=rank != 5)
    yield {rank: page for rank, (_, page) in made.items()}
    for fd, page in made.values():
        page.close()
        os.close(fd)


class Told:
    """One rank's part in the dump, and the notes that all share."""

    def __init__(self, folder, pages, rank, *, near, far=()):
        self.notes = PeerNotes(folder, rank)
        self.guard = SimpleNamespace(
            env=SimpleNamespace(rank=rank, nodes=3, world_size=WORLD, attempt=ATTEMPT),
            peers=Peers(
                near={each: pages[each] for each in near}, far={each: pages[each] for each in far}
            ),
            source=SimpleNamespace(page=pages[rank]),
        )
        self.dump = unaided_dump.UnaidedDump(self.guard, self.notes, stall_s=60.0)
        self.notes.tell(step=STEP if rank != 5 else STEP - 1, is_settled=True, is_whole=rank == 5)

    def follows(self):
        """It writes no state, only what is its own."""
        self.dump._follow(2, self.notes.read())
        return set(self.notes.left())


@pytest.fixture
def notes(tmp_path):
    leader = PeerNotes(tmp_path / "notes", 2)
    (tmp_path / "dump").mkdir()
    leader.tell(step=STEP, is_settled=True, is_whole=True, leads=str(tmp_path / "dump"))
    return leader


def test_one_that_was_stuck_in_a_collective_leaves_its_page(notes, pages):
    """Its random numbers were lost, though it answered: only its own node had its page."""
    stuck = Told(notes.folder, pages, 5, near=[4])
    Told(notes.folder, pages, 4, near=[5])
    assert stuck.follows() == {5}
    left = notes.pages(ATTEMPT)
    assert record(left[5], STEP).step == STEP


def test_the_lowest_rank_of_a_node_leaves_those_of_the_silent(notes, pages):
    assert Told(notes.folder, pages, 4, near=[5]).follows() == {5}


def test_only_the_lowest(notes, pages):
    lowest = Told(notes.folder, pages, 3, near=[4, 5])
    assert Told(notes.folder, pages, 4, near=[3, 5]).follows() == set()
    assert lowest.follows() == {5}


@pytest.mark.parametrize(("is_there", "left"), [(False, {0, 1}), (True, set())])
def test_a_copy_is_left_unless_the_node_of_its_ranks_is_there(notes, pages, is_there, left):
    """The page itself may be newer than the copy."""
    if is_there:
        Told(notes.folder, pages, 1, near=[0])
    Told(notes.folder, pages, 5, near=[4])
    assert Told(notes.folder, pages, 4, near=[5], far=[0, 1]).follows() == left


def test_of_a_leaders_own_node_nothing_is_left(notes, pages):
    assert Told(notes.folder, pages, 3, near=[2]).follows() == set()


def test_a_leader_prefers_its_own_nodes_pages_to_those_left_and_these_to_copies(
    notes, pages, monkeypatch
):
    seen = {}

    def completed(found, _ranks, _step):
        seen.update(found)
        return {}

    monkeypatch.setattr(unaided_dump.private_records, "completed", completed)
    for rank in (0, 3):
        unaided_dump.leave_page(notes.folder, rank, pages[rank].content())
    leader = Told(notes.folder, pages, 2, near=[3], far=[0, 1])
    leader.dump._complete_private(None, STEP, ())
    assert seen[3] is pages[3]
    assert seen[1] is pages[1]
    assert seen[0] is not pages[0]
    assert set(seen) == {0, 1, 2, 3}
