"""What is saved of a script's values, and what comes back in the process and in another one."""

import sys
from collections import deque
from functools import partial
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from support.meshes import mesh_seen_by
from torch.distributed.tensor import DTensor, Shard

from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.values import Script
from worker_hooks.state.stateful import ObjectPiece, RankObjects


class Seen(NamedTuple):
    at: int


class Rank:
    """A process with a script as its ``__main__``; its values are globals."""

    def __init__(self, monkeypatch, tmp_path, objects=None, buffers=(), **values):
        self.main = ModuleType("__main__")
        self.main.__file__ = str(tmp_path / "train.py")
        vars(self.main).update(values)
        monkeypatch.setitem(sys.modules, "__main__", self.main)
        self.values = ScriptValues(objects=objects, buffer_of=dict(buffers).get)
        self.values.find(None)

    def __getattr__(self, name):
        return getattr(self.main, name)

    def under_way(self, **changes):
        vars(self.main).update(changes)
        self.values.look(is_commit=False)
        return self.saved()

    def commit(self, **changes):
        vars(self.main).update(changes)
        self.values.look(is_commit=True)
        return self.saved()

    def saved(self):
        return Script.split(self.values.content)


@pytest.fixture
def rank(monkeypatch, tmp_path):
    return lambda **values: Rank(monkeypatch, tmp_path, **values)


def test_only_what_changes_is_saved(rank):
    one = rank(n=0, epochs=3, net=torch.nn.Linear(1, 1), history=[])
    assert one.commit(n=1).record.values == {"n": 1}
    one.history.append(2.5)
    assert set(one.commit().record.values) == {"n", "history"}
    other = rank(n=0, epochs=5, history=[])  # another setting is given at the resume
    kept = other.history
    other.values.restore(one.saved())
    assert (other.n, other.epochs, other.history) == (1, 5, [2.5])
    assert other.history is kept


def test_a_scheduler_that_nobody_registered_comes_back_from_an_attribute_too(rank):
    class Trainer:
        def __init__(self):
            weights = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            self.schedule = torch.optim.lr_scheduler.StepLR(weights, 2)

        def train(self, steps):
            for _ in range(steps):
                self.schedule.optimizer.step()
                self.schedule.step()

    Trainer.__module__ = "__main__"
    one, other = rank(trainer=Trainer()), rank(trainer=Trainer())
    one.trainer.train(3)
    other.values.restore(one.commit())
    again = other.trainer.schedule
    assert (again.last_epoch, again.get_last_lr()) == (3, one.trainer.schedule.get_last_lr())
    one.trainer.train(5)
    other.trainer.train(5)
    assert again.last_epoch == one.trainer.schedule.last_epoch == 8


def test_what_the_begin_of_training_assigns_is_assigned_again_and_not_saved(rank):
    one = rank(ranks=0, best=0.0)
    vars(one.main).update(ranks=3, best=1.0)
    one.values.begin()
    assert one.saved().record.values == {}
    assert one.commit(best=2.0).record.values == {"best": 2.0}
    one.values.rewind()
    assert (one.ranks, one.best) == (0, 0.0)


def test_nothing_is_written_anew_if_nothing_has_changed(rank):
    one = rank(n=0)
    one.commit(n=1)
    one.under_way()
    content = one.values.content
    one.commit()
    one.under_way()
    assert one.values.content is content


def test_a_survivor_undoes_what_the_interrupted_step_has_changed(rank):
    one = rank(n=0, first=[0])
    saved = one.commit(n=1)
    one.first.append(1)  # its first change of all
    one.under_way(n=2, made_now=True)
    one.values.own.mine = 1
    one.values.look(is_commit=False)
    one.values.rewind()
    one.values.restore(saved)
    assert (one.n, one.first) == (1, [0])
    assert not hasattr(one.main, "made_now")
    assert not hasattr(one.values.own, "mine")


def test_a_change_after_backward_is_taken_from_a_peer_that_had_the_same(rank):
    peer, dead = rank(n=0, mine=10), rank(n=0, mine=20)
    for one in (peer, dead):
        one.under_way()
        one.commit(n=1, mine=one.mine + 1)
        one.under_way()
    before = dead.saved()
    after = peer.commit(n=2, mine=12)
    again = rank(n=0, mine=20)
    again.values.restore(before, after)
    assert (again.n, again.mine) == (2, 21)  # what differs between ranks nobody else knows


def test_the_first_change_of_all_is_taken_from_a_peer_that_began_alike(rank):
    peer, dead, again = rank(n=0, mine=1), rank(n=0, mine=2), rank(n=0, mine=2)
    before = dead.under_way()
    peer.under_way()
    again.values.restore(before, peer.commit(n=1, mine=5))
    assert (again.n, again.mine) == (1, 2)


def test_a_new_rank_knows_what_changes_behind_backward_before_it_sees_it(rank):
    """Of a value that changes every fifth step: its peers ask what it has now, too."""
    peer, again = rank(slow=0), rank(slow=0)
    peer.under_way()
    before = peer.commit(slow=5)
    again.values.restore(before)
    again.under_way()
    record = again.commit().record
    assert record.late == {"slow"}
    assert record.now == before.record.now
    elsewhere = rank(other=0)
    elsewhere.values.ignored.add("slow")
    elsewhere.values.restore(before)
    assert elsewhere.commit().record.late == set()


def test_that_a_rank_lacks_a_change_is_said(rank, caplog):
    peer, dead = rank(mine=1), rank(mine=2)
    for one in (peer, dead):
        one.under_way()
        one.commit(mine=one.mine + 2)
        one.under_way()
    rank(mine=2).values.restore(dead.saved(), peer.commit(mine=5))
    assert "mine differs between ranks, and this rank died between its update" in caplog.text


def test_a_step_is_complete_when_all_has_changed_that_usually_does_after_backward(rank):
    one = rank(n=0)
    one.under_way()
    one.commit(n=1)
    one.under_way()
    assert not one.values.settle()
    one.main.n = 2
    assert one.values.settle()
    assert (one.saved().record.values, one.saved().record.is_settled) == ({"n": 2}, True)
    one.commit()
    assert not one.under_way().record.is_settled


class Meter:
    """Its sum is that of all ranks: one of them may die while it is taken."""

    def __init__(self):
        self.count = self.total = 0
        self.inner = None

    def update(self, all_reduce=lambda: None):
        self.count += 1
        all_reduce()
        self.total += 1

    def average(self, update):
        update()

    def state_dict(self):
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state):
        vars(self).update(state)


def registered(meter):
    return RankObjects([ObjectPiece("meter", meter)])


@pytest.mark.parametrize("calls", ["object", "held", "function"])
def test_an_object_that_a_collective_cuts_in_half_is_not_settled(rank, calls):
    meter, own, seen = Meter(), Meter(), []
    one = rank(objects=registered(meter))
    one.values.begin()
    for _ in range(2):
        one.under_way()
        meter.update()
        one.commit()
    one.under_way()

    def settle():
        thread = Thread(target=lambda: seen.append(one.values.settle()))
        thread.start()
        thread.join()

    if calls == "object":
        meter.update(settle)
    elif calls == "held":  # it has a part of the state
        meter.inner, meter.count = own, 3
        own.update(settle)
    else:
        meter.count = 3
        Meter().update(settle)
    meter.count, meter.total = 3, 3
    settle()
    assert seen == [calls == "function", True]


def test_an_object_whose_method_trains_settles(rank):
    meter, seen = Meter(), []
    one = rank(objects=registered(meter))

    def step():
        one.under_way()
        meter.count += 1
        thread = Thread(target=lambda: seen.append(one.values.settle()))
        thread.start()
        thread.join()
        one.commit()

    one.values.find(meter.average)
    one.values.begin()
    meter.average(step)
    meter.average(step)
    assert seen == [True, True]


def test_a_large_object_is_not_made_text_at_each_look(rank):
    meter, asked = Meter(), []
    meter.total = ["x" * 100] * 2000
    meter.state_dict = lambda: asked.append(1) or {"count": meter.count, "total": meter.total}
    one = rank(objects=registered(meter))
    one.values.begin()
    for _ in range(32):
        meter.count += 1
        one.under_way()
        assert one.commit().record.values == {}
    assert len(asked) <= 6
    meter.total = 0
    for _ in range(10):
        one.under_way()
        meter.count += 1
        values = one.commit().record.values
    assert set(values) == {"state.registered.meter"}


def test_what_changes_and_is_large_is_said_once(rank, caplog):
    one = rank(shadow=torch.zeros(20_000))
    for _ in range(3):
        one.shadow.add_(1)
        assert one.commit().record.values == {}
    assert caplog.text.count("shadow changes while training and is larger than 64 KiB") == 1
    harmless = "that is harmless if each step sets it before it reads it: then say state.ignore("
    assert caplog.text.count(f"{harmless}'shadow')") == 1


@pytest.mark.parametrize("item", [object(), Seen(1)])
def test_a_container_that_gets_what_cannot_be_kept_is_named_at_once_and_not_put_back(rank, item):
    """Else a death brings back an old one, and the first line of a run promises too much."""
    one = rank(memory=deque(maxlen=9), fresh=[])
    one.values.begin()
    one.memory.append(1)
    for _ in range(3):
        assert set(one.commit().record.values) == {"memory"}
    one.memory.append(item)
    assert one.commit(fresh=[item]).record.values == {}
    (told,) = one.values.changes_of_data(is_first=False)  # which of `fresh` is new is not known yet
    assert told.startswith("`memory` gets or loses objects while training, and begins anew")
    assert told.endswith("before it reads it: then say state.ignore('memory')")
    one.memory.append(item)
    one.commit()
    assert one.values.changes_of_data(is_first=False) == []


@pytest.mark.parametrize("held", ["bare", "list", "dict"])
def test_that_a_distributed_value_changes_is_said_once_and_no_step_is_refused_for_it(
    rank, caplog, held
):
    with mesh_seen_by(0) as mesh:
        norm = DTensor.from_local(torch.zeros(1), mesh, [Shard(0)])
        one = rank(norm={"bare": norm, "list": [norm], "dict": {"a": norm}}[held])
        one.under_way()
        assert one.commit().record.values == {}
        assert caplog.text == ""
        for _ in range(3):
            one.under_way()
            norm.add_(1)
            assert one.commit().record.values == {}
    assert caplog.text.count("norm changes while training and is, or holds, a DTensor") == 1
    assert one.values.settle()


def test_a_name_that_is_ignored_is_left_alone(rank):
    one = rank()
    one.values.ignored.add("n")
    assert one.commit(n=1, m=1).record.values == {"m": 1}


@pytest.mark.parametrize(
    ("name", "is_ignored"),
    [("ema", True), ("net.ema", True), ("net.ema.inner", True), ("emas", False), ("net.x", False)],
)
def test_what_is_within_something_ignored_is_ignored_too(rank, name, is_ignored):
    values = rank().values
    values.ignored |= {"ema", "net"}  # the first part is a piece's name, and stands for itself
    assert values.is_ignored(name) == is_ignored


def test_registered_objects_and_containers_of_them_are_left_alone(rank):
    weight = torch.zeros(2)
    one = rank()
    one.values.exclude([{"w": [weight]}])
    vars(one.main).update(w=weight, all_of_them=[weight])
    weight.add_(1)
    assert one.commit().record.values == {}


def test_objects_and_closures_are_looked_into(rank):
    class Meter:
        def __init__(self):
            self.total = 0.0

    Meter.__module__ = "__main__"
    one = rank()
    best = 1

    def train():
        nonlocal best
        best += 1

    train.__module__ = "__main__"
    one.main.meter = Meter()
    one.values = ScriptValues()
    one.values.find(train)
    train()
    one.main.meter.total = 2.0
    saved = one.commit().record.values
    assert [name.rpartition(".")[2] for name in saved] == ["best", "total"]
    assert list(saved.values()) == [2, 2.0]


def test_own_values():
    kept = ScriptValues()
    with pytest.raises(AttributeError, match=r"state\.own\.best has no value yet"):
        kept.own.best  # noqa: B018
    kept.own.best = 0.5
    kept.own.setdefault(best=0.0, count=3)
    kept.shared.steps = [1]
    kept.look(is_commit=True)
    again = ScriptValues()
    again.own.setdefault(best=0.0)
    again.restore(Script.split(kept.content))
    assert (again.own.best, again.own.count, again.shared.steps) == (0.5, 3, [1])
    new = ScriptValues()
    new.restore(Script.split(kept.content), is_own=False)  # a rank that was not there
    assert (getattr(new.own, "best", None), new.shared.steps) == (None, [1])


def test_what_cannot_be_saved_any_more_raises_at_the_commit():
    kept = ScriptValues()
    kept.own.items = [1]
    kept.own.items.append(object())
    with pytest.raises(TypeError, match=r"state\.own\.items cannot be saved"):
        kept.look(is_commit=True)


def test_an_object_that_is_made_anew_is_followed(rank):
    class Meter:
        pass

    Meter.__module__ = "__main__"
    one = rank(meter=None, meter_type=Meter)
    one.main.meter = one.meter_type()
    one.main.meter.total = 1.0
    assert one.commit().record.values["meter.total"] == 1.0
    one.main.meter = one.meter_type()
    one.main.meter.total = 20.0
    saved = one.commit()
    assert saved.record.values["meter.total"] == 20.0
    other = rank(meter=None, meter_type=Meter)
    other.main.meter = other.meter_type()
    other.values.restore(one.saved())
    assert other.main.meter.total == 20.0


def test_a_sampler_that_changes_as_it_is_read_is_named_once(rank):
    class Curriculum:
        share, table = 0.5, None

        def __init__(self):
            self.share, self.epoch, self.table = 0.5, 0, []

        def __iter__(self):
            return iter(range(8))

        def __len__(self):
            return 8

    Curriculum.__module__ = "__main__"
    sampler = Curriculum()
    loader = torch.utils.data.DataLoader(torch.arange(8), sampler=sampler)
    one = rank()
    one.values.read_from(loader)
    sampler.epoch = 1  # as the script sets it before its loop
    assert one.values.changes_of_data(is_first=True) == []
    assert one.values.changes_of_data(is_first=False) == []
    sampler.share += 0.1
    (told,) = one.values.changes_of_data(is_first=False)
    assert told.startswith("`Curriculum.share` changes as data are read, and begins anew")
    sampler.share += 0.1
    assert one.values.changes_of_data(is_first=False) == []


def test_a_value_that_is_assigned_after_a_restore_as_it_was_seen_last_is_seen(rank):
    one = rank(best=None)
    saved = Script.split((one.commit(best=0.5), one.values.content)[1])
    other = rank(best=None)
    other.commit()  # None was seen
    other.values.restore(saved)
    assert other.best == 0.5
    assert other.commit(best=None).record.values == {"best": None}


def test_what_changes_within_a_tuple_is_seen(rank):
    one = rank(fixed=(1, ("a", 2.5)), pair=([], 2))
    assert one.commit().record.values == {}
    one.pair[0].append(1)
    assert set(one.commit().record.values) == {"pair"}
    assert set(one.commit(fixed=(1, ("a", 3.5))).record.values) == {"pair", "fixed"}


def test_changes_in_several_modules_and_in_place_are_seen_together(rank, monkeypatch, tmp_path):
    beside = ModuleType("beside")
    beside.__file__ = str(tmp_path / "beside.py")
    beside.count, beside.history = 0, []
    monkeypatch.setitem(sys.modules, "beside", beside)
    one = rank(n=0, history=[])
    assert one.commit(n=1).record.values == {"n": 1}
    beside.count = 1
    assert set(one.commit().record.values) == {"n", "beside.count"}
    beside.history.append(1)
    one.history.append(1)
    found = one.commit(n=2).record
    assert set(found.values) == {"n", "history", "beside.count", "beside.history"}
    assert found.values["n"] == 2
    one.history.append(2)
    assert one.commit().record.values["history"] == [1, 2]


def test_two_closures_of_one_function_and_what_a_partial_is_given_are_kept_each(rank):
    def counter(by):
        count, seen = 0, []

        def step():
            nonlocal count
            count += by
            seen.append(by)
            return count, len(seen)

        step.__module__ = "__main__"
        return step

    def train(state, options, *, limits):
        pass

    def made():
        return {
            "one": counter(1),
            "other": counter(10),
            "entry": partial(train, limits={}, options=SimpleNamespace(level=0)),
        }

    first = rank(**made())
    first.one(), first.one(), first.other()
    first.entry.keywords["limits"]["top"] = 3
    first.entry.keywords["options"].level = 2
    saved = first.commit()
    again = rank(**made())
    again.values.restore(saved)
    assert (again.one(), again.other()) == ((3, 3), (20, 2))
    assert again.entry.keywords["limits"] == {"top": 3}
    assert again.entry.keywords["options"].level == 2


class Buffer:
    def __init__(self, tensor=None):
        self.tensor = tensor

    def put(self, tensor):
        self.tensor = tensor


def test_buffers_that_have_outgrown_their_place_are_kept_as_values(rank):
    mem, later = Buffer(torch.ones(3)), Buffer(torch.ones(1))
    one = rank(n=0, buffers={"model.mem": mem, "model.later": later})
    assert one.commit(n=1).record.values == {"n": 1}
    one.values.exclude([mem.tensor])  # as it is registered
    one.values.keep_buffers(["model.mem", "model.gone"])
    assert set(one.commit().record.values) == {"n", "state.buffers.model%2Emem"}
    mem.tensor = torch.arange(5.0)
    assert len(one.commit().tensors) == 1
    one.values.keep_buffers(["model.mem", "model.later"])
    saved = one.commit()
    assert not saved.record.late  # they are there since the forward that made them
    there = {"model.mem": Buffer(), "model.later": Buffer(torch.zeros(7))}
    other = rank(n=0, buffers=there)
    other.values.restore(saved)
    assert there["model.mem"].tensor.tolist() == [0, 1, 2, 3, 4]
    assert there["model.later"].tensor.tolist() == [1]
    assert other.commit().record.values.keys() == saved.record.values.keys()
    mem.tensor = torch.zeros(9)
    one.values.rewind()
    assert len(mem.tensor) == 9  # its first size is in another place
    one.values.keep_buffers(())
    assert set(one.commit().record.values) == set()


def test_a_buffer_of_a_module_with_any_name_is_kept(rank):
    one = rank(n=0, buffers={"model.obs/image.mem": Buffer(torch.ones(3))})
    one.values.keep_buffers(["model.obs/image.mem", "model.gone"])
    (name,) = one.commit(n=1).record.values.keys() - {"n"}
    assert one.values.resized.name_of(name) == "model.obs/image.mem"
    assert one.values.resized.asked == ["model.obs/image.mem", "model.gone"]


def test_a_closure_whose_variable_has_no_value_yet(monkeypatch, tmp_path):
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    best = 0.0

    def train():
        return best, late

    values = ScriptValues()
    values.find(train)
    values.look(is_commit=True)
    best = 0.5
    values.look(is_commit=True)
    name = train.__qualname__.rpartition(".<locals>.")[0]
    assert set(Script.split(values.content).record.values) == {f"{name}.best"}
    late = 1
    values.look(is_commit=True)
    assert set(Script.split(values.content).record.values) == {f"{name}.best", f"{name}.late"}
