"""Pages of ranks of other nodes, as the controller's node takes them."""

import os
from types import SimpleNamespace

import pytest
from support.status_pages import make, write

from agent.hooks.status_pages import StatusPages
from agent.supervisor.hooks_bridge import HooksBridge
from worker_hooks.contract.packed_page import packed


class Here:
    """What of a bridge has to do with pages, in attempt 1."""

    def __init__(self):
        self._attempt, self._pages = 1, StatusPages()
        self._copies = SimpleNamespace(show=lambda _: None)
        self.refused = []
        self._journal = SimpleNamespace(event=lambda *_, **why: self.refused.append(why))

    def mirror(self, attempt, step):
        fd, page = make(7, attempt=attempt)
        write(page, step, step)
        octets = packed(page)
        page.close()
        os.close(fd)
        HooksBridge.mirror(self, 7, attempt, octets)
        return self._pages.newest_step(7)


def test_a_page_of_this_attempt_takes_the_place_of_the_last_one():
    here = Here()
    assert [here.mirror(1, step) for step in (3, 4)] == [3, 4]
    assert here.refused == []


@pytest.mark.parametrize("attempt", [0, 2])
def test_a_page_of_another_attempt_is_not_that_of_a_rank_that_has_none(attempt):
    """A rank that is replaced has none; what its node had sent of the one before may come late."""
    assert Here().mirror(attempt, 3) is None


def test_the_last_page_of_a_rank_that_lives_on_is_taken_until_it_has_the_next():
    here = Here()
    here.mirror(1, 3)
    here._attempt = 2
    assert here.mirror(1, 4) == 4
    assert here.mirror(2, 5) == 5
    assert here.mirror(1, 6) == 5
