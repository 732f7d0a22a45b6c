"""Of a registered object that may differ by rank each rank keeps its own, if it is small."""

import pytest
import torch

from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.values import Script
from worker_hooks.state.registry import pieces_of
from worker_hooks.state.stateful import SMALL_BYTES, ObjectPiece, RankObjects

NAME = "state.registered.meter"


class Meter:
    """Makes its state anew each time that it is asked."""

    def __init__(self, size=0):
        self.losses, self.size, self.loads, self.bad = [], size, 0, None

    def state_dict(self):
        state = {"losses": torch.tensor(self.losses, dtype=torch.float64), "bad": self.bad}
        return state | ({"table": torch.zeros(self.size)} if self.size else {})

    def load_state_dict(self, state):
        self.losses, self.loads = state["losses"].tolist(), self.loads + 1


class Rank:
    """A process with one registered object; its loop has begun."""

    def __init__(self, ignored=(), **meter):
        self.meter = Meter(**meter)
        self.pieces = pieces_of({"meter": self.meter})
        self.values = ScriptValues(objects=RankObjects(self.pieces))
        self.values.ignored.update(ignored)
        self.values.begin()

    def step(self, loss=None, late=None):
        if loss is not None:
            self.meter.losses.append(loss)
        self.values.look(is_commit=False)
        if late is not None:
            self.meter.losses.append(late)
        return self.commit()

    def commit(self):
        self.values.look(is_commit=True)
        self.pieces[0].snapshot()
        return self.saved

    @property
    def saved(self):
        return Script.split(self.values.content)


def test_a_rank_gets_its_own_state_back_from_the_first_commit_on():
    one, two = Rank(), Rank()
    assert NAME in one.saved.record.values  # the loop has begun, and nothing was changed
    saved = one.step(1.5)
    two.step(2.5)
    one.step(3.5)
    one.meter.load_state_dict(two.meter.state_dict())  # as the writer of the checkpoint had it
    one.values.restore(saved)
    assert one.meter.losses == [1.5]
    one.step(0.1)
    again = Rank()
    again.values.restore(one.saved)
    assert again.meter.losses == [1.5, 0.1]


def test_what_does_not_change_behind_backward_is_not_late_though_its_tensors_are_new():
    one = Rank()
    for loss in (1.5, None, 2.5):
        one.step(loss)
    assert one.values.late == set()
    one.step()
    content = one.values.content
    one.step()
    assert one.values.content is content  # nothing was written anew
    one.step(late=4.5)
    assert one.values.late == {NAME}
    assert [*one.values.late_values()] == [f"late: `{NAME}`"]


def test_a_late_state_is_taken_from_a_peer_that_had_the_same():
    one, two = Rank(), Rank()
    for each in (one, two):
        each.step(late=1.5)
    one.values.look(is_commit=False)
    died, peer = one.saved, two.step(late=2.5)
    again = Rank()
    again.values.restore(died, peer)
    assert again.meter.losses == [1.5, 2.5]


def test_with_other_ranks_or_before_the_loop_the_replicated_state_stays():
    saved, again = Rank().step(1.5), Rank()
    again.meter.losses = [9.5]
    again.values.restore(saved, has_objects=False)
    again.values.restore(saved, saved, has_objects=False)
    assert (again.meter.losses, again.meter.loads) == ([9.5], 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda meter: setattr(meter, "size", SMALL_BYTES),
        lambda meter: setattr(meter, "bad", "a" * 200_000),
        lambda meter: setattr(meter, "bad", object()),
        lambda meter: setattr(meter, "state_dict", lambda: 1 / 0),
    ],
)
def test_what_cannot_be_kept_any_more_leaves_no_old_state(change):
    one = Rank()
    one.step(late=1.5)
    assert one.values.keeps("meter")
    change(one.meter)
    one.values.look(is_commit=True)
    assert not one.values.keeps("meter")
    assert (one.saved.record.values, one.values.late) == ({}, set())


def test_what_is_large_or_ignored_or_not_in_host_memory_is_not_kept():
    assert not Rank(size=SMALL_BYTES).values.keeps("meter")
    ignored = Rank(ignored=["meter"])
    assert ignored.step(1.5).record.values == {}
    assert ignored.values.keeps("meter")  # nobody is to look at it
    meter = Meter()
    meter.state_dict = lambda: {"x": torch.zeros(2, device="meta")}
    assert ObjectPiece("meter", meter).small("meter") is None  # to read it would wait for a device


def test_a_state_that_is_there_is_not_loaded_once_more():
    """A loader's would begin in the middle of the next epoch."""
    one = Rank()
    saved = one.step(1.5)
    one.values.restore(saved)
    assert (one.meter.losses, one.meter.loads) == ([1.5], 0)
    one.meter.losses = [2.5]
    one.values.restore(saved)
    assert (one.meter.losses, one.meter.loads) == ([1.5], 1)


def test_another_shape_of_the_same_bytes_is_a_change():
    meter, values = Meter(), None
    shape = [(2, 3)]
    meter.state_dict = lambda: {"x": torch.zeros(shape[0])}
    values = ScriptValues(objects=RankObjects(pieces_of({"meter": meter})))
    values.begin()
    values.look(is_commit=True)
    shape[0] = (3, 2)
    values.look(is_commit=True)
    saved = Script.split(values.content)
    assert [tuple(each.shape) for each in saved.tensors.values()] == [(3, 2)]


def test_an_object_that_takes_half_of_its_state_ends_the_rank():
    """A warning would leave a peer's state in its place, and training would go on."""
    saved, again = Rank().step(1.5), Rank()

    def refuse(_):
        raise ValueError("of another version")

    again.meter.load_state_dict = refuse
    with pytest.raises(RuntimeError, match=r"registered\.meter cannot be restored: of another"):
        again.values.restore(saved)


def test_an_optimizer_is_the_same_on_all_ranks():
    class Mine(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict()

    pieces = pieces_of({"optimizer": Mine([torch.zeros(1)])})
    assert RankObjects(pieces).names() == []
    count = ScriptValues(objects=RankObjects(pieces_of({"meter": Meter()})))
    count.begin()
    assert count.count == 0  # it is none of the script's own values
