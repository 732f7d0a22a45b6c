"""The data position: every batch once and bitwise, from any place, whatever the loader is made of."""

import ctypes
import json
import random
from types import SimpleNamespace

import pytest
import torch
from support.data_loops import EPOCHS, Owned, Rolls, Sized, Stream, check, hooked, plain, seed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from worker_hooks.data import feed as feeds
from worker_hooks.data.feed import Feed
from worker_hooks.data.loader_kind import SkipMethod
from worker_hooks.rng.randomness import Randomness
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.notice import WORKERS_RETURN

pytestmark = pytest.mark.usefixtures("own_randomness")


class Eager(Sampler):
    """Draws as the pass begins, not when the first index is asked for."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())

    def __len__(self):
        return self.size


class Buckets(Sampler):
    """Whole batches in an order drawn from a generator of the sampler's own."""

    def __init__(self, size):
        self.size, self.rng = size, random.Random(3)

    def __iter__(self):
        batches = [list(range(at, min(at + 2, self.size))) for at in range(0, self.size, 2)]
        self.rng.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return (self.size + 1) // 2


def generator():
    return torch.Generator().manual_seed(77)


def shared_generator():
    own = generator()
    return DataLoader(Rolls(9), 2, sampler=RandomSampler(range(9), generator=own), generator=own)


MAPPED = {
    "in order": lambda: DataLoader(Rolls(9), 2),
    "shuffled": lambda: DataLoader(Rolls(9), 2, shuffle=True),
    "shuffled, last dropped": lambda: DataLoader(Rolls(9), 2, shuffle=True, drop_last=True),
    "shuffled by a generator": lambda: DataLoader(Rolls(9), 2, shuffle=True, generator=generator()),
    "generator for all": shared_generator,
    "with replacement": lambda: DataLoader(
        Rolls(9), 2, sampler=RandomSampler(range(9), replacement=True, num_samples=80)
    ),
    "with replacement by a generator": lambda: DataLoader(
        Rolls(9),
        8,
        sampler=RandomSampler(range(9), replacement=True, num_samples=80, generator=generator()),
    ),
    "several permutations": lambda: DataLoader(
        Rolls(9), 2, sampler=RandomSampler(range(9), num_samples=22)
    ),
    "weighted": lambda: DataLoader(
        Rolls(9), 2, sampler=WeightedRandomSampler([1.0] * 9, num_samples=9)
    ),
    "subset": lambda: DataLoader(Rolls(9), 2, sampler=SubsetRandomSampler([1, 3, 5, 7])),
    "eager": lambda: DataLoader(Rolls(9), 2, sampler=Eager(9)),
    "batch sampler": lambda: DataLoader(
        Rolls(9), batch_sampler=BatchSampler(RandomSampler(range(9)), 4, drop_last=False)
    ),
    "buckets": lambda: DataLoader(Rolls(9), batch_sampler=Buckets(9)),
    "a list as sampler": lambda: DataLoader(Rolls(9), 2, sampler=[3, 1, 2]),
    "no batches": lambda: DataLoader(Rolls(5), batch_size=None, shuffle=True),
    "no batches, batches of indices": lambda: DataLoader(
        Rolls(9),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(9)), 4, drop_last=False),
        collate_fn=torch.stack,
    ),
    "distributed": lambda: DataLoader(
        Rolls(9), 2, sampler=DistributedSampler(range(9), num_replicas=2, rank=1)
    ),
    "distributed, in order, last dropped": lambda: DataLoader(
        Rolls(9),
        2,
        sampler=DistributedSampler(range(9), num_replicas=2, rank=0, shuffle=False, drop_last=True),
    ),
    "generators of the data set": lambda: DataLoader(Owned(9), 2, shuffle=True),
    "one batch": lambda: DataLoader(Rolls(3), 8, shuffle=True),
}
LOADED = {
    "a stream": lambda: DataLoader(Stream(9), 2),
    "a stream, last dropped": lambda: DataLoader(Stream(9), 2, drop_last=True),
    "a stream, no batches": lambda: DataLoader(Stream(5), batch_size=None),
    "a stream that rejects": lambda: DataLoader(Stream(9, rejects=0.4), 2),
    "a list": lambda: [1, 2, 3, "four"],
    "a range": lambda: range(4),
    "a tuple of tensors": lambda: tuple(torch.eye(3)),
}


@pytest.mark.parametrize("kind", MAPPED)
def test_every_batch_comes_once_and_bitwise(kind):
    make = MAPPED[kind]
    assert Feed(make())._skip_method is SkipMethod.SAMPLER
    points = check(make)
    assert len(points) == EPOCHS * len(make())


@pytest.mark.parametrize("kinds", [("torch",), ("numpy",), ("random",), ()])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_batch_comes_once_whatever_augments_it(kinds, shuffle):
    check(lambda: DataLoader(Rolls(5, kinds), 2, shuffle=shuffle))


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("kind", LOADED)
def test_what_has_no_sampler_is_loaded_and_dropped(kind):
    make = LOADED[kind]
    assert Feed(make())._skip_method is SkipMethod.LOAD
    seen, _ = hooked(make, at=())
    assert seen == plain(make)
    # A stream that asks the dice whether to go on must not share them with the training.
    check(make, draws="rejects" not in kind)


@pytest.mark.parametrize("leave", [1, 2, 3])
@pytest.mark.parametrize("kind", ["shuffled", "generator for all", "eager", "buckets"])
def test_loops_that_are_left_early(kind, leave):
    check(MAPPED[kind], leave=leave)


def test_skipped_batches_are_not_loaded():
    loaded = []

    class Noted(Rolls):
        def __getitem__(self, index):
            loaded.append(index)
            return super().__getitem__(index)

    def make():
        return DataLoader(Noted(9), 2, shuffle=True)

    _, points = hooked(make, epochs=1)
    loaded.clear()
    hooked(make, epochs=1, begin=points[2])
    assert len(loaded) == 3


def test_generators_are_read_once_and_from_the_place():
    def make():
        return iter([4, 5, 6, 7])

    seen, points = hooked(make, epochs=2)
    assert [each for each in seen if isinstance(each, str)] == ["4", "5", "6", "7", "end", "end"]
    rest, _ = hooked(make, epochs=2, begin=points[1])
    assert rest == seen[points[1].number :]


def test_loading_is_said_once_with_count_and_seconds(caplog, monkeypatch):
    monkeypatch.setattr(
        "worker_hooks.data.feed.LONG_S", 0.0
    )  # else it is too quick to be a warning
    _, points = hooked(LOADED["a stream"], at=(3,))
    hooked(LOADED["a stream"], begin=points[3])
    told = [record.getMessage() for record in caplog.records if "dropped in" in record.message]
    assert told == ["4 consumed batches were loaded and dropped in 0.0 s"]


def test_a_sampler_is_asked_without_a_word(caplog):
    _, points = hooked(MAPPED["shuffled"], at=(3,))
    hooked(MAPPED["shuffled"], begin=points[3])
    assert caplog.records == []


def test_randomness_that_training_and_data_share_is_said(caplog):
    class Lazy(Sampler):
        def __iter__(self):
            left = list(range(9))
            while left:
                yield left.pop(torch.randint(len(left), ()).item())

        def __len__(self):
            return 9

    def make():
        return DataLoader(Rolls(9), 2, sampler=Lazy())

    _, points = hooked(make, at=(3,))
    hooked(make, begin=points[3])
    assert [record.args for record in caplog.records] == [("rng.torch",)]
    caplog.clear()
    check(lambda: DataLoader(Rolls(9, ()), 2, sampler=Lazy()), draws=False)
    assert caplog.records == []


def test_data_that_became_shorter_is_said(caplog):
    _, points = hooked(lambda: DataLoader(Rolls(9), 2), epochs=1)
    seen, _ = hooked(lambda: DataLoader(Rolls(5), 2), epochs=1, begin=points[3])
    assert seen == ["end"]
    assert "ended after" in caplog.text


def test_going_on_twice_in_one_epoch():
    make = MAPPED["generator for all"]
    expected = plain(make)
    _, points = hooked(make)
    first = points[6]
    rest, again = hooked(make, begin=first)
    second = again[1]
    assert (first.epoch, second.epoch, second.consumed) == (1, 1, first.consumed + 2)
    last, _ = hooked(make, begin=second)
    assert last == rest[second.number :] == expected[first.number + second.number :]


@pytest.mark.parametrize("make", [lambda: DataLoader([], 2), list, lambda: DataLoader(Stream(0))])
def test_empty_loaders(make):
    assert hooked(make) == (["end"] * EPOCHS, [])
    feed = Feed(make())
    feed.begin(0)
    assert list(feed.open()) == []
    assert feed.consumed == 0


def test_the_loader_stays_as_it_was():
    loader = MAPPED["shuffled"]()
    before = dict(vars(loader))
    feed = Feed(loader)
    feed.begin(0)
    for _ in feed.open(3, feed.meta(), {}):
        assert len(loader) == 5
    assert vars(loader) == before


def test_the_number_of_batches_is_told_without_a_trace():
    loader = DataLoader(Sized(9), 2)
    assert Feed(loader).length == 5
    assert loader._IterableDataset_len_called is None
    assert Feed([1, 2]).length == 2
    assert Feed(DataLoader(Stream(9), 2)).length is None
    assert Feed(iter([1])).length is None


def test_the_epoch_is_told_to_whatever_asks_for_it_once():
    told = []

    class Asks(SequentialSampler):
        def set_epoch(self, epoch):
            told.append(("sampler", epoch))

    class AsksToo(Rolls):
        def set_epoch(self, epoch):
            told.append(("dataset", epoch))

    feed = Feed(DataLoader(AsksToo(3), sampler=Asks(range(3))))
    feed.begin(4)
    assert told == [("sampler", 4), ("dataset", 4)]


@pytest.mark.parametrize("wrong", [3, None, object(), len])
def test_what_cannot_be_iterated_over_is_refused(wrong):
    with pytest.raises(TypeError, match="such as a DataLoader, not "):
        Feed(wrong)


def test_without_what_was_saved_the_place_alone_is_found():
    make = MAPPED["in order"]
    feed = Feed(make())
    feed.begin(0)
    assert [batch[:, 0].tolist() for batch in feed.open(3)] == [[6.0, 7.0], [8.0]]
    assert feed.consumed == 5


def test_saved_states_that_do_not_fit_are_left_out():
    _, points = hooked(MAPPED["shuffled"], at=(3,))
    saved = {name: state[1:] for name, state in points[3].saved.items()}
    feed = Feed(MAPPED["shuffled"]())
    seed(5)
    feed.begin(0)
    assert len(list(feed.open(3, {}, saved))) == 2


class Stateful:
    """A loader that knows its place, as StatefulDataLoader does."""

    def __init__(self, odd=None):
        self.generator, self.place, self.odd = generator(), 0, odd
        self.began_at = None

    def __iter__(self):
        self.began_at = self.place
        while self.place < 5:
            self.place += 1
            yield self.place, torch.rand(2, generator=self.generator)
        self.place = 0

    def state_dict(self):
        return {
            "place": self.place,
            "rng": self.generator.get_state(),
            "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
            "odd": self.odd,
        }

    def load_state_dict(self, state):
        assert state["scalar"].dtype is torch.bfloat16 and state["scalar"].item() == 2.5
        self.place = state["place"]
        self.generator.set_state(state["rng"])


def test_a_loader_that_knows_its_place_is_asked_for_it():
    made = []

    def make():
        made.append(Stateful())
        return made[-1]

    assert Feed(make()).is_stateful
    points = check(make)
    hooked(make, epochs=1, begin=points[2])
    assert made[-1].began_at == 3


def test_a_loader_with_a_state_that_json_cannot_say_is_read_from_the_begin():
    made = []

    def make():
        made.append(Stateful(odd=object()))
        return made[-1]

    _, points = hooked(make, epochs=1)
    hooked(make, epochs=1, begin=points[2])
    assert made[-1].began_at == 0
    check(make)


def test_a_loader_that_has_a_state_in_name_only_is_read_from_the_begin():
    class Nameless(Stateful):
        def state_dict(self):
            return self.missing

    assert not check(Nameless)[0].meta.count("state")


def test_a_data_loader_that_draws_its_order_late_is_read_from_the_begin():
    class Late(DataLoader):
        """Its iteration is a generator, so nothing is drawn before the first batch."""

        def __iter__(self):
            yield from super().__iter__()

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise AssertionError(state)

    check(lambda: Late(Rolls(9), 2, shuffle=True, generator=generator()))


def test_until_its_first_batch_a_loader_has_the_state_that_it_was_opened_with():
    """It may take it up only then: a rank that dies before is not to begin at another batch."""
    _, points = hooked(Stateful, epochs=1)
    meta = json.loads(points[2].meta)
    feed = Feed(Stateful())
    feed.begin(0)
    feed._loader.load_state_dict = lambda _: None  # it is to load it later
    batches = feed.open(3, meta, points[2].saved)
    assert feed.meta()["state"] == meta["state"]
    next(batches)
    assert feed.meta()["state"] != meta["state"]


def test_a_loader_that_communicates_when_it_is_opened_is_opened_anew(monkeypatch):
    count = 0
    monkeypatch.setattr(feeds, "collectives", lambda: count)

    class Agrees(DataLoader):
        def __iter__(self):
            nonlocal count
            count += 1
            yield from super().__iter__()

    for make, can_stay in ((Agrees, False), (DataLoader, True)):
        feed = Feed(make(Rolls(9), 2))
        feed.is_kept, feed.place = True, (0, 0)
        feed.begin(0)
        batches = feed.open()
        next(batches)
        assert (feed.open_again((0, 0), 1) is not None) == can_stay


def test_a_state_too_large_for_the_page_is_left_out():
    feed = Feed(Stateful(odd="x" * 20_000))
    feed.begin(0)
    next(feed.open())
    assert feed.meta()["state"] is None


def test_a_loader_of_another_kind_is_not_tampered_with():
    class Ahead(DataLoader):
        """Wraps the iteration, as some libraries' loaders do."""

        def __iter__(self):
            yield from super().__iter__()

    assert Feed(Ahead(Rolls(3)))._skip_method is SkipMethod.LOAD
    check(lambda: Ahead(Rolls(9), 2, shuffle=True))


def test_nothing_is_drawn_by_looking():
    make = MAPPED["generator for all"]
    seed(3)
    expected = Randomness().capture()
    seed(3)
    feed = Feed(make())
    feed.begin(0)
    assert feed.entries and feed.meta() and feed.length == 5
    assert Randomness().capture() == expected


def two_loaders(seed):
    """A shuffled loader, and one whose batch sampler draws from a generator of its own."""
    order = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        shuffled=DataLoader(range(8), batch_size=2, shuffle=True, generator=order),
        own=DataLoader(range(8), batch_sampler=Buckets(8)),
    )


def a_feed_of(script, name):
    feed = Feed(getattr(script, name))
    feed.owners = lambda: {"script.": script}
    feed.begin(None)
    return feed


@pytest.mark.parametrize(("under_way", "other"), [("own", "shuffled"), ("shuffled", "own")])
def test_the_generators_of_loaders_that_have_no_turn_continue_in_a_new_process(under_way, other):
    script = two_loaders(3)
    list(getattr(script, other))  # its turn of the epoch
    feed = a_feed_of(script, under_way)
    batches = feed.open()
    next(batches)
    memory = ctypes.create_string_buffer(sum(entry.nbytes for entry in feed.entries))
    feed.fill(ctypes.addressof(memory))
    saved, at = {}, 0
    for entry in feed.entries:
        saved[entry.name] = memory.raw[at : at + entry.nbytes]
        at += entry.nbytes
    meta = feed.meta()
    rest = [*batches, *getattr(script, other), *getattr(script, under_way)]

    script = two_loaders(3)
    again = a_feed_of(script, under_way).open(1, meta, saved)
    now = [*again, *getattr(script, other), *getattr(script, under_way)]
    assert list(map(str, now)) == list(map(str, rest))


class Kept(DataLoader):
    """A loader with persistent workers, without the workers."""

    def _get_iterator(self):
        return Begun()


class Begun:
    """An iteration that asked the process's generator for a seed as it began its workers."""

    def __init__(self):
        self.seed, self.is_shut_down = torch.randint(1 << 30, ()).item(), False

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

    def _reset(self, loader):
        pass

    def _shutdown_workers(self):
        self.is_shut_down = True


def beside_validation():
    script = SimpleNamespace(
        data=DataLoader(range(4)),
        validation=Kept(range(4), num_workers=1, persistent_workers=True),
        another=Kept(range(4), num_workers=1, persistent_workers=True),
    )
    return script, a_feed_of(script, "data")


def test_a_new_process_draws_no_seed_for_workers_that_had_been_started_before():
    script, feed = beside_validation()
    assert feed.begun() == []
    assert "begun" not in feed.meta()
    iter(script.validation)
    (name,) = feed.meta()["begun"]
    assert name.endswith("validation")
    expected = torch.get_rng_state()
    iter(script.validation)
    assert torch.equal(torch.get_rng_state(), expected)  # asked for once

    script, feed = beside_validation()
    torch.set_rng_state(expected)
    feed.restore_others([name])
    iter(script.validation)
    assert torch.equal(torch.get_rng_state(), expected)
    assert script.another._iterator is None


def test_workers_that_the_abandoned_step_started_draw_their_seed_again():
    script, feed = beside_validation()
    before = torch.get_rng_state()
    iterator = iter(script.validation)
    torch.set_rng_state(before)
    feed.restore_others([])
    assert iterator.is_shut_down
    assert iter(script.validation).seed == iterator.seed


def test_a_return_to_a_loader_that_kept_its_workers_is_said_once():
    kept, other = (Kept(range(4), num_workers=1, persistent_workers=True) for _ in range(2))
    values, plain = ScriptValues(), DataLoader(range(4))
    for loader in (kept, kept, other):
        values.read_from(loader)
        assert values.changes_of_data(is_first=True) == []
    values.read_from(kept)
    assert values.changes_of_data(is_first=True) == [WORKERS_RETURN]
    for loader in (plain, kept, other):
        values.read_from(loader)
        assert values.changes_of_data(is_first=True) == []


class Wrapped(DataLoader):
    """A loader of another library's, which has none of torch's attributes."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_a_script_may_hold_a_loader_without_torchs_attributes():
    loader = DataLoader(range(4))
    feed = Feed(loader)
    feed.owners = lambda: {"script.": SimpleNamespace(wrapped=Wrapped([1]), loader=loader)}
    feed.begin(None)
    assert len(list(feed.open())) == 4


def test_without_the_iterators_name_training_goes_on():
    """A torch that lacks it: the first line has said that nothing is promised."""
    other = DataLoader(range(4), num_workers=1, persistent_workers=True)
    del other._iterator
    feed = Feed(DataLoader(range(4)))
    feed.owners = lambda: {"script.": SimpleNamespace(other=other)}
    feed.begin(None)
    feed.restore_others(())
    assert feed.begun() == []
    assert len(list(feed.open())) == 4
