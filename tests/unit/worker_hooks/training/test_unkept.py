"""What is kept nowhere is looked at rarely, and as loops begin."""

import pytest
from support.one_rank import Training

from worker_hooks.script.kept import ScriptValues
from worker_hooks.training import unkept
from worker_hooks.training.unkept import Unkept


@pytest.fixture
def looks(monkeypatch):
    """The commits at which there was a look."""
    found = []
    watch = Unkept({}, lambda _: None, ScriptValues())
    watch.begin([])
    monkeypatch.setattr(watch._objects, "changed", lambda _: [str(watch._commits)])

    def look(count, *, first=0, share=1e9):
        monkeypatch.setattr(unkept, "SHARE", share)
        for commit in range(1, count + 1):
            found.extend(watch.committed(bool, is_first=commit == first))
        return found

    return look


def test_at_powers_of_two_and_at_the_first_commit_of_a_loop(looks):
    assert looks(20, first=11) == ["1", "2", "4", "8", "11", "16"]


def test_loops_that_are_short_are_not_slowed_down(looks):
    assert looks(20, first=11, share=1e-9) == ["1", "2", "4", "8", "16"]


class Places:
    """A loader that saves its own place."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(("loader", "is_saved"), [(Places(), True), (range(4), False)])
def test_a_loader_that_saves_its_place_is_kept(loader, is_saved):
    training = Training()
    for _ in range(2):
        for _ in training.state.batches(loader):
            training.update()
    script = training.committed.private.script
    assert script.is_registered(loader) == is_saved
    assert [*map(id, script._registered)].count(id(loader)) == is_saved
