"""What a script sets on its data set between loops comes back as it was when the loop began."""

import random
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    WeightedRandomSampler,
)

from worker_hooks.data import set_attributes
from worker_hooks.data.feed import Feed
from worker_hooks.data.set_attributes import SetAttributes


class Noisy(Dataset):
    def __init__(self):
        self.share, self.is_mixed, self.chosen, self.rows = 0.8, True, [0], np.zeros(4)
        self.transform = Scale()

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(float(index)) * self.transform.by


class Scale:
    by = 1.0


@pytest.fixture(autouse=True)
def script(monkeypatch, tmp_path):
    """This module is the script's, and no look within a loop is left out for what the last took."""
    monkeypatch.setattr(set_attributes, "_CHEAP_S", 60.0)
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    beside = sys.modules[__name__]
    monkeypatch.setattr(beside, "__file__", str(tmp_path / "data.py"))
    monkeypatch.setitem(sys.modules, "__main__", main)


class Process:
    def __init__(self, **options):
        self.data = Noisy()
        sampler = DistributedSampler(self.data, 1, 0)
        self.loader = DataLoader(self.data, 2, sampler=sampler, **options)
        self.feed = Feed(self.loader)

    def loop(self, epoch):
        self.feed.begin(epoch)
        return [*self.feed.open()]

    def loop_on(self, epoch):
        """One whose workers stay."""
        self.feed.begin(epoch)
        iterator = self.loader._iterator = iter(self.loader)
        return iterator


def test_settings_are_as_they_were_when_the_loop_began():
    old = Process()
    old.loop(0)
    assert "set" not in old.feed.meta()
    old.data.share, old.data.is_mixed, old.data.chosen = float("inf"), False, (3, 4)
    old.data.transform.by = 2.0
    old.loop(1)
    saved = old.feed.meta()
    old.data.share = 0.1  # behind the loop, which runs again
    new = Process()
    new.data.name = "given anew"
    new.feed.restore_set(saved, is_open=False)
    data = new.data
    assert (data.share, data.is_mixed, data.chosen) == (float("inf"), False, (3, 4))
    assert (data.transform.by, data.name) == (2.0, "given anew")
    new.feed.begin(1)
    assert new.feed.meta()["set"] == saved["set"]


def test_what_was_set_and_is_as_at_first_again_stays_saved():
    one = Process()
    one.loop(0)
    one.data.share = 0.5
    one.loop(1)
    one.data.share = 0.8
    one.loop(2)
    assert one.feed.meta()["set"]["dataset.share"] == ("0.8", "0.8")


def test_what_is_too_large_or_an_array_is_named_once():
    one = Process()
    one.loop(0)
    one.data.rows[2] = 1
    one.data.chosen = list(range(900))
    one.loop(1)
    assert [each.split("`")[1] for each in one.feed.unsaved()] == ["Noisy.chosen", "Noisy.rows"]
    one.data.rows[2] = 2
    one.loop(2)
    assert one.feed.unsaved() == []


def test_weights_of_a_sampler_of_torch_are_named():
    sampler = WeightedRandomSampler(torch.ones(12), 6)
    feed = Feed(DataLoader(Noisy(), sampler=sampler))
    feed.begin(0)
    sampler.weights = torch.rand(12)
    feed.begin(1)
    assert [each.split("`")[1] for each in feed.unsaved()] == ["WeightedRandomSampler.weights"]


def test_a_loader_that_is_made_anew_in_each_epoch_reads_the_same_data_set():
    one = Process()
    one.loop(0)
    one.data.share = 0.5
    one.feed = Feed(DataLoader(one.data, 3))
    one.loop(1)
    assert one.feed.meta()["set"] == {"dataset.share": ("0.5", "0.5")}


def test_what_the_first_epoch_alone_sets_is_saved_where_training_was_seen_to_begin():
    one = Process()
    set_attributes.note_first({"script": SimpleNamespace(loader=one.loader)})
    one.data.share = 0.5  # in the first epoch only
    one.loop(0)
    assert one.feed.meta()["set"] == {"dataset.share": ("0.5", "0.5")}


def test_workers_that_stay_go_on_with_what_there_was_when_they_began():
    """They have copies of the data set; what is set later reaches none of them."""
    old, new = (Process(num_workers=1, persistent_workers=True) for _ in "12")
    set_attributes.note_first({"script": SimpleNamespace(loader=old.loader)})
    old.data.share = 0.7
    iterator = old.loop_on(0)
    old.data.share = 0.5
    old.feed.begin(1)
    saved = old.feed.meta()
    new.data.share = 0.3  # at the top of its epoch
    new.feed.restore_set(saved, is_open=False)
    assert new.data.share == 0.7
    new.feed.restore_set(saved, is_open=True)
    assert new.data.share == 0.5
    new.feed.begin(2)
    del iterator
    assert new.feed.meta()["set"]["dataset.share"][0] == "0.5"


def test_what_a_data_set_holds_is_not_copied_to_be_looked_at(monkeypatch):
    """Whole data sets lie in lists and pairs: to encode them took as much memory again."""
    part = Noisy()
    part.volumes = [np.zeros(1 << 16) for _ in range(8)]
    part.text = "a" * (1 << 20)
    part.words = [[1] * 600, [2] * 600]
    encoded = []
    encode = set_attributes.state_json.encode
    monkeypatch.setattr(
        set_attributes.state_json,
        "encode",
        lambda value, key: encoded.append(key) or encode(value, key),
    )
    found = set_attributes._plain_of(part)
    assert not {"volumes", "text", "words"} & {*encoded}
    assert {"share", "is_mixed", "chosen"} <= {*encoded}
    assert isinstance(found["text"], int)


def test_tensors_in_a_tuple_are_no_text_and_another_one_is_a_change():
    part = Noisy()
    part.stats = torch.zeros(3), torch.ones(3)
    was = set_attributes._plain_of(part)["stats"]
    assert isinstance(was, int)  # a text would only name them, and could not be read
    part.stats = torch.zeros(3), torch.ones(3)
    assert set_attributes._plain_of(part)["stats"] != was


def test_a_tensor_made_in_inference_mode_can_be_looked_at():
    part = Noisy()
    with torch.inference_mode():
        part.features = torch.zeros(3)
    assert isinstance(set_attributes._plain_of(part)["features"], int)


@dataclass
class Rows(Dataset):
    """Compared by its fields, so it has no hash."""

    level: int = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


def test_a_data_set_without_a_hash_is_looked_at():
    one = SetAttributes({"dataset": Rows()})
    ((_, part, first),) = one.known()
    part.level = 3
    one.begin(is_fresh=True)
    assert first["level"] != one.changed["dataset.level"][0] == "3"


def test_another_transform_is_named():
    part = Noisy()
    one = SetAttributes({"dataset": part})
    one.begin(is_fresh=True)
    assert one.unsaved() == []
    part.transform = torch.nn.Identity()
    one.begin(is_fresh=True)
    (said,) = one.unsaved()
    assert "`Noisy.transform` is set between loops" in said


def test_a_list_that_is_put_back_is_the_one_that_others_refer_to():
    part = Noisy()
    one = SetAttributes({"dataset": part})
    one.begin(is_fresh=True)
    part.chosen[:] = [4, 5]
    one.begin(is_fresh=True)
    saved = dict(one.changed)
    shared = part.chosen
    shared[:] = [0]
    one.restore(saved, for_workers=False)
    assert part.chosen is shared == [4, 5]


SET_BETWEEN_LOOPS = {
    "a long list of numbers": ([0.0] * 5000, lambda data: data.held.__setitem__(4321, 0.5)),
    "a long list of names": ([f"{n}.png" for n in range(3000)], lambda data: data.held.reverse()),
    "a long list of pairs": ([("a", n) for n in range(3000)], lambda data: data.held.pop()),
    "a long list of lists": ([[n] for n in range(3000)], lambda data: data.held.reverse()),
    "a very long list": (list(range(300_000)), lambda data: data.held.reverse()),
    "a long list of both": ([*range(3000), "a"], lambda data: data.held.reverse()),
    "a dict of numbers": ({"easy": 0.8}, lambda data: data.held.update(easy=0.5)),
    "a long dict of numbers": (
        dict.fromkeys(range(3000), 0.0),
        lambda data: data.held.update({2999: 1.0}),
    ),
    "a set": ({1, 2, 3}, lambda data: data.held.add(4)),
    "a long set": (set(range(3000)), lambda data: data.held.discard(7)),
    "a large array": (np.zeros(1 << 20), lambda data: data.held.__imul__(2.0).__iadd__(1.0)),
}


@pytest.mark.parametrize("what", SET_BETWEEN_LOOPS)
def test_whatever_of_plain_values_is_set_between_loops_comes_back_or_is_named(what):
    value, change = SET_BETWEEN_LOOPS[what]
    one = Process()
    one.data.held = value
    one.loop(0)
    one.loop(1)
    assert one.feed.unsaved() == []
    assert "dataset.held" not in one.feed.meta()["set"]
    change(one.data)
    one.loop(2)
    named = [each.split("`")[1] for each in one.feed.unsaved()]
    is_small = "long" not in what and "large" not in what
    assert named == ([] if is_small else ["Noisy.held"])
    if is_small:
        new = Process()
        new.data.held = type(value)()
        new.feed.restore_set(one.feed.meta(), is_open=False)
        assert new.data.held == one.data.held


def test_a_cache_of_what_was_read_is_no_setting():
    one = Process()
    one.data.cache, one.data.rows_read = {}, [None] * 3000
    one.loop(0)
    one.data.cache[0], one.data.rows_read[0] = torch.zeros(3), np.zeros(3)
    one.loop(1)
    assert one.feed.unsaved() == []
    assert {*one.feed.meta()["set"]} == {"sampler.epoch"}


@pytest.mark.parametrize("value", [[0.0, 0.0], [0.0] * 3000, {0: 0.0}])
def test_what_the_steps_of_a_loop_set_on_its_data_is_named(value):
    """It comes back as it was when the loop began, and no step of it runs again."""
    one = Process()
    one.data.held = value
    one.loop(0)
    assert one.feed.unsaved() == []  # behind the first step
    one.data.held[0] = 1.5
    assert [each.split("`")[1] for each in one.feed.unsaved()] == ["Noisy.held"]
    one.data.held[0] = 2.5
    assert [one.feed.unsaved() for _ in range(9)] == [[]] * 9


def test_what_the_script_has_said_to_be_harmless_is_not_named():
    one = Process()
    one.data.held, one.data.other = [0.0] * 3000, [0.0] * 3000
    one.loop(0)
    one.data.held[0], one.data.other[0] = 1.5, 1.5
    one.loop(1)
    (told,) = one.feed.unsaved(lambda name: name == "Noisy.other")
    assert told.endswith("set it at the top of each epoch, and say state.ignore('Noisy.held')")


def test_an_order_that_a_sampler_shuffles_as_its_loop_begins_is_not_named():
    one = Process()
    one.data.order = list(range(6))
    one.feed.begin(0)
    one.data.order.reverse()  # as its iterator is made: that is done again
    for _ in range(4):
        assert one.feed.unsaved() == []


class Shuffling(Sampler):
    """Shuffles its own list as each loop begins: each order comes from the one before."""

    def __init__(self):
        self.order = list(range(12))

    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self):
        return 12


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_what_a_sampler_does_as_its_loop_begins_is_not_undone_behind_that(options):
    """It is done again as the loop is opened, and the next loop goes on from there."""
    one, new = (Feed(DataLoader(Noisy(), 2, sampler=Shuffling(), **options)) for _ in "12")
    random.seed(5)
    batches = []
    for epoch in range(2):
        one.begin(epoch)
        start = random.getstate()
        iterator = one.open()
        batches = [*iterator]
    saved, order = one.meta(), one._loader.sampler.order
    assert "sampler.order" in saved["set"]
    new.restore_set(saved, is_open=False)
    new.begin(1)
    random.setstate(start)
    assert torch.equal(torch.stack([*new.open()]), torch.stack(batches))
    new.restore_set(saved, is_open=True)
    assert new._loader.sampler.order == order


def test_a_survivor_that_opens_its_first_loop_again_begins_as_it_had_begun():
    feed = Feed(DataLoader(Noisy(), 2, sampler=Shuffling()))
    random.seed(5)
    start = random.getstate()
    feed.begin(0)
    saved, batches = feed.meta(), [*feed.open()]
    assert "sampler.order" not in saved.get("set", {})  # it was as at first
    feed.restore_set(saved, is_open=False)
    feed.begin(0)
    random.setstate(start)
    assert torch.equal(torch.stack([*feed.open()]), torch.stack(batches))
