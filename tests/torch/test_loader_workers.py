"""The randomness inside data workers goes on bitwise, and workers end as they do without hooks."""

# ruff: noqa: NPY002  numpy's functions of old are what is tested

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from multiprocessing import resource_tracker

import numpy as np
import pytest
import torch
from support.data_loops import Owned, Rolls, Stream, check, hooked, plain, seed
from support.jobs import poll
from torch.utils.data import DataLoader, RandomSampler, get_worker_info
from torch.utils.data._utils import signal_handling

from worker_hooks.data import loader_kind
from worker_hooks.data.feed import Feed
from worker_hooks.data.loader_kind import SkipMethod

pytestmark = [
    pytest.mark.usefixtures("own_randomness"),
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


@pytest.fixture(autouse=True, scope="session")
def the_tracker_of_spawn():
    """Started by the first spawn; here once for all tests, so that none seems to leave it behind."""
    resource_tracker.ensure_running()
    yield
    resource_tracker._resource_tracker._stop()


@pytest.fixture(autouse=True)
def no_worker_stays():
    yield
    gc.collect()
    assert multiprocessing.active_children() == []
    for thread in threading.enumerate():
        if thread.name.startswith("QueueFeederThread"):
            thread.join(10)  # it was told to end and is about to


def seed_worker(worker):
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(worker)
    get_worker_info().dataset.late = np.random.default_rng(worker)


class Late(Rolls):
    """The script's own worker_init_fn gives it a generator; it looks at its worker's seed, too."""

    def __getitem__(self, index):
        drawn = torch.tensor([self.late.random(), float(get_worker_info().seed % 2**31)])
        return torch.cat((super().__getitem__(index), drawn))


def loader(dataset, size=2, **options):
    return DataLoader(dataset, size, **({"num_workers": 2} | options))


def generator():
    return torch.Generator().manual_seed(77)


KINDS = {
    "in order": lambda **kw: loader(Rolls(13), **kw),
    "shuffled": lambda **kw: loader(Rolls(13), shuffle=True, **kw),
    "shuffled by a generator": lambda **kw: loader(
        Rolls(13), shuffle=True, generator=generator(), **kw
    ),
    "with replacement by a generator": lambda **kw: loader(
        Rolls(13),
        8,
        sampler=RandomSampler(range(13), replacement=True, num_samples=100, generator=generator()),
        **kw,
    ),
    "generators of the data set": lambda **kw: loader(Owned(13), shuffle=True, **kw),
    "a generator given late": lambda **kw: loader(
        Late(13), shuffle=True, worker_init_fn=seed_worker, **kw
    ),
    "no batches": lambda **kw: loader(Rolls(7), None, shuffle=True, **kw),
    "three workers": lambda **kw: loader(Rolls(15), shuffle=True, **(kw | {"num_workers": 3})),
    "a stream": lambda **kw: loader(Stream(13), **kw),
    "a stream, last dropped": lambda **kw: loader(Stream(13), drop_last=True, **kw),
    "a stream that rejects": lambda **kw: loader(Stream(21, rejects=0.4), **kw),
    "a stream, no batches": lambda **kw: loader(Stream(7), None, **kw),
}
PLACES = (0, 6, 7, 10)  # of the batches of all epochs: begins, an end, a middle


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_comes_once_and_bitwise(kind, persistent_workers):
    places = (*PLACES, 15) if persistent_workers else PLACES
    check(lambda: KINDS[kind](persistent_workers=persistent_workers), at=places)


@pytest.mark.parametrize("leave", [1, 3])
@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "a stream, last dropped"])
def test_loops_that_are_left_early(kind, persistent_workers, leave):
    make = KINDS[kind]
    check(lambda: make(persistent_workers=persistent_workers), at=(0, 1, 3, 5), leave=leave)


class Slow(Rolls):
    """Batches are still being made when the loop is left."""

    def __getitem__(self, index):
        time.sleep(0.03)
        return super().__getitem__(index)


def test_what_workers_were_making_when_a_loop_was_left_is_waited_for():
    check(lambda: loader(Slow(13), persistent_workers=True), at=(3,), epochs=2, leave=3)


@pytest.mark.parametrize("kinds", [("torch",), ("numpy",), ("random",)])
def test_each_source_alone(kinds):
    check(lambda: loader(Rolls(9, kinds), shuffle=True), at=(0, 3, 7), epochs=2)


@pytest.mark.parametrize("prefetch_factor", [1, 4])
def test_however_far_workers_are_ahead(prefetch_factor):
    check(
        lambda: loader(
            Rolls(17), shuffle=True, prefetch_factor=prefetch_factor, persistent_workers=True
        ),
        at=(0, 1, 5, 8, 10),
        epochs=2,
    )


def test_workers_that_are_spawned():
    def make():
        return loader(
            Late(13),
            num_workers=1,
            worker_init_fn=seed_worker,
            multiprocessing_context="spawn",
            persistent_workers=True,
        )

    check(make, at=(9,), epochs=2)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_going_on_twice_in_one_epoch(persistent_workers):
    def make():
        return KINDS["shuffled"](persistent_workers=persistent_workers)

    expected = plain(make)
    _, points = hooked(make, at=(9,))
    first = points[9]
    for later in (0, 1, 2):
        _, again = hooked(make, begin=first, at=(later,))
        second = again[later]
        assert (second.epoch, second.consumed) == (1, first.consumed + later + 1)
        last, _ = hooked(make, begin=second, at=())
        assert last == expected[first.number + second.number :]


def test_going_on_with_a_loader_whose_workers_live():
    made = []

    def make():
        made.append(KINDS["shuffled"](persistent_workers=True))
        return made[-1]

    expected = plain(make)
    _, points = hooked(make, at=(9,))
    rest, _ = hooked(lambda: made[-1], begin=points[9], at=())
    assert rest == expected[points[9].number :]
    made.clear()


def test_lost_states_are_found_again_by_loading(caplog, monkeypatch):
    monkeypatch.setattr(
        "worker_hooks.data.feed.LONG_S", 0.0
    )  # else it is too quick to be a warning

    def make():
        return KINDS["shuffled"]()

    _, points = hooked(make, at=(10,))
    lost = points[10]
    lost.saved["data.worker.1"] = (-1).to_bytes(8, "little", signed=True) + lost.saved[
        "data.worker.1"
    ][8:]
    rest, _ = hooked(make, begin=lost, at=())
    assert rest == plain(make)[lost.number :]
    assert "were loaded and dropped" in caplog.text


def test_another_number_of_workers_goes_on_with_the_same_samples(caplog):
    def make(count):
        return loader(Rolls(13, ()), shuffle=True, num_workers=count)

    _, points = hooked(lambda: make(2), at=(3,), epochs=1)
    place = points[3]
    feed = Feed(make(3))
    seed(9)
    feed.begin(0)
    rest = [repr(batch.tolist()) for batch in feed.open(4, {"workers": 2}, place.saved)]
    assert rest == [
        each for each in plain(lambda: make(2), epochs=1)[place.number :: 2] if each != "end"
    ]
    assert "another number of data workers" in caplog.text


def test_a_torch_with_other_insides_loads_and_drops(monkeypatch):
    monkeypatch.setattr(loader_kind, "can_record", lambda: False)
    make = KINDS["shuffled"]
    assert Feed(make())._skip_method is SkipMethod.LOAD
    check(make, at=(3, 9), epochs=2)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_end_when_a_loop_is_left(persistent_workers):
    made = KINDS["shuffled"](persistent_workers=persistent_workers)
    feed = Feed(made)
    feed.begin(0)
    batches = feed.open()
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close(is_over=True)
    assert len(multiprocessing.active_children()) == (2 if persistent_workers else 0)
    assert list(batches) == []
    del made, feed, batches


def test_the_loader_stays_as_it_was():
    made = KINDS["a generator given late"]()
    before = dict(vars(made))
    feed = Feed(made)
    feed.begin(0)
    batches = feed.open(3, feed.meta(), {})
    assert vars(made) == before
    assert len(made) == 7
    assert len(list(batches)) == 4
    assert vars(made) == before


class Fails(Rolls):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("five")
        return super().__getitem__(index)


def test_errors_of_the_data_set_come_through():
    feed = Feed(loader(Fails(13)))
    feed.begin(0)
    batches = feed.open()
    next(batches)
    next(batches)
    with pytest.raises(KeyError, match="five"):
        next(batches)
    assert feed.consumed == 2
    batches._batches._shutdown_workers()  # the traceback still holds on to it


def test_persistent_workers_of_which_one_died_are_left_to_the_loader():
    feed = Feed(loader(Rolls(40), persistent_workers=True))
    feed.begin(0)
    batches = feed.open()
    next(batches)
    living = feed._loader._iterator
    signal_handling._remove_worker_pids(id(living))  # torch's own handler raises anywhere
    living._worker_pids_set = False
    os.kill(living._workers[1].pid, signal.SIGKILL)
    living._workers[1].join()
    batches.close(is_over=True)
    feed.begin(1)  # would wait for ever for what the dead one was asked for
    assert feed._workers.is_lost
    living._shutdown_workers()


def test_no_descriptor_stays_open():
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    make = KINDS["shuffled"]
    hooked(make, at=(), epochs=1)
    before = descriptors()
    for _ in range(3):
        hooked(make, at=(), epochs=1)
    poll(lambda: descriptors() <= before)  # a queue's thread closes its pipe when it has ended
