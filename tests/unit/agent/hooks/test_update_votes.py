"""The board of a vote is handed out, again where the kernel did not take it, and begins once all have it."""

import os

import pytest

from agent.hooks.update_votes import AHEAD, UpdateVotes
from worker_hooks.contract import protocol
from worker_hooks.contract.vote_board import VoteBoard


class Links:
    def __init__(self, refuses=0):
        self.refuses = refuses
        self.boards = {}

    def send(self, rank, message, fds):
        assert message == protocol.OpenVote()
        if self.refuses:
            self.refuses -= 1
            return False
        assert rank not in self.boards
        self.boards[rank] = VoteBoard(*fds)
        return True


class Journal:
    def __init__(self):
        self.said = []

    def event(self, name, **fields):
        self.said.append((name, fields))


@pytest.mark.parametrize("refuses", [0, 2])
def test_the_vote_begins_behind_the_updates_that_nobody_saw(refuses):
    links, journal = Links(refuses), Journal()
    before = set(os.listdir("/proc/self/fd"))
    votes = UpdateVotes(links, (0, 1, 2), journal)
    votes.open(0, (), is_cut=False)
    assert links.boards == {}
    votes.open(0, (), is_cut=True)
    votes.open(0, (), is_cut=True)
    assert set(links.boards) == {0, 1, 2}
    for rank, step in ((0, 4), (1, 5)):
        votes.hear(protocol.VoteOpened(rank, 0, step))
    assert not links.boards[2].is_needed(99)
    votes.hear(protocol.VoteOpened(2, 0, 4))
    assert journal.said == [("VoteBegan", {"step": 5 + AHEAD})]
    assert [links.boards[2].is_needed(step) for step in (6, 7)] == [False, True]
    votes.close()
    for board in links.boards.values():
        board.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_does_not_vote_leaves_all_without_one():
    links, journal = Links(), Journal()
    votes = UpdateVotes(links, (0, 1), journal)
    votes.open(0, (), is_cut=True)
    votes.hear(protocol.VoteOpened(0, 0, 4))
    votes.hear(protocol.VoteOpened(1, 0, 4, "it has an accelerator"))
    assert not links.boards[0].is_needed(99)
    assert journal.said == []
    votes.close()
